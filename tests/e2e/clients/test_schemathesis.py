"""Requests made from the OpenAPI document: nothing that it doesn't tell, and never a 500."""

import os
import re
import subprocess

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
# A request may ask for a deadline that nobody can keep.
CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "4xx", 503, 504]
"""
MIN_CASES = 2000
PER_ROUTE = 450
"""Of its fuzzing phase: at most, where a schema has so many."""


@pytest.mark.parametrize("program", ["schemathesis"], indirect=True)
def test_the_document_says_all(program, cluster, tmp_path):
    """CASES P-02, P-10: at least 2,000 made-up requests, good and bad; then all is quiet (Q)."""
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    command = [
        program, "run", f"{cluster.http}/openapi.json", "--checks", ",".join(CHECKS),
        "--max-examples", str(PER_ROUTE), "--workers", "1", "--request-timeout", "60",
        "--seed", "1", "--suppress-health-check", "all", "--no-color",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True,
        text=True, timeout=550, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    generated = re.search(r"Test cases:\s*\n?\s*(\d[\d,]*) generated", done.stdout)
    assert generated, done.stdout[-3000:]
    assert int(generated[1].replace(",", "")) >= MIN_CASES
    cluster.wait_quiet()
