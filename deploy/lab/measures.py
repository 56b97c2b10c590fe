"""From what was noted in a play to figures: pure.

With ``a`` the instant at which a client sends and ``t_1 .. t_n`` those at which it receives tokens:

ttft      t_1 - a, whatever happened in between
tpot      (t_n - t_1) / (n - 1) of a request with more than one token
itl       t_i - t_(i-1), all gaps of all requests in one pool
waiting   in the cluster's queues until the request was first computed, as its timeline tells
e2e       t_n - a
offered   requests a second that were due, until the last one was; achieved: that ended well
good      a request that ended well, with ttft and tpot within the objective; of all that were sent
slot use  slots of decoding workers that are taken, by time, as the control plane reports them

A request that failed has no latency and is a miss. Those whose client left as planned count with
what they had received. Nothing is dropped as warm-up: the cluster was warm before the play.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from deploy.lab.play import Play, Record, Sample
    from deploy.lab.workload import Objective, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a request of one group may take at most to be good."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures by name; a figure that nothing speaks for is missing. Names end in their unit."""

    total: dict[str, float] = field(default_factory=dict)
    groups: dict[str, dict[str, float]] = field(default_factory=dict)
    """The same of each kind and tier alone."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two tokens of one stream."""

    began_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        """How long the stream was silent."""
        return self.ended_s - self.began_s


def ttft_s(record: Record) -> float | None:
    """Return the time to the first token; None where none came."""
    return record.arrivals[0] - record.sent_s if record.arrivals else None


def tpot_s(record: Record) -> float | None:
    """Return the mean time of the tokens after the first; None where none came."""
    if len(record.arrivals) < 2:
        return None
    return (record.arrivals[-1] - record.arrivals[0]) / (len(record.arrivals) - 1)


def gaps_of(records: Iterable[Record]) -> list[Gap]:
    """Return all gaps between tokens."""
    return [
        Gap(earlier, later)
        for record in records
        for earlier, later in itertools.pairwise(record.arrivals)
    ]


def limit_of(unloaded: Record, objective: Objective) -> Limit:
    """Return what is good, by what such a request met on an idle cluster."""
    first, each = ttft_s(unloaded), tpot_s(unloaded)
    assert first is not None
    return Limit(
        ttft_s=objective.ttft_factor * first, tpot_s=objective.tpot_factor * (each or first)
    )


def is_good(record: Record, limit: Limit) -> bool:
    """Whether a request ended well and within its limit."""
    first, each = ttft_s(record), tpot_s(record)
    return (
        not record.error
        and first is not None
        and first <= limit.ttft_s
        and (each or 0.0) <= limit.tpot_s
    )


def measure(play: Play, limits: Mapping[str, Limit], workload: Workload) -> Measured:
    """Return the figures of one play; ``limits`` by the group of an ask."""
    records = play.records
    total = _figures(records, limits)
    total["seconds"] = play.seconds
    total["tokens_per_s"] = sum(len(record.arrivals) for record in records) / play.seconds
    total["good_per_s"] = total["good"] / play.seconds
    total["achieved_per_s"] = (total["sent"] - total["failed"]) / play.seconds
    if (due_for_s := max((r.due_s for r in records), default=0.0)) > 0:
        total["offered_per_s"] = total["sent"] / due_for_s
    total["send_lag_max_s"] = max((r.sent_s - r.due_s for r in records), default=0.0)
    total |= slot_use(play.samples, until_s=play.seconds)
    if workload.watched:
        total |= disturbance(records, watched=workload.watched, disturber=workload.disturber)
    groups = {
        group: _figures([r for r in records if r.ask.group == group], limits)
        for group in dict.fromkeys(record.ask.group for record in records)
    }
    return Measured(total=total, groups=groups)


