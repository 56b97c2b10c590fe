"""Which benchmarks run where, and what ``pdserve bench`` returns."""

import contextlib
import json
import os
import signal

import pytest

from cluster.errors import ConfigError, StartupError
from deploy.bench import report, runner


def a_row(name: str, *, value: float = 1.0) -> report.Row:
    bar = report.Bar(subject="value", relation="<=", limit=10.0)
    return report.row_of(name, "what", "ms", [report.Run(value, 1.0)] * 3, bar)


class Stage:
    """Stands in for everything that measures, and notes what it was asked."""

    def __init__(self, monkeypatch, *, failing: str = "", value: float = 1.0) -> None:
        self.events: list[str] = []
        self._failing, self._value = failing, value
        monkeypatch.setattr(runner, "resolve_model", lambda _path: ("folder", "name"))
        monkeypatch.setattr(
            runner, "SITE_BENCHES", tuple((n, self.bench(n)) for n, _ in runner.SITE_BENCHES)
        )
        groups = tuple(
            runner.ClusterBenches(
                g.title, g.file_name, tuple((n, self.bench(n)) for n, _ in g.benches)
            )
            for g in runner.CLUSTER_BENCHES
        )
        monkeypatch.setattr(runner, "CLUSTER_BENCHES", groups)
        monkeypatch.setattr(runner.bench_cluster, "running", self.running)

    def bench(self, name):
        def measure(*_where):
            self.events.append(name)
            if name == self._failing:
                raise StartupError("no such luck")
            return [a_row(name, value=self._value)]

        return measure

    @contextlib.contextmanager
    def running(self, config):
        self.events.append(f"start {config.pools[0].role.value}")
        try:
            yield None
        finally:
            self.events.append("stop")


def test_an_unknown_name_is_refused_with_the_nearest_before_anything_starts(monkeypatch):
    stage = Stage(monkeypatch)

    with pytest.raises(
        ConfigError, match="unknown benchmark 'decodestep'; did you mean 'decode-step'"
    ):
        runner.run(["prefill", "decodestep"], json_path=None)
    with pytest.raises(ConfigError, match="there are: decode-step, prefill, handoff"):
        runner.run(["xyz"], json_path=None)

    assert stage.events == []


def test_a_file_that_cannot_be_written_is_refused_before_anything_starts(monkeypatch, tmp_path):
    stage = Stage(monkeypatch)

    for path in (tmp_path, tmp_path / "missing" / "out.json"):
        with pytest.raises(ConfigError, match="cannot be written"):
            runner.run([], json_path=path)

    assert stage.events == []


def test_benchmarks_share_one_cluster_of_each_kind(monkeypatch):
    stage = Stage(monkeypatch)

    assert runner.run([], json_path=None) == 0

    assert stage.events == [
        "decode-step", "prefill", "handoff", "dispatch", "frontend", "refusal",
        "start prefill", "overhead", "isolation", "stop",
        "start mixed", "isolation", "stop",
    ]  # fmt: skip


def test_only_what_is_named_is_started(monkeypatch):
    stage = Stage(monkeypatch)

    runner.run(["overhead"], json_path=None)

    assert stage.events == ["start prefill", "overhead", "stop"]


def test_a_part_of_a_benchmark_can_be_named(monkeypatch):
    stage = Stage(monkeypatch)

    runner.run(["fault-table/2p2d-decode"], json_path=None)
    assert stage.events == ["start prefill", "fault-table/2p2d-decode", "stop"]
    with pytest.raises(ConfigError, match="did you mean 'restarts/decode'"):
        runner.run(["restarts/decod"], json_path=None)


def test_a_name_means_all_parts_of_it(monkeypatch):
    stage = Stage(monkeypatch)

    runner.run(["restarts"], json_path=None)

    assert stage.events == ["start prefill", "restarts/prefill", "restarts/decode", "stop"]


def test_a_bar_that_is_not_held_is_a_result_and_no_failure(monkeypatch, tmp_path, capsys):
    Stage(monkeypatch, value=99.0)
    path = tmp_path / "out.json"

    assert runner.run(["prefill"], json_path=path) == 0

    (found,) = json.loads(path.read_text())
    assert found["holds"] is False
    assert "UTC" in capsys.readouterr().out.splitlines()[0]


def test_a_benchmark_that_fails_does_not_stop_the_others(monkeypatch, tmp_path, capsys):
    stage = Stage(monkeypatch, failing="overhead")
    path = tmp_path / "out.json"

    assert runner.run(["overhead", "isolation"], json_path=path) == 1

    assert stage.events == [
        "start prefill", "overhead", "isolation", "stop", "start mixed", "isolation", "stop",
    ]  # fmt: skip
    assert [row["name"] for row in json.loads(path.read_text())] == ["isolation"] * 2
    assert "overhead failed: no such luck" in capsys.readouterr().err


def test_a_termination_leaves_the_cluster_as_an_interrupt_does(monkeypatch):
    stage = Stage(monkeypatch)

    def terminated(*_where):
        os.kill(os.getpid(), signal.SIGTERM)
        return []

    group = runner.ClusterBenches("two pools", "trial.yaml", (("overhead", terminated),))
    monkeypatch.setattr(runner, "CLUSTER_BENCHES", (group,))
    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        runner.run(["overhead"], json_path=None)

    assert stage.events == ["start prefill", "stop"]
    assert signal.getsignal(signal.SIGTERM) is before
