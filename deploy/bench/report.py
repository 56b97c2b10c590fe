"""What a benchmark found, against which bar, as a table and as JSON."""

from __future__ import annotations

import json
import operator
import os
import platform
import statistics
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from deploy.status import table

if TYPE_CHECKING:
    import datetime
    from collections.abc import Sequence

MIN_RUNS = 3
_LIBRARIES = ("torch", "transformers", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What has to hold: the value (in its unit) or the ratio, at least or at most the limit."""

    subject: Literal["value", "ratio"]
    relation: Literal[">=", "<="]
    limit: float

    def holds(self, value: float, ratio: float) -> bool:
        """Whether it does."""
        measured = value if self.subject == "value" else ratio
        compare = operator.ge if self.relation == ">=" else operator.le
        return bool(compare(measured, self.limit))

    def __str__(self) -> str:
        """Return it as people write it."""
        return f"{self.subject} {self.relation} {self.limit:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; ``ratio`` is value by reference."""

    name: str
    what: str
    value: float
    unit: str
    reference: float
    ratio: float
    bar: Bar | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the bar is held; None where there is none."""
        return None if self.bar is None else self.bar.holds(self.value, self.ratio)


@dataclass(frozen=True, slots=True)
class Run:
    """One interleaved run: what ours and the reference gave, in the row's unit."""

    value: float
    reference: float


def row_of(name: str, what: str, unit: str, runs: Sequence[Run], bar: Bar | None = None) -> Row:
    """Return the medians of at least ``MIN_RUNS`` runs; the ratio is the median of theirs."""
    if len(runs) < MIN_RUNS:
        raise ValueError(f"{name}: {len(runs)} runs, {MIN_RUNS} are the least")
    return Row(
        name=name,
        what=what,
        unit=unit,
        value=statistics.median(run.value for run in runs),
        reference=statistics.median(run.reference for run in runs),
        ratio=statistics.median(run.value / run.reference for run in runs),
        bar=bar,
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile (1 to 99) of at least two values, interpolated."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def as_table(rows: Sequence[Row]) -> str:
    """Return rows as an aligned table."""
    head = ("name", "what", "value", "reference", "ratio", "bar", "holds")
    lines = [
        (
            row.name,
            row.what,
            f"{row.value:.2f} {row.unit}",
            f"{row.reference:.2f} {row.unit}",
            f"{row.ratio:.2f}",
            "-" if row.bar is None else str(row.bar),
            {True: "yes", False: "NO", None: "-"}[row.holds],
        )
        for row in rows
    ]
    return table(head, lines)


def as_json(rows: Sequence[Row]) -> str:
    """Return rows as a JSON list of objects.

    ``bar`` is the limit, ``rule`` says what it limits; both are null, and so is ``holds``, where
    a row is there to be compared with only.
    """
    objects = [
        {
            "name": row.name,
            "what": row.what,
            "value": row.value,
            "unit": row.unit,
            "reference": row.reference,
            "ratio": row.ratio,
            "bar": None if row.bar is None else row.bar.limit,
            "rule": None if row.bar is None else str(row.bar),
            "holds": row.holds,
        }
        for row in rows
    ]
    return json.dumps(objects, indent=2) + "\n"


def machine(now: datetime.datetime) -> str:
    """Return date and machine as one line: numbers mean nothing without them."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _LIBRARIES)
    gibibytes = psutil.virtual_memory().total / 2**30
    return (
        f"{now:%Y-%m-%d %H:%M %Z}; {_cpu_name()}, {len(os.sched_getaffinity(0))} cores, "
        f"{gibibytes:.0f} GiB; Linux {platform.release()}; Python {platform.python_version()}, "
        f"{versions}; load {os.getloadavg()[0]:.1f} at the start"
    )


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