def median_of(runs: Sequence[Measured]) -> Measured:
    """Return the median of each figure over the runs that have it."""
    names = dict.fromkeys(group for run in runs for group in run.groups)
    return Measured(
        total=_medians([run.total for run in runs]),
        groups={
            name: _medians([run.groups[name] for run in runs if name in run.groups])
            for name in names
        },
    )


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: statistics.median(run[name] for run in runs if name in run) for name in names}


def _figures(records: Sequence[Record], limits: Mapping[str, Limit]) -> dict[str, float]:
    num_good = sum(r.ask.group in limits and is_good(r, limits[r.ask.group]) for r in records)
    figures: dict[str, float] = {
        "sent": len(records),
        "failed": sum(bool(record.error) for record in records),
        "good": num_good,
        "attainment": num_good / len(records) if records else 0.0,
    }
    well = [record for record in records if not record.error]
    pools: dict[str, list[float | None]] = {
        "ttft": [ttft_s(record) for record in well],
        "tpot": [tpot_s(record) for record in well],
        "itl": [gap.seconds for gap in gaps_of(well)],
        "waiting": [record.waiting_s for record in well],
        "e2e": [r.arrivals[-1] - r.sent_s for r in well if r.arrivals and not r.has_left],
    }
    for name, values in pools.items():
        figures |= spread(name, [value for value in values if value is not None])
    return figures


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return median, p99 and maximum; nothing where there is nothing."""
    if not values:
        return {}
    return {
        f"{name}_p50_s": statistics.median(values),
        f"{name}_p99_s": percentile(values, 99),
        f"{name}_max_s": max(values),
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile (1 to 99) of at least one value, interpolated."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def slot_use(samples: Sequence[Sample], *, until_s: float) -> dict[str, float]:
    """Return the share of slots in use by time: at all, and while requests waited for one.

    A sample holds until the next one.
    """
    spans = []
    for sample, after in itertools.zip_longest(samples, samples[1:]):
        seconds = (after.at_s if after is not None else until_s) - sample.at_s
        if sample.num_slots and seconds > 0:
            spans.append((sample.num_used / sample.num_slots, seconds, sample.num_waiting > 0))
    figures = {}
    if spans:
        figures["slot_use"] = _mean(spans)
    waited = [span for span in spans if span[2]]
    if waited:
        figures["slot_use_while_waiting"] = _mean(waited)
        figures["slot_use_while_waiting_p50"] = _median(waited)
    return figures


def _mean(spans: Sequence[tuple[float, float, bool]]) -> float:
    return sum(use * s for use, s, _ in spans) / sum(s for _, s, _ in spans)


def _median(spans: Sequence[tuple[float, float, bool]]) -> float:
    """Return the use below which half of the time was spent."""
    half = sum(seconds for _, seconds, _ in spans) / 2
    ordered = sorted(spans)
    passed = 0.0
    for use, seconds, _ in ordered:
        passed += seconds
        if passed >= half:
            return use
    return ordered[-1][0]


def disturbance(records: Sequence[Record], *, watched: str, disturber: str) -> dict[str, float]:
    """Return what requests of one kind do to the gaps of streams of another.

    Counted from when all those streams run. A gap is *beside* a disturber where the two overlap,
    the disturber lasting from its sending to its end; all others are undisturbed.
    """
    streams = [r for r in records if r.ask.kind == watched and r.arrivals and not r.error]
    spans = [(r.sent_s, r.ended_s) for r in records if r.ask.kind == disturber]
    if not streams or not spans:
        return {}
    since = max(record.arrivals[0] for record in streams)
    beside: list[float] = []
    quiet: list[float] = []
    for gap in gaps_of(streams):
        if gap.began_s < since:
            continue
        is_beside = any(gap.began_s < ended and gap.ended_s > sent for sent, ended in spans)
        (beside if is_beside else quiet).append(gap.seconds)
    figures = {**spread("undisturbed", quiet), **spread("beside", beside)}
    if quiet and beside:
        figures["beside_ratio"] = figures["beside_p99_s"] / figures["undisturbed_p50_s"]
    return figures
