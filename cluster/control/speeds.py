"""How fast each worker steps, as far as it has shown it while it served.

What a worker measured when it started was measured beside whatever else started then, and what it
showed a while ago may be over. Were either believed for ever, a worker that looked slow once would
get no work, and without work it could never show better. So a speed counts in full while it moves
from report to report, as measured ones do, and from then on loses weight against the mean of its
pool, whose workers run on one kind of hardware, until after ``age_s`` only that is left.

A worker that has shown nothing yet has the mean from the start. Where nobody in a pool has, what
they measured at their start is averaged.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.control.facts import WorkerReport

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.control.worker_entry import WorkerEntry

_NOISE = 0.15
"""Workers that lie so near the mean of their pool count as the mean."""


class Speed(enum.IntEnum):
    """What a worker takes time for."""

    STEP_BASE = 0
    STEP_PER_SEQ = 1
    PREFILL_PER_TOKEN = 2


@dataclass(slots=True)
class _Known:
    """One speed of one worker, in seconds; 0 where nobody has told it."""

    value: float
    moved_at: float | None = None
    """When a report last had another value than the one before; None: never."""
    weight: float = 0.0

    def learn(self, value: float, now: float, age_s: float) -> None:
        if value != self.value:
            self.value, self.moved_at = value, now
        if self.moved_at is not None:
            self.weight = max(0.0, 1.0 - (now - self.moved_at) / age_s)


@dataclass(slots=True)
class _Worker:
    pool: _Pool
    incarnation: str
    told: tuple[float, ...]
    speeds: tuple[_Known, ...]
    has_moved: bool = False
    """Whether it has told anything but what it measured at its start."""
    learned: WorkerReport | None = None
    """The report that was taken in last."""


@dataclass(slots=True)
class _Mean:
    """Of one speed over a pool: by weight, and of all, for when nobody has any."""

    num_known: int = 0
    sum_known: float = 0.0
    num_weighty: int = 0
    sum_weights: float = 0.0
    sum_weighted: float = 0.0
    value: float = 0.0
    """The mean; 0 where nobody knows."""

    def add(self, known: _Known, count: int) -> None:
        """Take one worker's in, or out again with a ``count`` of -1."""
        if known.value <= 0.0:
            return
        self.num_known += count
        self.sum_known += count * known.value
        if known.weight > 0.0:
            self.num_weighty += count
            self.sum_weights += count * known.weight
            self.sum_weighted += count * known.weight * known.value
        if not self.num_weighty:
            self.sum_weights = self.sum_weighted = 0.0  # what rounding left
            self.value = self.sum_known / self.num_known if self.num_known else 0.0
        else:
            self.value = self.sum_weighted / self.sum_weights


@dataclass(slots=True)
class _Pool:
    means: tuple[_Mean, ...] = field(default_factory=lambda: tuple(_Mean() for _ in Speed))

    def add(self, speeds: Iterable[_Known], count: int) -> None:
        for mean, known in zip(self.means, speeds, strict=True):
            mean.add(known, count)


class SpeedTable:
    """The speeds of all workers; what one report changes costs the same however many there are."""

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s
        self._workers: dict[str, _Worker] = {}
        self._pools: dict[str, _Pool] = {}

    def learn(self, entry: WorkerEntry) -> None:
        """Take in what a worker says of itself now."""
        registration, worker = entry.registration, self._workers.get(entry.worker_id)
        if worker is not None and worker.incarnation != registration.incarnation:
            self.forget(entry.worker_id)
            worker = None
        if worker is not None and worker.learned is entry.report:
            return
        if worker is None:
            pool = self._pools.get(registration.pool)
            if pool is None:
                pool = self._pools[registration.pool] = _Pool()
            # Its first report repeats what it measured at its start, unless it has served already.
            told = _at_start(entry)
            started = tuple([_Known(value) for value in told])
            worker = _Worker(pool, registration.incarnation, told, started)
            self._workers[entry.worker_id] = worker
            pool.add(started, 1)
        worker.learned = entry.report
        told = _now(entry)
        if worker.has_moved or told != worker.told:
            worker.has_moved, worker.told = True, told
            worker.pool.add(worker.speeds, -1)
            for known, value in zip(worker.speeds, told, strict=True):
                known.learn(value, entry.reported_at, self._age_s)
            worker.pool.add(worker.speeds, 1)

    def forget(self, worker_id: str) -> None:
        """Drop a worker that is gone."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            worker.pool.add(worker.speeds, -1)

    def level(self, entry: WorkerEntry, speed: Speed) -> float:
        """Return the seconds to count with; 0 where nobody in its pool knows."""
        worker = self._workers.get(entry.worker_id)
        if worker is None:
            pool = self._pools.get(entry.registration.pool)
            return 0.0 if pool is None else pool.means[speed].value
        known, mean = worker.speeds[speed], worker.pool.means[speed].value
        if known.value <= 0.0 or not known.weight:
            return mean
        own = known.weight * known.value + (1.0 - known.weight) * mean
        return mean if abs(own - mean) <= _NOISE * mean else own


def _at_start(entry: WorkerEntry) -> tuple[float, ...]:
    registration = entry.registration
    return (
        registration.step_base_s, registration.step_per_seq_s, registration.prefill_per_token_s,
    )  # fmt: skip


def _now(entry: WorkerEntry) -> tuple[float, ...]:
    report, start = entry.report, entry.registration
    return (
        report.step_base_s or start.step_base_s,
        report.step_per_seq_s or start.step_per_seq_s,
        report.prefill_per_token_s or start.prefill_per_token_s,
    )
