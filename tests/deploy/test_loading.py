"""What the replicas of a node have done so far, as a task on it tells."""

import os
import subprocess
import sys

import pytest

from deploy.loading import work_here


@pytest.mark.parametrize(
    ("title", "is_told"),
    [
        ("ray::ServeReplica:pdserve:decode", True),
        # Before it has a place, and for as long as it takes to import what it is made of.
        ("ray::SERVE_REPLICA::pdserve#decode#wx16:ServeReplica:pdserve:decode.__init__", True),
        ("ray::ServeReplica:other:decode", False),
        ("ray::IDLE", False),
        ("tail :ServeReplica:pdserve:", False),
    ],
)
def test_a_replica_is_told_from_its_constructor_on(title, is_told, monkeypatch):
    monkeypatch.setattr(os, "getppid", os.getpid)  # as if this were the node's raylet
    command = [title, "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        command, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as replica:
        replica.stdout.readline()
        told = work_here("n1")
        replica.communicate(b"\n")
    assert (f"{replica.pid} on n1" in told) is is_told
    assert all(done > 0.0 for done in told.values())
