"""The check for machines with a GPU runs anywhere, and says what it ran on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_check_holds_and_needs_neither_ray_nor_a_network(tmp_path):
    told = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "tests" / "gpu" / "check.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    found = json.loads(told.stdout)
    assert [check for check in found["checks"] if not check["holds"]] == []
    assert (told.returncode, found["holds"]) == (0, True)
    assert {check["part"] for check in found["checks"]} == {"exact", "staging", "throughput"}
    assert all(value > 0 for value in found["figures"].values())
    assert (found["note"] is None) == torch.cuda.is_available()
    imported = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
    assert "torch" in imported
    assert not {name for name in imported if name.split(".")[0] in ("ray", "grpc")}
