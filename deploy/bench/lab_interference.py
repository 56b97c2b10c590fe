"""``lab-interference``: what long prompts do to running streams, by how the same cores are used.

The policy lab's workload ``interference`` on its three configurations, each in a cluster of its
own: two colocated workers that take a prompt of 2,048 tokens in one step, two that take 512 tokens
of it in a step, and one prefill worker with one decode worker. The value is the p99 of all gaps of
the streams that overlap a prompt (from its sending to its end), in one pool; the reference is the
median of their other gaps, in the same run. Streams are fresh in every run, since a decode step
grows with context.

The maximum, and what the prompts themselves wait for their first token, are printed as well: one
core that prefills is slower than two, and that is what disaggregation pays.
"""

from __future__ import annotations

import os
import statistics
from typing import TYPE_CHECKING

from cluster.errors import EngineFault
from deploy.bench.report import MIN_RUNS, Bar, Row, Run, row_of
from deploy.lab import ready
from deploy.lab.configurations import Base
from deploy.lab.runner import Experiment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deploy.bench.site import Site
    from deploy.lab.measures import Measured
    from deploy.lab.results import Outcome

NAME = "lab-interference"
_ISOLATED = Bar(subject="ratio", relation="<=", limit=1.5)
_BETTER = Bar(subject="ratio", relation="<=", limit=0.99)
_SPLIT, _CHUNKED, _WHOLE = "disaggregated", "chunked", "unchunked"


def measure(site: Site) -> list[Row]:
    """Return the rows of all three; raises EngineFault where one could not be measured."""
    comparison = ready.comparison("interference")
    base = Base(cores=tuple(sorted(os.sched_getaffinity(0))), model=str(site.folder))
    experiment = Experiment(
        comparison.workload, comparison.configurations(base), seed=0, progress=site.progress
    )
    return rows_of(experiment.run(MIN_RUNS))


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return the rows of three outcomes."""
    runs = {}
    for outcome in outcomes:
        num_failed = sum(int(run.total["failed"]) for run in outcome.runs)
        failure = outcome.failure or (f"{num_failed} requests failed" if num_failed else "")
        if failure:
            raise EngineFault(f"{outcome.name}: {failure}", stage="bench")
        runs[outcome.name] = outcome.runs
    return [
        _gaps_row(_SPLIT, runs[_SPLIT], "p99", _ISOLATED),
        _gaps_row(_CHUNKED, runs[_CHUNKED], "p99", None),
        _gaps_row(_WHOLE, runs[_WHOLE], "p99", None),
        _order_row(_SPLIT, _CHUNKED, runs[_SPLIT], runs[_CHUNKED]),
        _order_row(_CHUNKED, _WHOLE, runs[_CHUNKED], runs[_WHOLE]),
        *(_gaps_row(name, runs[name], "max", None) for name in (_SPLIT, _CHUNKED, _WHOLE)),
        *(
            _first_token_row(_SPLIT, other, runs[_SPLIT], runs[other])
            for other in (_CHUNKED, _WHOLE)
        ),
    ]


def _gaps_row(name: str, runs: Sequence[Measured], figure: str, held: Bar | None) -> Row:
    pairs = [
        Run(_of(run, f"beside_{figure}_s") * 1e3, _of(run, "undisturbed_p50_s") * 1e3)
        for run in runs
    ]
    what = f"{name}: gap {figure} of streams beside prompts, vs undisturbed median"
    return row_of(NAME, what, "ms", pairs, held)


def _order_row(
    better: str, worse: str, ours: Sequence[Measured], theirs: Sequence[Measured]
) -> Row:
    pairs = [
        Run(_of(our, "beside_ratio"), _of(their, "beside_ratio"))
        for our, their in zip(ours, theirs, strict=True)
    ]
    return row_of(NAME, f"{better}: that ratio, vs {worse}", "x", pairs, _BETTER)


def _first_token_row(
    name: str, other: str, ours: Sequence[Measured], theirs: Sequence[Measured]
) -> Row:
    pairs = [
        Run(_prompt_ttft_s(our) * 1e3, _prompt_ttft_s(their) * 1e3)
        for our, their in zip(ours, theirs, strict=True)
    ]
    return row_of(NAME, f"{name}: first token of the prompts, vs {other}", "ms", pairs)


def _prompt_ttft_s(run: Measured) -> float:
    kind = ready.comparison("interference").workload.disturber
    return statistics.median(
        figures["ttft_p50_s"] for group, figures in run.groups.items() if group.startswith(kind)
    )


def _of(run: Measured, name: str) -> float:
    if name not in run.total:
        raise EngineFault(f"too few tokens came to tell {name}", stage="bench")
    return run.total[name]
