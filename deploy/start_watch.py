"""Is a start still getting on? A worker that hangs while it loads fails in no other way.

A start gets on while what it waits for changes, while processes that load come, or while they work:
they compute, read or write. So a large model takes as long as it takes, and one that stands still
is given up.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import psutil

from deploy.cores import holders
from deploy.serve_config import APP_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from deploy.processes import ProcessRef

STUCK_S = 20.0
"""Without any of that: a start that stands still is over 60 s after it began."""
_LEAST_WORK = 1.0
"""Twice of what an idle control plane does in that time."""
_BYTES_PER_UNIT = 64 << 20
_BUILDS = "build_serve_application"
"""What Ray names a process by."""


class StartWatch:
    """Judges by what it is shown; knows no clock."""

    def __init__(self) -> None:
        self._waits_for = ""
        self._moved_at = self._looked_at = 0.0
        self._works: dict[str, float] = {}
        """What each had done when something last moved, or when it was first seen."""

    def look(self, waits_for: str, works: Mapping[str, float], now: float) -> None:
        """Take in how far it is.

        ``works`` are seconds of a core, or as much read or written, by process. The little that an
        idle one does is none, and the idle ones' together is neither.
        """
        self._looked_at = now
        if waits_for != self._waits_for:
            self._waits_for, self._moved_at = waits_for, now
        known = {name: self._works.get(name, work) for name, work in works.items()}
        is_new = bool(works.keys() - self._works.keys())
        if is_new or any(works[name] - known[name] >= _LEAST_WORK for name in works):
            self._moved_at, known = now, dict(works)
        self._works = known

    @property
    def still_s(self) -> float:
        """For how long nothing has moved."""
        return self._looked_at - self._moved_at

    @property
    def is_stuck(self) -> bool:
        """Whether that is too long."""
        return self.still_s >= STUCK_S


def work_of(cores_dir: Path) -> dict[str, float]:
    """Return what each worker that holds a place in a folder of core leases has done so far."""
    found = {}
    for place, holder in holders(cores_dir).items():
        with contextlib.suppress(psutil.Error):  # it may have ended
            found[f"{place} {holder.pid}"] = work(psutil.Process(holder.pid))
    return found


def work_on_app(processes: Iterable[ProcessRef], pools: Iterable[str]) -> dict[str, float]:
    """Return what each process that builds Serve's app, or is a worker, has done so far.

    A worker has a place only once it has loaded what it is made of.
    """
    parts = [_BUILDS, *(f"ServeReplica:{APP_NAME}:{pool}" for pool in pools)]
    found = {}
    for each in processes:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(each.pid)
            title = " ".join(process.cmdline())
            if title.startswith("ray::") and any(part in title for part in parts):
                found[str(each)] = work(process)
    return found


def work(process: psutil.Process) -> float:
    """Return what a process has done so far; raises psutil.Error where it has ended."""
    times, moved = process.cpu_times(), process.io_counters()
    # Weights may be mapped, and are then read without a call; what is fetched is written.
    num_bytes = moved.read_chars + moved.read_bytes + moved.write_chars
    return float(times.user + times.system + num_bytes / _BYTES_PER_UNIT)
