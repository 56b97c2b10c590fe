"""Playing on doors without a cluster: what is noted, what fails, and that it always ends."""

import os
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from cluster.errors import ConfigError, PdserveError, StartupError
from deploy import cli
from deploy.lab import runner
from deploy.lab.configurations import Base, Configuration, Draft
from deploy.lab.play import play, unloaded
from deploy.lab.runner import Experiment, Options
from deploy.lab.workload import Arrival, Ask, Loop, Traffic, Workload
from tests.deploy.bench_doors import FakeDoors, QuietBar, open_doors

ASK = Ask(kind="short", num_prompt_tokens=8, max_tokens=4)
STREAM = Ask(kind="stream", num_prompt_tokens=8, max_tokens=1000)


def no_progress(_what, _total, _unit):
    return QuietBar()


@pytest.mark.parametrize("is_local", [False, True])
def test_every_token_of_every_request_is_noted_when_it_came(is_local):
    traffic = Traffic(arrivals=tuple(Arrival(at_s=0.02 * i, ask=ASK) for i in range(5)))
    ended = []
    with open_doors(FakeDoors(gap_s=0.01, is_local=is_local)) as doors:
        notes = play(doors, traffic, seed=0, run=0, on_end=lambda: ended.append(1))

    assert len(notes.records) == len(ended) == 5
    for record in notes.records:
        assert (len(record.arrivals), record.error) == (4, "")
        assert record.sent_s >= record.due_s
        assert record.arrivals[-1] - record.sent_s >= 0.03, "three gaps, however late they came"
        assert list(record.arrivals) == sorted(record.arrivals)
        assert record.waiting_s == pytest.approx(0.002), "as whoever prefilled tells"


def test_a_loop_sends_its_next_when_its_last_has_ended():
    loop = Loop(ask=ASK, num_clients=2, from_s=0.0, until_s=0.3)
    with open_doors(FakeDoors(gap_s=0.01)) as doors:
        notes = play(doors, Traffic(loops=(loop,)), seed=0, run=0)

    assert len(notes.records) >= 4
    assert all(record.sent_s < 0.3 for record in notes.records)
    for one in notes.records:
        beside = [r for r in notes.records if r.sent_s < one.ended_s and r.ended_s > one.sent_s]
        assert len(beside) <= 4, "itself, and the other client's, which may be two or three"


def test_a_client_leaves_when_it_is_time_and_its_stream_is_cancelled():
    arrival = Arrival(at_s=0.0, ask=STREAM, until_s=0.2)
    with open_doors(FakeDoors(gap_s=0.01)) as doors:
        (record,) = play(doors, Traffic(arrivals=(arrival,)), seed=0, run=0).records

        assert record.has_left
        assert not record.error
        assert 1 < len(record.arrivals) < 1000


def test_clients_run_where_everything_runs_that_is_no_worker():
    own = os.sched_getaffinity(0)
    core = min(own)
    met = []
    with open_doors(FakeDoors()) as doors:
        doors.config = replace(doors.config, service_cores=(core,))
        traffic = Traffic(arrivals=(Arrival(at_s=0.0, ask=ASK),))
        play(doors, traffic, seed=0, run=0, on_end=lambda: met.append(os.sched_getaffinity(0)))

    assert met == [{core}]
    assert os.sched_getaffinity(0) == own


def test_doors_that_refuse_are_noted_and_the_play_ends():
    loop = Loop(ask=ASK, num_clients=1, from_s=0.0, until_s=0.2)
    traffic = Traffic(arrivals=(Arrival(at_s=0.0, ask=ASK),), loops=(loop,))
    with open_doors(FakeDoors(fails=True)) as doors:
        notes = play(doors, traffic, seed=0, run=0)

    assert {record.error for record in notes.records} == {"no_worker"}
    assert 2 <= len(notes.records) < 20, "refused at once, a loop doesn't burn the cores"


def test_a_request_that_ends_early_is_no_good_request():
    with open_doors(FakeDoors()) as doors:
        short = replace(ASK, max_tokens=4)
        doors.step = lambda: (_ for _ in ()).throw(RuntimeError("gone in mid-stream"))
        (record,) = play(
            doors, Traffic(arrivals=(Arrival(at_s=0.0, ask=short),)), seed=0, run=0
        ).records

    assert record.error
    assert len(record.arrivals) == 1


def test_a_door_that_closed_is_noted_too():
    with open_doors(FakeDoors()) as doors:
        pass
    (record,) = play(doors, Traffic(arrivals=(Arrival(at_s=0.0, ask=ASK),)), seed=0, run=0).records

    assert record.error
    with pytest.raises(PdserveError, match="an idle cluster answered"):
        unloaded(doors, ASK, seed=0, call="cold")


# ---- the whole comparison


WORKLOAD = Workload(
    name="test", title="A test", arrivals="one",
    traffic=lambda _draw: Traffic(arrivals=(Arrival(at_s=0.0, ask=ASK),)),
)  # fmt: skip
CONFIGURATIONS = tuple(
    Configuration(name=name, what=name, deploy=Draft(Base(cores=(0, 1))).single(max_num_seqs=slots))
    for name, slots in (("broken", 1), ("whole", 2))
)


def experiment() -> Experiment:
    return Experiment(WORKLOAD, CONFIGURATIONS, seed=0, progress=no_progress)


def test_a_cluster_that_does_not_start_is_told_and_the_others_are_measured(monkeypatch):
    @contextmanager
    def running(config):
        if config.pools[0].max_num_seqs == 1:
            raise StartupError("the cluster ended: port 8000 is taken")
        with open_doors(FakeDoors()) as doors:
            yield doors

    monkeypatch.setattr(runner.bench_cluster, "running", running)

    broken, whole = experiment().run(2)

    assert broken.failure == "not measured: the cluster ended: port 8000 is taken"
    assert broken.runs == ()
    assert len(whole.runs) == 2
    assert not whole.failure


def test_a_cluster_that_dies_between_runs_keeps_what_was_measured(monkeypatch):
    plays = []

    def dying(*arguments, **options):
        plays.append(threading.get_ident())
        if len(plays) == 2:
            raise PdserveError("no worker left")
        return play(*arguments, **options)

    @contextmanager
    def running(_config):
        with open_doors(FakeDoors()) as doors:
            yield doors

    monkeypatch.setattr(runner.bench_cluster, "running", running)
    monkeypatch.setattr(runner, "play", dying)

    first, second = experiment().run(2)

    assert (len(first.runs), first.failure) == (1, "not measured: no worker left")
    assert (len(second.runs), second.failure) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["batchs"], "did you mean 'batches'"),
        (["batches", "--config", "statik"], "did you mean 'static'"),
        (["batches", "--runs", "0"], "--runs: 1 to 20, not 0"),
        (["batches", "--scale", "0"], "--scale: above 0 and at most 1, not 0"),
        (["batches", "--scale", "nan"], "--scale: above 0 and at most 1, not nan"),
        (["batches", "--model", "/no/such/model"], "neither `trial`, nor a folder"),
        ([], "which workload"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(arguments, told, tmp_path, capsys):
    assert cli.main(["lab", *arguments, "--out", str(tmp_path / "out")]) == 1

    said = capsys.readouterr().err
    assert said.startswith("pdserve: ")
    assert told in said
    assert said.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="--out"):
        runner.run("batches", Options(out=tmp_path / "file" / "out"))


def test_the_list_names_every_workload_and_configuration(capsys):
    assert cli.main(["lab", "--list"]) == 0

    said = capsys.readouterr().out
    for word in ("batches", "starvation", "--config sjf-aging", "bandwidth", "--config link-5"):
        assert word in said
