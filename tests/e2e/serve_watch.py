"""Watches how many workers Serve wants of each deployment, in a process of its own: this module
as a script, which prints a JSON line whenever that changes, and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from deploy.serve_config import APP_NAME
from tests.e2e.plain_cluster import REPO
from tests.e2e.ray_nodes import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

_POLL_S = 0.2


class ServeWatch:
    """The targets, by deployment, as they were told so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.told: list[dict[str, int]] = []
        self._process = process
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def targets(self) -> dict[str, int]:
        """Those of now."""
        return self.told[-1] if self.told else {}

    def join(self) -> None:
        self._reader.join(10)

    def _read(self) -> None:
        for line in self._process.stdout:
            self.told.append(json.loads(line))


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

    join_ray(address)
    client = _get_global_client()
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    told: dict[str, int] = {}
    while not ended.is_set():
        app = client.get_serve_details()["applications"].get(APP_NAME, {"deployments": {}})
        targets = {
            name: details["target_num_replicas"] for name, details in app["deployments"].items()
        }
        if targets != told:
            told = targets
            sys.stdout.write(json.dumps(told) + "\n")
            sys.stdout.flush()
        time.sleep(_POLL_S)
    ray.shutdown()


if __name__ == "__main__":
    _run(sys.argv[1])
