"""The processes of a running cluster, from outside: who they are, and how to kill or stop them.

Whoever hosts the cluster is expected to replace what was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil

from cluster.control.facts import Health
from cluster.control.status import get_cluster
from cluster.errors import PdserveError, StartupError
from cluster.trust import ClusterToken
from deploy import processes
from deploy.doors import http_client, http_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.config import Role
    from cluster.control.facts import ClusterView, WorkerView
    from deploy.bench.site import Doors

_LOOK_S = 0.05
_ANSWER_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one process holds."""

    num_files: int
    num_sockets: int
    """TCP, that listen or are connected."""
    num_threads: int
    memory_bytes: int
    """Its own, swapped out or not."""

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Look at a living process of this user."""
        fields = {}
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            fields[name] = value.split()[0] if value.split() else ""
        return cls(
            num_files=sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
            num_sockets=len(psutil.Process(pid).net_connections("tcp")),
            num_threads=int(fields["Threads"]),
            memory_bytes=sum(int(fields[name]) << 10 for name in ("RssAnon", "VmSwap")),
        )


class Victims:
    """Finds the processes of one cluster by its view and by its ports."""

    def __init__(self, doors: Doors) -> None:
        self._endpoints = doors.config.endpoints
        self._config = doors.config
        self._token = ClusterToken.load(doors.config.security)
        self._num_workers = sum(pool.min_count for pool in doors.config.pools)

    def view(self) -> ClusterView | None:
        """Ask the control plane; None where it doesn't answer."""
        address = f"{self._endpoints.host}:{self._endpoints.control_port}"
        try:
            return asyncio.run(get_cluster(address, timeout_s=_ANSWER_S, token=self._token))
        except PdserveError:
            return None

    def num_declared_dead(self) -> float:
        """Return how many workers this control plane has declared dead.

        Raises PdserveError where it doesn't answer.
        """
        view = self.view()
        if view is None:
            raise PdserveError("the control plane does not say who died", stage="bench")
        return view.counters["workers_died"]

    def workers(self) -> list[WorkerView]:
        """Return those that are alive, as far as the control plane can be asked."""
        view = self.view()
        return [] if view is None else [w for w in view.workers if w.health is Health.ALIVE]

    def first(self, role: Role) -> WorkerView:
        """Return the first living worker of a role; raises StartupError without one."""
        found = [w for w in self.workers() if w.worker.role is role]
        if not found:
            raise StartupError(f"no {role.value} worker is there")
        return min(found, key=lambda w: w.worker.worker_id)

    def wait_whole(self, timeout_s: float) -> None:
        """Return when as many workers live as the deploy file has."""
        wait_until(lambda: len(self.workers()) == self._num_workers, timeout_s, "workers missing")

    def wait_heir(self, dead: WorkerView, timeout_s: float) -> WorkerView:
        """Return the living worker that has taken ``dead``'s name."""
        found: list[WorkerView] = []

        def has_come() -> bool:
            found[:] = [w for w in self.workers() if _is_heir(w, dead)]
            return bool(found)

        wait_until(has_come, timeout_s, f"{dead.worker.worker_id} did not come back")
        return found[0]

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the router that answers says that it can serve."""

        def is_ready() -> bool:
            try:
                return http.get(f"{http_url(self._config)}/health/ready").is_success
            except httpx.HTTPError:
                return False

        with http_client(self._config, timeout_s=_ANSWER_S) as http:
            wait_until(is_ready, timeout_s, "no router is ready")

    def control_pid(self) -> int:
        """Return the pid of whoever listens on the control port."""
        return self._listeners(self._endpoints.control_port)[0]

    def router_pids(self) -> list[int]:
        """Return the pids of those that listen on the HTTP port."""
        return self._listeners(self._endpoints.http_port)

    def _listeners(self, port: int) -> list[int]:
        found = {
            each.pid
            for each in psutil.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.pid and each.laddr[1:] == (port,)
        }
        if not found:
            raise StartupError(f"nobody listens on port {port}")
        return sorted(found)


def _is_heir(worker: WorkerView, dead: WorkerView) -> bool:
    is_new = worker.worker.incarnation != dead.worker.incarnation
    return is_new and worker.worker.worker_id == dead.worker.worker_id


def kill(pid: int) -> float:
    """``kill -9``, proven; returns the instant."""
    victim = processes.look_up(pid)
    if victim is None:
        raise StartupError(f"no process {pid} to kill")
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not victim.is_alive(), _ANSWER_S, f"{victim} lives on")
    return killed_at


@contextlib.contextmanager
def paused(pid: int) -> Iterator[float]:
    """Stop a process, proven, for the time of a ``with``; yields the instant."""
    process = psutil.Process(pid)
    stopped_at = time.monotonic()
    process.suspend()
    try:
        is_stopped = lambda: process.status() == psutil.STATUS_STOPPED  # noqa: E731
        wait_until(is_stopped, _ANSWER_S, f"process {pid} runs on")
        yield stopped_at
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def wait_until(is_true: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Look until it is so; other processes have no event to wait for. Raises PdserveError."""
    until = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > until:
            raise PdserveError(f"{what} after {timeout_s:.0f} s", stage="bench")
        time.sleep(_LOOK_S)
