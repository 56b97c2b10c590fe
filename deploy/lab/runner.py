"""``pdserve lab``: plays a workload on each configuration in turn, and writes what was found."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config import Host
from cluster.errors import ConfigError, PdserveError
from deploy import progress as progress_bars
from deploy.bench import cluster as bench_cluster
from deploy.bench import report
from deploy.lab import page, ready, results
from deploy.lab.configurations import Base, Configuration, check_equal_cores
from deploy.lab.link import slowed
from deploy.lab.measures import Limit, Measured, limit_of, measure
from deploy.lab.play import Play, play, unloaded
from deploy.lab.results import Outcome, Results
from deploy.lab.workload import traffic_of
from deploy.model_source import resolve_model
from deploy.stop_signals import ended_like_interrupted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deploy.bench.site import Doors
    from deploy.lab.workload import Traffic, Workload
    from deploy.progress import Progress

MAX_RUNS = 20
_FILES = ("table.txt", "lab.json", "lab.html")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command was told."""

    names: tuple[str, ...] = ()
    """Of configurations; none: all."""
    out: Path | None = None
    """A folder for table, JSON, page and pictures; None: ``lab-NAME`` in the current folder."""
    num_runs: int = 1
    scale: float = 1.0
    """Of the time that a long workload takes."""
    seed: int = 0
    model: str = "trial"
    host: Host = Host.RAY


def list_all() -> int:
    """Print the workloads and their configurations."""
    base = Base(cores=(0, 1))
    for name in ready.NAMES:
        comparison = ready.comparison(name)
        workload = comparison.workload
        _say(f"{workload.name}: {workload.title}\n  arrivals: {workload.arrivals}")
        for configuration in comparison.configurations(base):
            _say(f"  --config {configuration.name}: {configuration.what}")
        _say("")
    return 0


def run(name: str, options: Options) -> int:
    """Play one workload; returns 0 where everything was measured and no request failed, else 1.

    Raises ConfigError or StartupError for what cannot be run at all, before anything is started.
    """
    comparison = ready.comparison(name, options.scale)
    if not 1 <= options.num_runs <= MAX_RUNS:
        raise ConfigError(f"--runs: 1 to {MAX_RUNS}, not {options.num_runs}", field="runs")
    cores = tuple(sorted(os.sched_getaffinity(0)))
    every = comparison.configurations(Base(cores=cores, model=options.model, host=options.host))
    configurations = ready.chosen(every, options.names)
    folder = _writable(options.out or Path(f"lab-{name}"))
    resolve_model(options.model)
    machine = report.machine(datetime.datetime.now(datetime.UTC))
    experiment = Experiment(
        comparison.workload, configurations, seed=options.seed, progress=progress_bars.show
    )
    with ended_like_interrupted():
        outcomes = experiment.run(options.num_runs)
    found = Results(
        workload=comparison.workload,
        outcomes=outcomes,
        limits=experiment.limits,
        seed=options.seed,
        scale=options.scale,
        num_cores=experiment.num_cores,
        machine=machine,
    )
    _say(results.as_text(found))
    write(found, folder)
    _say(f"written to {folder}: {', '.join(_FILES)} and the pictures")
    return 1 if found.has_failed else 0


def write(found: Results, folder: Path) -> None:
    """Write table, JSON, page and each picture."""
    pictures = page.pictures_of(found)
    texts = {
        "table.txt": results.as_text(found),
        "lab.json": results.as_json(found),
        "lab.html": page.as_html(found, pictures),
        **{f"{name}.svg": picture for name, picture in pictures.items()},
    }
    for file_name, text in texts.items():
        (folder / file_name).write_text(text, encoding="utf-8")


def _writable(folder: Path) -> Path:
    """Make the folder: better to fail before minutes of measuring than after them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "not writable")
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}", field="out") from error
    return folder


@dataclass(slots=True)
class _Course:
    """One configuration while it is measured."""

    configuration: Configuration
    runs: list[Measured] = field(default_factory=list)
    first: Play | None = None
    failure: str = ""

    def outcome(self) -> Outcome:
        return Outcome(
            configuration=self.configuration,
            runs=tuple(self.runs),
            play=self.first,
            failure=self.failure,
        )


class Experiment:
    """Plays one workload on several configurations, each on a cluster of its own deploy file."""

    def __init__(
        self,
        workload: Workload,
        configurations: Sequence[Configuration],
        *,
        seed: int,
        progress: Progress,
    ) -> None:
        """Raises ConfigError where the configurations have unequal cores."""
        self.num_cores = check_equal_cores(configurations)
        self.limits: dict[str, Limit] = {}
        """What counts as good: by what the first configuration did when it was idle."""
        self._workload = workload
        self._configurations = configurations
        self._traffic = traffic_of(workload, seed)
        self._seed = seed
        self._progress = progress

    def run(self, num_runs: int) -> tuple[Outcome, ...]:
        """Measure all of them; one that fails is told as such, and the others go on."""
        outcomes: list[Outcome] = []
        for group in ready.by_cluster(self._configurations):
            courses = [_Course(configuration) for configuration in group]
            try:
                self._run_group(courses, num_runs)
            except PdserveError as error:
                for course in courses:
                    if len(course.runs) < num_runs and not course.failure:
                        course.failure = f"not measured: {error.message}"
                        _tell(f"\n{course.configuration.name}: {course.failure}")
            outcomes += [course.outcome() for course in courses]
        return tuple(outcomes)

    def _run_group(self, courses: Sequence[_Course], num_runs: int) -> None:
        """Start one cluster and play all its configurations on it."""
        config = bench_cluster.on_free_ports(courses[0].configuration.deploy)
        names = ", ".join(course.configuration.name for course in courses)
        _tell(f"starting a cluster for {names}, control port {config.endpoints.control_port}")
        with bench_cluster.running(config) as doors:
            self._warm_up(doors)
            for course in courses:
                self._run_one(doors, course, num_runs)

    def _warm_up(self, doors: Doors) -> None:
        """Call each kind twice on the idle cluster: the second call tells what is good."""
        for ask in self._traffic.asks:
            unloaded(doors, ask, seed=self._seed, call="cold")
            record = unloaded(doors, ask, seed=self._seed, call="warm")
            self.limits.setdefault(ask.group, limit_of(record, self._workload.objective))

    def _run_one(self, doors: Doors, course: _Course, num_runs: int) -> None:
        what = f"{self._workload.name}, {course.configuration.name}"
        total = num_runs * _num_expected(self._traffic)
        with (
            slowed(doors, course.configuration.link_bytes_per_s),
            contextlib.closing(self._progress(what, total, "request")) as bar,
        ):
            for index in range(num_runs):
                notes = play(doors, self._traffic, seed=self._seed, run=index, on_end=bar.update)
                course.first = course.first or notes
                course.runs.append(measure(notes, self.limits, self._workload))


def _num_expected(traffic: Traffic) -> int:
    """Return how many requests will be sent; what loops send nobody knows."""
    return len(traffic.arrivals)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _tell(text: str) -> None:
    """Say what a person who waits wants to know; standard output is the report's."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
