"""Core leases: distinct cores and a stable index, whoever dies and however."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.errors import StartupError
from deploy import cores
from deploy.cores import holders, lease_cores

HOLD = """
import sys
from pathlib import Path
from deploy.cores import lease_cores
lease = lease_cores(Path(sys.argv[1]), "decode", (4, 5, 6, 7), 2, 2)
print(lease.index, *lease.cores, flush=True)
sys.stdin.read()
"""


def hold_in_another_process(run_dir):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    index, *cores = map(int, process.stdout.readline().split())
    return process, index, cores


def end(process):
    process.stdin.close()
    process.stdout.close()
    process.wait()


def test_each_worker_gets_its_own_cores(tmp_path):
    leases = [lease_cores(tmp_path, "decode", (2, 5, 6, 7), 2, 2) for _ in range(2)]
    assert [(lease.index, lease.cores) for lease in leases] == [(0, (2, 5)), (1, (6, 7))]


def test_many_at_once_never_share_a_place(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        leases = list(
            threads.map(lambda _: lease_cores(tmp_path, "p", range(8), 1, 8), range(8))
        )  # fmt: skip
    assert sorted(lease.index for lease in leases) == list(range(8))


def test_pools_do_not_take_each_others_places(tmp_path):
    assert lease_cores(tmp_path, "a", (), 1, 1).index == 0
    assert lease_cores(tmp_path, "b", (), 1, 1).index == 0


def test_an_unpinned_worker_gets_an_index_and_no_cores(tmp_path):
    lease = lease_cores(tmp_path, "decode", (), 1, 2)
    assert lease.cores == ()


def test_a_killed_worker_leaves_its_place_to_its_successor(tmp_path):
    first, index, cores = hold_in_another_process(tmp_path)
    assert (index, cores) == (0, [4, 5])
    second, index, cores = hold_in_another_process(tmp_path)
    assert (index, cores) == (1, [6, 7])
    first.send_signal(signal.SIGKILL)
    first.wait()
    third, index, cores = hold_in_another_process(tmp_path)
    assert (index, cores) == (0, [4, 5])
    for process in (first, second, third):
        end(process)


def test_waits_for_a_predecessor_that_is_still_dying(tmp_path):
    taken = lease_cores(tmp_path, "decode", (), 1, 1)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lease_cores, tmp_path, "decode", (), 1, 1, wait_s=30.0)
        taken.release()
        assert waiting.result(timeout=30).index == 0


def test_refuses_when_all_places_stay_taken_and_says_who_has_them(tmp_path):
    lease_cores_of_test = lease_cores(tmp_path, "decode", (3,), 1, 1)
    with pytest.raises(StartupError, match=rf"all 1 places.*decode-0: pid {os.getpid()}.*down"):
        lease_cores(tmp_path, "decode", (3,), 1, 1, wait_s=0.0)
    lease_cores_of_test.release()
    lease_cores_of_test.release()
    assert lease_cores(tmp_path, "decode", (3,), 1, 1, wait_s=0.0).index == 0


class Waiting:
    """The time of one who waits for a place; at an instant something happens."""

    def __init__(self, at: float, happens) -> None:
        self._now, self._at, self._happens = 0.0, at, happens

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        if self._now >= self._at:
            self._happens()


@pytest.mark.parametrize("patience_s", [0.0, 120.0])
def test_a_predecessor_has_the_time_that_it_was_given_itself(tmp_path, monkeypatch, patience_s):
    """CASES P-27: an update lowers, or raises, what a worker may take to drain."""
    old = lease_cores(tmp_path, "decode", (), 1, 1, leaves_s=60.0)
    time = Waiting(69.0, old.release)
    monkeypatch.setattr(cores, "time", time)
    monkeypatch.setattr(cores, "SystemClock", lambda: time)
    new = lease_cores(tmp_path, "decode", (), 1, 1, leaves_s=patience_s)
    assert (new.index, time.now()) == (0, pytest.approx(69.0, abs=0.1))
    assert holders(tmp_path) == {"decode-0": (os.getpid(), patience_s)}


def test_others_places_are_waited_for_by_nobody(tmp_path, monkeypatch):
    """Who stays longer than it said ends the wait; a pool with a like name has no part in it."""
    lease_cores(tmp_path, "decode-1", (), 1, 1, leaves_s=600.0)
    kept = lease_cores(tmp_path, "decode", (), 1, 1, leaves_s=5.0)
    time = Waiting(100.0, pytest.fail)
    monkeypatch.setattr(cores, "time", time)
    monkeypatch.setattr(cores, "SystemClock", lambda: time)
    with pytest.raises(StartupError, match=r"places are taken \(decode-0: pid \d+\);"):
        lease_cores(tmp_path, "decode", (), 1, 1)
    assert time.now() == pytest.approx(15.0, abs=0.1)
    kept.release()


def test_refuses_too_few_cores(tmp_path):
    with pytest.raises(StartupError, match="need 4 cores, 3 are named"):
        lease_cores(tmp_path, "decode", (0, 1, 2), 2, 2)


def test_pinning_reaches_threads_that_run_already(tmp_path):
    """In a process of its own: a test must not pin the test runner."""
    code = """
import os, sys, threading
from pathlib import Path
from deploy.cores import lease_cores, pin_process
core = min(os.sched_getaffinity(0))
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
pin_process(lease_cores(Path(sys.argv[1]), "p", (core,), 1, 1).cores)
print([os.sched_getaffinity(t) == {core} for t in (os.getpid(), thread.native_id)])
stop.set()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[True, True]"
