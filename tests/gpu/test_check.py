"""The check for machines with a GPU runs anywhere, and says what it ran on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tests.gpu import floors

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


@pytest.mark.parametrize(
    ("python", "versions", "expected"),
    [
        ((3, 11), {"torch": "2.11.0+cu130", "transformers": "5.17.0"}, []),
        ((3, 12), {"torch": "3.0", "transformers": "6.0.1"}, []),
        ((3, 10), {"torch": "2.11", "transformers": "5.17"}, ["Python 3.10"]),
        ((3, 13), {"torch": "2.9.1", "transformers": "5.17"}, ["Python 3.13", "torch 2.9.1"]),
        ((3, 12), {"torch": "2.11", "transformers": "4.57.1"}, ["transformers 4.57.1"]),
        ((3, 12), {"transformers": "5.17"}, ["torch"]),
    ],
)
def test_the_check_names_what_is_too_old_or_too_new(python, versions, expected, capsys):
    def version_of(name: str) -> str:
        if name in floors.LOWEST and name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions.get(name, "1.0")

    found = floors.lacking(python, version_of)
    assert [line.partition(":")[0] for line in found] == expected
    assert floors.refuse(found) == 2
    assert capsys.readouterr().err == "".join(f"check: {line}\n" for line in found)
