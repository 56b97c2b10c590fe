"""A Ray of several nodes on this machine, in a process of its own: this module as a script.

Its argument is the dashboard's port, 0 for none. It reads one JSON line, a list of nodes
(``num_gpus``, ``resources``, ``labels``), and prints one: the address and each node's raylet, its
pid and the id of its node. It ends with its standard input.

A second argument, JSON as well, are the kinds of nodes that Ray's autoscaler starts and ends
(``node_kinds``).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.e2e import node_kinds
from tests.e2e.plain_cluster import REPO, free_ports, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ENVIRONMENT = {
    # On loopback alone, and asking nobody who they are: both are for one machine.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_worker_niceness": "0",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "HF_HUB_OFFLINE": "1",
}
_SCRIPT = (sys.executable, "-m", "tests.e2e.ray_nodes")
_STORE_BYTES = 80 << 20


class RayNodes:
    """The address, and the raylet of each node by its number; the head is not among them."""

    def __init__(self, address: str, raylets: list[tuple[int, str]], folder: Path) -> None:
        self.address = address
        self.raylet_pids = [pid for pid, _ in raylets]
        self.node_ids = [node_id for _, node_id in raylets]
        self._folder = folder

    def serve_log(self) -> str:
        """Return what Serve's controller has logged so far, the policy's reasons among it."""
        text = ""
        for path in sorted(self._folder.glob("ray/session_latest/logs/serve/controller_*.log*")):
            # One that is being rotated away has its new name the next time.
            with contextlib.suppress(FileNotFoundError):
                text += path.read_text()
        return text


@contextlib.contextmanager
def ray_nodes(
    nodes: Sequence[dict[str, object]],
    *,
    dashboard_port: int = 0,
    autoscaled: node_kinds.Kinds | None = None,
) -> Iterator[RayNodes]:
    """Run a head node and these for the time of a ``with``; no dashboard without a port for it.

    Of the kinds that are ``autoscaled``, by name, Ray has as many as are asked for: the fewest from
    the start.
    """
    # Not pytest's folder: the paths of Ray's sockets must be short.
    with (
        tempfile.TemporaryDirectory(prefix="rn", ignore_cleanup_errors=True) as folder,
        (Path(folder) / "log").open("w") as log,
    ):
        process = subprocess.Popen(
            [*_SCRIPT, str(dashboard_port), *([json.dumps(autoscaled)] if autoscaled else [])],
            cwd=REPO,
            env=os.environ | ENVIRONMENT | {"RAY_TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            process.stdin.write(json.dumps(list(nodes)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, (Path(folder) / "log").read_text()
            told = json.loads(line)
            yield RayNodes(told["address"], told["raylets"], Path(folder))
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            process.stdout.close()


def _run(dashboard_port: int, kinds: node_kinds.Kinds) -> None:
    autoscaled = {}
    if kinds:
        os.environ |= node_kinds.ENVIRONMENT
        file = Path(os.environ["RAY_TMPDIR"]) / "autoscaler.json"
        of_each = {"CPU": 1, "object_store_memory": _STORE_BYTES}
        autoscaled = node_kinds.head_options(kinds, file, free_ports(1)[0], of_each)
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        connect=False,
        head_node_args={
            "num_cpus": 1,
            "include_dashboard": dashboard_port > 0,
            "dashboard_port": dashboard_port or None,
            "object_store_memory": _STORE_BYTES,
            **autoscaled,
        },
    )
    raylets = []
    for node in json.loads(sys.stdin.readline()):
        added = cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES, **node)
        raylets.append((added.all_processes["raylet"][0].process.pid, added.node_id))
    num_nodes = 1 + len(raylets) + sum(kind["min_workers"] for kind in kinds.values())
    wait_until(
        lambda: sum(node["Alive"] for node in cluster.global_state.node_table()) == num_nodes, 60,
        "the fewest nodes are not there", pace_s=0.1,
    )  # fmt: skip
    sys.stdout.write(json.dumps({"address": cluster.address, "raylets": raylets}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    # The autoscaler's nodes are its own children, and would look for the head for a minute.
    started = psutil.Process().children(recursive=True)
    cluster.shutdown()
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    _run(int(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
