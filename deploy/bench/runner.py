"""``pdserve bench``: run the named benchmarks, each in the place it needs, and report.

What needs no cluster, or starts its own, comes first; then each kind of cluster once, for all
benchmarks that need it.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cluster.config import Role
from cluster.errors import ConfigError, PdserveError
from deploy import progress as progress_bars
from deploy.bench import (
    cancel,
    decode_step,
    dispatch,
    fault_table,
    frontend,
    handoff,
    isolation,
    lab_interference,
    overhead,
    prefill,
    refusal,
    report,
    restarts,
)
from deploy.bench import cluster as bench_cluster
from deploy.bench.site import Site
from deploy.model_source import resolve_model
from deploy.stop_signals import ended_like_interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from deploy.bench.report import Row
    from deploy.bench.site import Doors

    SiteBench = Callable[[Site], list[Row]]
    ClusterBench = Callable[[Site, Doors], list[Row]]


@dataclass(frozen=True, slots=True)
class ClusterBenches:
    """Benchmarks that share one cluster."""

    title: str
    file_name: str
    """Of the deploy file."""
    benches: tuple[tuple[str, ClusterBench], ...]


def _fault_tables(scenarios: Sequence[str]) -> Iterator[tuple[str, ClusterBench]]:
    for scenario in scenarios:
        yield f"{fault_table.NAME}/{scenario}", partial(fault_table.measure, scenario=scenario)


SITE_BENCHES: tuple[tuple[str, SiteBench], ...] = (
    (decode_step.NAME, decode_step.measure),
    (prefill.NAME, prefill.measure),
    (handoff.NAME, handoff.measure),
    (dispatch.NAME, dispatch.measure),
    (frontend.NAME, frontend.measure),
    (refusal.NAME, refusal.measure),
    (lab_interference.NAME, lab_interference.measure),
)
CLUSTER_BENCHES = (
    ClusterBenches(
        "two pools",
        "trial.yaml",
        (
            (overhead.NAME, overhead.measure),
            (isolation.NAME, isolation.measure_pools),
            *_fault_tables(fault_table.SINGLE),
            *(
                (f"{restarts.NAME}/{role.value}", partial(restarts.measure, role=role))
                for role in (Role.PREFILL, Role.DECODE)
            ),
        ),
    ),
    ClusterBenches(
        "two colocated workers",
        "colocated.yaml",
        ((isolation.NAME, isolation.measure_colocated),),
    ),
    ClusterBenches(
        "two of each kind",
        "trial-2p2d.yaml",
        ((cancel.NAME, cancel.measure), *_fault_tables(fault_table.SPARE)),
    ),
)
USUAL_NAMES = (
    decode_step.NAME,
    prefill.NAME,
    handoff.NAME,
    dispatch.NAME,
    frontend.NAME,
    refusal.NAME,
    overhead.NAME,
    isolation.NAME,
)
NAMES = (
    *USUAL_NAMES,
    lab_interference.NAME,
    cancel.NAME,
    fault_table.NAME,
    restarts.NAME,
)
"""The last ones take many minutes, and run only where they, or NAME/PART of them, are named."""
_PARTS = frozenset(name for group in CLUSTER_BENCHES for name, _ in group.benches if "/" in name)


def run(names: Sequence[str], *, json_path: Path | None) -> int:
    """Measure the named benchmarks (none: the usual ones), print the table and write the JSON.

    Returns 0 where all of them ran, whether their bars are held or not, and 1 where one did not.
    Raises ConfigError for a name that is none, and for a file that cannot be written, before
    anything is started.
    """
    chosen = check_names(names)
    _check_writable(json_path)
    _say(report.machine(datetime.datetime.now(datetime.UTC)))
    folder, _ = resolve_model("trial")
    site = Site(folder=folder, core=max(os.sched_getaffinity(0)), progress=progress_bars.show)
    measurement = _Measurement(site, chosen)
    with ended_like_interrupted():
        measurement.run()
    if measurement.rows:
        _say(f"\n{report.as_table(measurement.rows)}")
    if json_path is not None:
        json_path.write_text(report.as_json(measurement.rows), encoding="utf-8")
    return 1 if measurement.has_failed else 0


def check_names(names: Sequence[str]) -> frozenset[str]:
    """Return the benchmarks to run; raises ConfigError that names the nearest one."""
    for name in names:
        if name not in NAMES and name not in _PARTS:
            near = difflib.get_close_matches(name, (*NAMES, *_PARTS), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(NAMES)}"
            raise ConfigError(f"unknown benchmark {name!r}; {hint}", field=name)
    return frozenset(names or USUAL_NAMES)


def _check_writable(json_path: Path | None) -> None:
    """Find out before minutes of measuring, not after them."""
    if json_path is None:
        return
    folder = json_path.absolute().parent
    target = json_path if json_path.exists() else folder
    if json_path.is_dir() or not folder.is_dir() or not os.access(target, os.W_OK):
        raise ConfigError(f"--json {json_path}: cannot be written", field="json")


class _Measurement:
    """All chosen benchmarks, one after another; one that fails doesn't stop the others."""

    def __init__(self, site: Site, chosen: frozenset[str]) -> None:
        self._site = site
        self._chosen = chosen
        self.rows: list[Row] = []
        self.has_failed = False

    def run(self) -> None:
        for name, measure in SITE_BENCHES:
            if name in self._chosen:
                with self._kept_going(name):
                    self.rows += measure(self._site)
        for group in CLUSTER_BENCHES:
            benches = [bench for bench in group.benches if self._is_chosen(bench[0])]
            if benches:
                with self._kept_going(group.title):
                    self._run_cluster(group, benches)

    def _is_chosen(self, name: str) -> bool:
        return name in self._chosen or name.partition("/")[0] in self._chosen

    def _run_cluster(
        self, group: ClusterBenches, benches: Sequence[tuple[str, ClusterBench]]
    ) -> None:
        config = bench_cluster.bench_config(group.file_name)
        port = config.endpoints.control_port
        _tell(f"starting a cluster: {group.title}, control port {port}")
        with bench_cluster.running(config) as doors:
            for name, measure in benches:
                with self._kept_going(name):
                    self.rows += measure(self._site, doors)

    @contextlib.contextmanager
    def _kept_going(self, what: str) -> Iterator[None]:
        try:
            yield
        except PdserveError as error:
            self.has_failed = True
            _tell(f"\n{what} failed: {error.message}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _tell(text: str) -> None:
    """Say what a person who waits wants to know; standard output is the report's."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
