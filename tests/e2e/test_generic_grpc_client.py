"""A generic client needs no stubs of ours: it finds everything by reflection."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.ray]
BUF = os.environ.get("BUF") or shutil.which("buf")


@pytest.mark.skipif(BUF is None or not Path(BUF).exists(), reason="buf is not installed")
def test_buf_curl_generates_and_cancels(on_ray):
    """The README's call for grpcurl, made with another reflection client."""
    call = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge"]
    url = f"http://{on_ray.grpc}/pdserve.v1.Inference"
    asked = json.dumps({"prompt": "Once upon a time", "maxTokens": 8, "timeline": True})
    done = subprocess.run(
        [*call, "--data", asked, f"{url}/Generate"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    decoder, text, messages = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        message, end = decoder.raw_decode(text)
        messages.append(message)
        text = text[end:].lstrip()
    assert messages[-1]["finishReason"] in {"stop", "length"}
    assert messages[-1]["timeline"]["prefillWorker"].startswith("prefill-")
    request_id = json.dumps({"requestId": messages[0]["requestId"]})
    done = subprocess.run(
        [*call, "--data", request_id, f"{url}/Cancel"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "wasRunning" not in done.stdout
