"""Give each worker of a pool its own cores and a stable index, whoever starts it and in any order.

A set of cores is leased through a file lock in the run folder. The kernel drops the lock when its
holder dies, so a worker that was killed leaves its place to its successor.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.clock import SystemClock
from cluster.errors import StartupError
from deploy.locks import FileLock

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

_RETRY_S = 0.05


class CoreLease:
    """A worker's place in its pool, from ``lease_cores`` until ``release`` or the process's end."""

    def __init__(self, index: int, cores: tuple[int, ...], lock: FileLock) -> None:
        self.index = index
        self.cores = cores
        """Empty: not pinned."""
        self._lock = lock

    def release(self) -> None:
        """Give the place back; idempotent."""
        self._lock.release()


def pin_process(cores: Sequence[int], pid: int | None = None) -> None:
    """Bind all threads of a process, and so what they start, to ``cores``; none: no binding.

    Without ``pid`` it is this process.

    Raises StartupError where the machine doesn't let it.
    """
    if not cores:
        return
    # Linux pins threads, not processes: all those that are there, and with them their children.
    pid = os.getpid() if pid is None else pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:
            continue  # it ended meanwhile
        except OSError as error:
            raise StartupError(f"cannot pin to cores {tuple(cores)}: {error.strerror}") from error
    logger.info("pid=%d cores=%s pinned", pid, tuple(cores))


def lease_cores(
    folder: Path,
    pool_name: str,
    cores: Sequence[int],
    cores_per_worker: int,
    count: int,
    wait_s: float = 10.0,
) -> CoreLease:
    """Lease the lowest free place of a pool: its index, and its part of ``cores``.

    Place i takes ``cores[i * cores_per_worker:][:cores_per_worker]``; with no cores it is only the
    index. There are ``count`` places. Waits up to ``wait_s`` for a predecessor that is still dying,
    then raises StartupError.
    """
    if cores and len(cores) < count * cores_per_worker:
        raise StartupError(
            f"pool {pool_name}: {count} workers of {cores_per_worker} cores need "
            f"{count * cores_per_worker} cores, {len(cores)} are named: name more, or lower count"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    clock = SystemClock()
    deadline = clock.now() + wait_s
    while True:
        for index in range(count):
            lock = FileLock.try_take(folder / f"{pool_name}-{index}.lock")
            if lock is not None:
                lock.write(f"{os.getpid()}\n")
                first = index * cores_per_worker
                return CoreLease(index, tuple(cores[first : first + cores_per_worker]), lock)
        if clock.now() >= deadline:
            raise StartupError(
                f"pool {pool_name}: all {count} places are taken ({_holders(folder, pool_name)}); "
                "raise the pool's count, or clear an earlier run with `pdserve down`"
            )
        # Nothing tells of a lock set free but trying it.
        time.sleep(_RETRY_S)


def _holders(folder: Path, pool_name: str) -> str:
    notes = sorted(folder.glob(f"{pool_name}-*.lock"))
    return ", ".join(f"{note.stem}: pid {note.read_text().strip() or '?'}" for note in notes)
