"""What the processes that load have done so far, on every node of the Ray that was joined.

Each node is asked by a task that takes none of its resources. One that does not answer is as one
whose processes do nothing.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import psutil

from deploy.serve_config import APP_NAME
from deploy.start_watch import work

if TYPE_CHECKING:
    from collections.abc import Mapping

_EVERY_S = 2.0
_REPLICA = f":ServeReplica:{APP_NAME}:"
"""In the title that Ray gives a replica's process; its constructor has more before it."""


class ClusterLoading:
    """Asks, and never waits for an answer."""

    def __init__(self) -> None:
        self._asked: dict[str, Any] = {}
        """What is under way, by node."""
        self._told: dict[str, Mapping[str, float]] = {}
        self._asked_at = float("-inf")

    def works(self, now: float) -> dict[str, float]:
        """Return what was last told, and ask again."""
        import ray

        for node_id, ref in list(self._asked.items()):
            if ray.wait([ref], timeout=0)[0]:
                del self._asked[node_id]
                with contextlib.suppress(ray.exceptions.RayError):
                    self._told[node_id] = ray.get(ref)
        if now - self._asked_at >= _EVERY_S:
            self._asked_at = now
            self._ask()
        return {name: done for told in self._told.values() for name, done in told.items()}

    def _ask(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        look: Any = ray.remote(num_cpus=0, max_retries=0)(work_here)
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        alive = {node["NodeID"] for node in nodes if node["Alive"]}
        self._told = {node_id: told for node_id, told in self._told.items() if node_id in alive}
        for node_id in alive - self._asked.keys():
            there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
            self._asked[node_id] = look.options(scheduling_strategy=there).remote(node_id)


def work_here(node_id: str) -> dict[str, float]:
    """Return what the replicas of this node have done, where this runs as a task of Ray's."""
    found = {}
    for process in psutil.Process(os.getppid()).children():
        with contextlib.suppress(psutil.Error, IndexError):
            title = process.cmdline()[0]
            if title.startswith("ray::") and _REPLICA in title:
                found[f"{process.pid} on {node_id}"] = work(process)
    return found
