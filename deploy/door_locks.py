"""The doors of one host: the routers of one cluster share them, and no two clusters do.

The kernel spreads what comes to a port over all of a user's processes that want it so, whoever they
are. So a router holds a lock for each of its doors, with the others of its cluster:

    nobody holds it ──▶ does anybody listen there? ──no──▶ its own, and then shared by this name
    it is shared by this name ──────────────────────────▶ shared
    it is shared by another name, or somebody listens ──▶ StartupError

The kernel drops a lock with its process. Who runs without one, and came first, is found as he
listens.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

from cluster.clock import Clock, SystemClock
from cluster.errors import StartupError
from deploy.machine import port_problem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster.config import DeployConfig

_PATIENCE_S = 5.0
"""For others to take their decision, and for a port that was just let go."""
_RETRY_S = 0.05
_MAX_NAME_BYTES = 256


class DoorLocks:
    """Those of one router, until ``release`` or the end of its process."""

    def __init__(self, folder: Path, cluster: str, *, clock: Clock | None = None) -> None:
        """``cluster``: what no other cluster of this host is called."""
        self._folder = folder
        self._cluster = cluster
        self._clock = clock or SystemClock()
        self._held = contextlib.ExitStack()
        self._fds: list[int] = []

    def take(self, config: DeployConfig) -> None:
        """Return once the doors are this cluster's; raises StartupError. Blocks for a moment."""
        doors = config.endpoints
        try:
            for key in ("http_port", "grpc_port"):
                self._take(doors.host, getattr(doors, key), f"endpoints.{key}")
        except StartupError:
            self.release()
            raise

    def keep(self) -> None:
        """Touch the files, now and then: what sweeps a folder of temporary files leaves them."""
        for fd in self._fds:
            os.utime(fd)

    def release(self) -> None:
        """Give them back; idempotent. The doors are closed before."""
        self._fds.clear()
        self._held.close()

    def _take(self, host: str, port: int, key: str) -> None:
        path = self._folder / f"door-{host}-{port}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._held.callback(os.close, fd)
        self._fds.append(fd)
        why = ""
        for _ in self._tries():
            if _try_lock(fd, fcntl.LOCK_EX):
                os.ftruncate(fd, 0)
                problem = port_problem(host, port, key)
                if problem is None:
                    os.pwrite(fd, self._cluster.encode(), 0)
                # Meanwhile another may come first: then it is his name that is there.
                why = str(problem or "")
            if _try_lock(fd, fcntl.LOCK_SH):
                holder = os.pread(fd, _MAX_NAME_BYTES, 0).decode()
                if holder == self._cluster:
                    return
                if holder:
                    raise StartupError(
                        f"port {port} ({key}) is a door of another cluster, on the Ray at "
                        f"{holder}: end that one, or choose another port with --set {key}=PORT"
                    )
            fcntl.flock(fd, fcntl.LOCK_UN)
        raise StartupError(why or f"{path} is held by a router that does not get on: end it")

    def _tries(self) -> Iterator[None]:
        until = self._clock.now() + _PATIENCE_S
        yield
        while self._clock.now() < until:
            time.sleep(_RETRY_S)
            yield


def _try_lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
