"""Runs aiperf, an independent benchmark client, against a cluster."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def run_aiperf(
    program: Path, cluster: Any, folder: Path, *, model: str, tokenizer: Path, endpoint: str,
    num_requests: int = 20,
) -> dict[str, Any]:  # fmt: skip
    """Profile an endpoint with streams of 16 tokens, and return its report; nothing failed."""
    command = [
        program, "profile", "--model", model, "--url", cluster.http,
        "--endpoint-type", endpoint, "--streaming", "--tokenizer", str(tokenizer),
        "--request-count", str(num_requests), "--concurrency", "4",
        "--synthetic-input-tokens-mean", "24", "--output-tokens-mean", "16",
        "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder), "--ui", "none",
    ]  # fmt: skip
    # A local tokenizer is found only where these are not set; nothing is downloaded for it.
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {k: v for k, v in os.environ.items() if k not in offline}
    done = subprocess.run(
        command, env={**environment, "HOME": str(folder)}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    (report,) = folder.rglob("profile_export_aiperf.json")
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["request_count"]["avg"] == num_requests
    assert not found.get("error_summary"), found["error_summary"]
    assert found["output_sequence_length"]["avg"] > 0
    assert found["time_to_first_token"]["p99"] > 0
    return found
