"""An independent benchmark client finds what it needs: models, streams, usage, ignore_eos."""

import json
import os
import subprocess

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
NUM_REQUESTS, NUM_TOKENS = 20, 16


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("program", ["aiperf"], indirect=True)
def test_aiperf_measures_without_special_flags(program, endpoint, cluster, tiny_llama, tmp_path):
    """Each request is answered with the tokens that were asked for."""
    command = [
        program, "profile", "--model", "tiny", "--url", cluster.http,
        "--endpoint-type", endpoint, "--streaming", "--tokenizer", str(tiny_llama),
        "--request-count", str(NUM_REQUESTS), "--concurrency", "4",
        "--synthetic-input-tokens-mean", "24", "--output-tokens-mean", str(NUM_TOKENS),
        "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(tmp_path), "--ui", "none",
    ]  # fmt: skip
    # A local tokenizer is found only where these are not set; nothing is downloaded for it.
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {k: v for k, v in os.environ.items() if k not in offline}
    done = subprocess.run(
        command, env={**environment, "HOME": str(tmp_path)}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    (report,) = tmp_path.rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS
    assert not found.get("error_summary"), found["error_summary"]
    assert found["output_sequence_length"]["avg"] > 0
    assert found["time_to_first_token"]["p99"] > 0
    cluster.wait_quiet()
