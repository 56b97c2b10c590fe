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

from tests.gpu import check, floors

ROOT = Path(__file__).resolve().parents[2]
NO_NETWORK = """
import os, socket, sys

def refuse(event, args):
    is_inet = event == "socket.connect" and args[0].family != socket.AF_UNIX
    if is_inet or event == "socket.getaddrinfo":
        os.write(2, f"{event} {args[1:]}".encode())
        os._exit(77)

sys.addaudithook(refuse)
"""
"""Ends a process that would use one: an error might be swallowed."""


def run_alone(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, where it ends as soon as it asks for a name or an address."""
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
    )


@pytest.mark.slow
def test_the_check_holds_and_needs_neither_ray_nor_a_network(tmp_path):
    asks = "import socket; socket.create_connection(('127.0.0.1', 9))"
    assert run_alone(tmp_path, "-c", asks).returncode == 77
    told = run_alone(tmp_path, "-X", "importtime", str(ROOT / "tests" / "gpu" / "check.py"))
    assert told.returncode != 77, told.stderr[-200:]
    found = json.loads(told.stdout)
    assert [check for check in found["checks"] if not check["holds"]] == []
    assert (told.returncode, found["holds"]) == (0, True)
    parts = {"exact", "staging", "swap", "throughput"}
    assert {check["part"] for check in found["checks"]} == parts
    assert all(value > 0 for value in found["figures"].values())
    assert (found["note"] is None) == torch.cuda.is_available()
    imported = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
    assert "torch" in imported
    assert not {name for name in imported if name.split(".")[0] in ("ray", "grpc")}


@pytest.mark.parametrize(("seconds", "holds"), [(360.0, True), (360.1, False)])
def test_a_check_that_takes_more_than_six_minutes_does_not_hold(seconds, holds):
    report = check.Report("cpu")
    report.check("exact", "nothing", lambda: None)
    assert report.holds(seconds) is json.loads(report.as_json(seconds))["holds"] is holds


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
