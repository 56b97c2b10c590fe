"""Is a start still getting on? A worker that hangs while it loads fails in no other way.

A start gets on while what it waits for changes, or while the processes that load work: they compute
or read. So a large model takes as long as it takes, and one that stands still is given up.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

STUCK_S = 30.0
"""Without any of that."""
_LEAST_WORK = 1.0
_BYTES_PER_UNIT = 64 << 20


class StartWatch:
    """Judges by what it is shown; knows no clock."""

    def __init__(self) -> None:
        self._waits_for = ""
        self._works: dict[str, float] = {}
        self._moved_at: float | None = None

    def is_stuck(self, waits_for: str, works: Mapping[str, float], now: float) -> bool:
        """Whether nothing has moved for long.

        ``works`` are seconds of a core, or as much read, by process. The little that an idle one
        does is none, and the idle ones' together is neither.
        """
        has_worked = any(
            abs(work - self._works.get(name, 0.0)) >= _LEAST_WORK for name, work in works.items()
        )
        if self._moved_at is None or has_worked or waits_for != self._waits_for:
            self._waits_for, self._works, self._moved_at = waits_for, dict(works), now
        return now - self._moved_at >= STUCK_S


def work_of(cores_dir: Path) -> dict[str, float]:
    """Return what each worker that holds a place in a folder of core leases has done so far."""
    return {path.name: _work(path) for path in cores_dir.glob("*.lock")}


def _work(lease: Path) -> float:
    work = 0.0
    # It may not have written itself down yet, and may have ended.
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int(lease.read_text()))
        times = process.cpu_times()
        work = times.user + times.system
        work += process.io_counters().read_chars / _BYTES_PER_UNIT
    return work
