"""What a comparison found: as a table, and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.lab.configurations import Configuration
from deploy.lab.measures import Limit, Measured, median_of
from deploy.lab.play import Play
from deploy.lab.workload import Workload
from deploy.status import table


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one configuration."""

    configuration: Configuration
    runs: tuple[Measured, ...] = ()
    play: Play | None = None
    """The first run's notes, for pictures."""
    failure: str = ""
    """Why it was not measured, or not to its end."""

    @property
    def name(self) -> str:
        """The configuration's."""
        return self.configuration.name

    @property
    def median(self) -> Measured:
        """The median of each figure over the runs."""
        return median_of(self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A whole comparison."""

    workload: Workload
    outcomes: tuple[Outcome, ...]
    limits: Mapping[str, Limit]
    seed: int
    scale: float = 1.0
    """Of the workload's own length."""
    num_cores: int
    machine: str
    """Date and machine: figures mean nothing without them."""

    @property
    def has_failed(self) -> bool:
        """Whether something was not measured, or a request failed."""
        return any(
            outcome.failure or outcome.median.total.get("failed") for outcome in self.outcomes
        )


_HEAD = (
    "configuration", "ok", "failed", "TTFT p50", "p99", "TPOT p50", "ITL p50", "p99", "max",
    "waiting p50", "max", "slot use", "while waiting", "good/s", "good",
)  # fmt: skip
_COLUMNS = (
    "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "itl_p50_s", "itl_p99_s", "itl_max_s",
    "waiting_p50_s", "waiting_max_s",
)  # fmt: skip
_GROUP_HEAD = ("configuration", "requests", "sent", "failed", "TTFT p50", "waiting p50", "max",
               "E2E p50", "good")  # fmt: skip
_GROUP_COLUMNS = ("ttft_p50_s", "waiting_p50_s", "waiting_max_s", "e2e_p50_s")
_BESIDE_HEAD = ("configuration", "undisturbed p50", "beside p50", "p99", "max", "p99 / undisturbed")
_FEW = 100
"""Of fewer requests one in a hundred is none."""
_BESIDE_COLUMNS = ("undisturbed_p50_s", "beside_p50_s", "beside_p99_s", "beside_max_s")


def as_text(results: Results) -> str:
    """Return the tables, with what they mean and where they were measured."""
    workload = results.workload
    num_runs = max((len(outcome.runs) for outcome in results.outcomes), default=0)
    parts = [
        f"{workload.name}: {workload.title}\n{results.machine}",
        f"arrivals: {workload.arrivals}{scaled(results)}; seed {results.seed}; each figure the "
        f"median of {num_runs} run(s); {results.num_cores} cores each",
        table(_HEAD, total_rows(results)),
        table(_GROUP_HEAD, group_rows(results)),
    ]
    if rows := beside_rows(results):
        about = f"gaps of {workload.watched}s beside {workload.disturber}s"
        parts.append(f"{about}\n{table(_BESIDE_HEAD, rows)}")
    limits = "; ".join(
        f"{group}: TTFT {limit.ttft_s * 1e3:.0f} ms, TPOT {limit.tpot_s * 1e3:.1f} ms"
        for group, limit in results.limits.items()
    )
    objective = workload.objective
    parts.append(
        f"good: TTFT within {objective.ttft_factor:g} and TPOT within {objective.tpot_factor:g} "
        f"times what an idle cluster took ({limits})"
    )
    parts.append("\n".join(notes(results)))
    parts += [f"{each.name}: {each.failure}" for each in results.outcomes if each.failure]
    return "\n\n".join(parts) + "\n"


def notes(results: Results) -> list[str]:
    """Return what the tables have to be read with: the rates, and how much a p99 says."""
    told = []
    for outcome in results.outcomes:
        if total := outcome.median.total:
            offered = f"{total['offered_per_s']:.2f}/s" if "offered_per_s" in total else "at once"
            told.append(
                f"{outcome.name}: offered {offered}, achieved {total['achieved_per_s']:.2f}/s, "
                f"sent {milliseconds(total['send_lag_max_s'])} late at most"
            )
    num_sent = min((o.median.total["sent"] for o in results.outcomes if o.median.total), default=0)
    if 0 < num_sent < _FEW:
        told.append(
            f"a p99 of {num_sent:.0f} requests is close to their maximum: of TTFT, TPOT and "
            "waiting read the medians; gaps are many more"
        )
    return told


def total_rows(results: Results) -> list[tuple[str, ...]]:
    """Return a line for each configuration, cells as people read them."""
    rows = []
    for outcome in results.outcomes:
        total = outcome.median.total
        if not total:
            rows.append((outcome.name, "-", "not measured", *[""] * (len(_HEAD) - 3)))
            continue
        rows.append(
            (
                outcome.name,
                f"{total['sent'] - total['failed']:.0f}",
                f"{total['failed']:.0f}",
                *(milliseconds(total.get(name)) for name in _COLUMNS),
                share(total.get("slot_use")),
                share(total.get("slot_use_while_waiting_p50")),
                f"{total['good_per_s']:.2f}",
                share(total["attainment"]),
            )
        )
    return rows


def group_rows(results: Results) -> list[tuple[str, ...]]:
    """Return a line for each configuration and kind of request."""
    return [
        (
            outcome.name,
            group,
            f"{figures['sent']:.0f}",
            f"{figures['failed']:.0f}",
            *(milliseconds(figures.get(name)) for name in _GROUP_COLUMNS),
            share(figures["attainment"]),
        )
        for outcome in results.outcomes
        for group, figures in outcome.median.groups.items()
    ]


def beside_rows(results: Results) -> list[tuple[str, ...]]:
    """Return a line for each configuration in which streams were disturbed."""
    rows = []
    for outcome in results.outcomes:
        total = outcome.median.total
        if "beside_ratio" in total:
            cells = (milliseconds(total.get(name)) for name in _BESIDE_COLUMNS)
            rows.append((outcome.name, *cells, f"{total['beside_ratio']:.2f}"))
    return rows


def scaled(results: Results) -> str:
    """Return how much longer or shorter than its own length a workload was; mostly nothing."""
    return "" if results.scale == 1.0 else f", scaled by {results.scale:g}"


def milliseconds(value_s: float | None) -> str:
    """Return a duration as a cell."""
    return "-" if value_s is None else f"{value_s * 1e3:.1f} ms"


def share(value: float | None) -> str:
    """Return a share as a cell."""
    return "-" if value is None else f"{value:.0%}"


HEADS = {"total": _HEAD, "groups": _GROUP_HEAD, "beside": _BESIDE_HEAD}


def as_json(results: Results) -> str:
    """Return everything but the single tokens; durations are seconds.

    ``slots``: what the control plane said of slots and queue in the first run, over time.
    """
    workload = results.workload
    tree: dict[str, Any] = {
        "workload": workload.name,
        "title": workload.title,
        "arrivals": workload.arrivals,
        "seed": results.seed,
        "scale": results.scale,
        "cores": results.num_cores,
        "machine": results.machine,
        "limits": {group: dataclasses.asdict(limit) for group, limit in results.limits.items()},
        "configurations": [_outcome(outcome) for outcome in results.outcomes],
    }
    return json.dumps(tree, indent=2) + "\n"


def _outcome(outcome: Outcome) -> dict[str, Any]:
    configuration = outcome.configuration
    return {
        "name": configuration.name,
        "what": configuration.what,
        "link_bytes_per_s": configuration.link_bytes_per_s,
        "failure": outcome.failure or None,
        "median": dataclasses.asdict(outcome.median),
        "runs": [dataclasses.asdict(run) for run in outcome.runs],
        "slots": [
            dataclasses.asdict(sample) for sample in (outcome.play.samples if outcome.play else ())
        ],
        "errors": [
            {"group": record.ask.group, "error": record.error}
            for record in (outcome.play.records if outcome.play else ())
            if record.error
        ],
    }
