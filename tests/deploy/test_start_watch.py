"""A start that stands still is told from one that takes its time."""

import os

from deploy.start_watch import STUCK_S, StartWatch, work_of

WAITS = "pool decode: 0 of 1 workers registered"


def test_a_start_that_stands_still_is_given_up():
    watch = StartWatch()
    assert not watch.is_stuck(WAITS, {"d": 3.0}, 100.0)
    assert not watch.is_stuck(WAITS, {"d": 3.5}, 100.0 + STUCK_S - 1), (
        "an idle process does a little"
    )
    assert watch.is_stuck(WAITS, {"d": 3.9}, 100.0 + STUCK_S)


def test_many_that_idle_do_not_stand_for_one_that_loads():
    watch = StartWatch()
    idle = [
        {f"d{number}": 0.013 * second for number in range(9)} for second in range(int(STUCK_S) + 1)
    ]
    assert [watch.is_stuck(WAITS, works, float(at)) for at, works in enumerate(idle)][-1]


def test_whoever_loads_has_time():
    watch = StartWatch()
    for second in range(600):
        assert not watch.is_stuck(WAITS, {"d": 0.05 * second}, float(second))


def test_every_worker_that_comes_counts():
    watch = StartWatch()
    for number in range(4):
        assert not watch.is_stuck(f"pool decode: {number} of 4", {}, number * (STUCK_S - 1))


def test_work_is_that_of_the_lease_holders(tmp_path):
    assert work_of(tmp_path) == {}
    (tmp_path / "decode-0.lock").write_text("")
    (tmp_path / "decode-1.lock").write_text("999999999\n")
    assert set(work_of(tmp_path).values()) == {0.0}
    (tmp_path / "decode-2.lock").write_text(f"{os.getpid()}\n")
    assert work_of(tmp_path)["decode-2.lock"] > 0.0
