"""Give each worker of a pool its own cores and a stable index, whoever starts it and in any order.

A set of cores is leased through a file lock in the run folder. The kernel drops the lock when its
holder dies, so a worker that was killed leaves its place to its successor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cluster.clock import SystemClock
from cluster.errors import StartupError
from deploy.locks import FileLock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


class Holder(NamedTuple):
    """Who has a place, in its own words."""

    pid: int
    leaves_s: float
    """So long it may take to leave once it is told to."""


def lease_cores(  # noqa: PLR0913 (a place, and how long to wait for it)
    folder: Path,
    pool_name: str,
    cores: Sequence[int],
    cores_per_worker: int,
    count: int,
    *,
    leaves_s: float = 0.0,
    wait_s: float = 10.0,
) -> CoreLease:
    """Lease the lowest free place of a pool: its index, and its part of ``cores``.

    Place i takes ``cores[i * cores_per_worker:][:cores_per_worker]``; with no cores it is only the
    index. There are ``count`` places. ``leaves_s``: so long this worker may take to leave.

    A predecessor may be leaving still, and may have another deploy file: waits for as long as those
    who have the places say that they may take, and ``wait_s`` more; then raises StartupError.
    """
    if cores and len(cores) < count * cores_per_worker:
        raise StartupError(
            f"pool {pool_name}: {count} workers of {cores_per_worker} cores need "
            f"{count * cores_per_worker} cores, {len(cores)} are named: name more, or lower count"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    clock = SystemClock()
    began = clock.now()
    while True:
        for index in range(count):
            lock = FileLock.try_take(folder / f"{pool_name}-{index}.lock")
            if lock is not None:
                lock.write(f"{os.getpid()} {leaves_s:g}\n")
                first = index * cores_per_worker
                return CoreLease(index, tuple(cores[first : first + cores_per_worker]), lock)
        held = _held(folder, pool_name, count)
        longest_s = max((holder.leaves_s for holder in held.values()), default=0.0)
        if clock.now() - began >= wait_s + longest_s:
            told = ", ".join(f"{place}: pid {holder.pid}" for place, holder in held.items())
            raise StartupError(
                f"pool {pool_name}: all {count} places are taken ({told}); "
                "raise the pool's count, or clear an earlier run with `pdserve down`"
            )
        # Nothing tells of a lock set free but trying it.
        time.sleep(_RETRY_S)


def holders(folder: Path) -> dict[str, Holder]:
    """Return who has, or last had, each place of any pool; a place is named as its lock is."""
    return _read(folder.glob("*.lock"))


def _held(folder: Path, pool_name: str, count: int) -> dict[str, Holder]:
    return _read(folder / f"{pool_name}-{index}.lock" for index in range(count))


def _read(paths: Iterable[Path]) -> dict[str, Holder]:
    found = {}
    for path in paths:
        # It may not have written itself down yet.
        with contextlib.suppress(OSError, ValueError):
            pid, leaves_s = path.read_text().split()
            found[path.stem] = Holder(int(pid), float(leaves_s))
    return found
