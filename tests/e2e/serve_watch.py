"""Watches how many workers Serve wants of each deployment, and which nodes there are, in a process
of its own: this module as a script, which prints a JSON line whenever that changes, and ends with
its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.serve_config import APP_NAME
from tests.e2e.plain_cluster import REPO
from tests.e2e.ray_nodes import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

_POLL_S = 0.2
_ACCELERATOR = "accelerator_type:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What there was at one instant."""

    at: float
    """By ``time.monotonic``, which all processes of a machine share."""
    targets: dict[str, int]
    """By deployment."""
    nodes: dict[str, int]
    """By the accelerator that they have."""


class ServeWatch:
    """What was told so far, each change once."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.told: list[Told] = []
        self._process = process
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def now(self) -> Told:
        return self.told[-1] if self.told else Told(at=0.0, targets={}, nodes={})

    def join(self) -> None:
        self._reader.join(10)

    def _read(self) -> None:
        for line in self._process.stdout:
            self.told.append(Told(**json.loads(line)))


@contextlib.contextmanager
def serve_watch(address: str) -> Iterator[ServeWatch]:
    """Watch the app on the Ray at this address for the time of a ``with``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.serve_watch", address],
        cwd=REPO,
        env=os.environ | ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    watch = ServeWatch(process)
    try:
        yield watch
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        watch.join()
        process.stdout.close()


def _run(address: str) -> None:
    import ray
    from ray.serve.context import _get_global_client

    from deploy.host_ray import join_ray

    # Ray prints what its autoscaler does.
    out, sys.stdout = sys.stdout, sys.stderr
    join_ray(address)
    client = _get_global_client()
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    told: tuple[object, object] | None = None
    while not ended.is_set():
        app = client.get_serve_details()["applications"].get(APP_NAME, {"deployments": {}})
        targets = {
            name: details["target_num_replicas"] for name, details in app["deployments"].items()
        }
        nodes = Counter(
            resource.removeprefix(_ACCELERATOR)
            for node in ray.nodes()
            if node["Alive"]
            for resource in node["Resources"]
            if resource.startswith(_ACCELERATOR)
        )
        if (targets, nodes) != told:
            told = targets, nodes
            line = {"at": time.monotonic(), "targets": targets, "nodes": nodes}
            out.write(json.dumps(line) + "\n")
            out.flush()
        time.sleep(_POLL_S)
    ray.shutdown()


if __name__ == "__main__":
    _run(sys.argv[1])
