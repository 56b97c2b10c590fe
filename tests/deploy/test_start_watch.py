"""A start that stands still is told from one that takes its time."""

import os
import subprocess
import sys

import pytest

from deploy.processes import look_up
from deploy.start_watch import STUCK_S, StartWatch, work_of, work_on_app

WAITS = "pool decode: 0 of 1 workers registered"


def is_stuck(watch, waits_for, works, now):
    watch.look(waits_for, works, now)
    return watch.is_stuck


def test_a_start_that_stands_still_is_given_up():
    watch = StartWatch()
    assert not is_stuck(watch, WAITS, {"d": 3.0}, 100.0)
    assert not is_stuck(watch, WAITS, {"d": 3.5}, 100.0 + STUCK_S - 1), (
        "an idle process does little"
    )
    assert is_stuck(watch, WAITS, {"d": 3.9}, 100.0 + STUCK_S)


def test_many_that_idle_do_not_stand_for_one_that_loads():
    watch = StartWatch()
    idle = [
        {f"d{number}": 0.013 * second for number in range(9)} for second in range(int(STUCK_S) + 1)
    ]
    assert [is_stuck(watch, WAITS, works, float(at)) for at, works in enumerate(idle)][-1]


def test_whoever_loads_has_time():
    watch = StartWatch()
    for second in range(600):
        assert not is_stuck(watch, WAITS, {"d": 0.06 * second}, float(second))


def test_who_is_seen_for_the_first_time_has_just_come_whatever_it_did_before():
    watch = StartWatch()
    assert not is_stuck(watch, WAITS, {}, 0.0)
    assert not is_stuck(watch, WAITS, {"d": 100.0}, STUCK_S - 1)
    assert not is_stuck(watch, WAITS, {"d": 100.0}, 2 * STUCK_S - 2)
    assert is_stuck(watch, WAITS, {"d": 100.0}, 2 * STUCK_S - 1)


def test_every_worker_that_comes_counts():
    watch = StartWatch()
    for number in range(4):
        assert not is_stuck(watch, f"pool decode: {number} of 4", {}, number * (STUCK_S - 1))


def test_work_is_that_of_the_lease_holders(tmp_path):
    assert work_of(tmp_path) == {}
    (tmp_path / "decode-0.lock").write_text("")
    (tmp_path / "decode-1.lock").write_text("999999999 30\n")
    assert work_of(tmp_path) == {}, "who is not there does nothing"
    (tmp_path / "my-pool-2.lock").write_text(f"{os.getpid()} 30\n")
    (holder,) = work_of(tmp_path)
    assert str(os.getpid()) in holder
    before = work_of(tmp_path)[holder]
    (tmp_path / "weights").write_bytes(bytes(16 << 20))
    (tmp_path / "weights").read_bytes()
    assert work_of(tmp_path)[holder] - before == pytest.approx(0.5, rel=0.5)


@pytest.mark.parametrize(
    ("title", "is_of_it"),
    [
        ("ray::ServeReplica:pdserve:decode", True),
        ("ray::SERVE_REPLICA::pdserve#decode#wx16:ServeReplica:pdserve:decode.__init__", True),
        ("ray::build_serve_application", True),
        ("ray::ServeReplica:pdserve:control", False),  # it does a little for ever
        ("ray::ServeReplica:other:decode", False),
    ],
)
def test_workers_that_load_get_on_before_they_have_a_place(title, is_of_it):
    command = [title, "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        command, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as part:
        part.stdout.readline()
        found = work_on_app([look_up(os.getpid()), look_up(part.pid)], ["prefill", "decode"])
        part.communicate(b"\n")
    assert [str(part.pid) in who for who in found] == [True] * is_of_it
    assert all(done > 0.0 for done in found.values())
