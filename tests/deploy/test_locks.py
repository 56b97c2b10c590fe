"""Locks between processes: one holder, a bounded wait, free again when the holder dies."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.errors import StartupError
from deploy.locks import FileLock, locked


def test_one_holder_at_a_time(tmp_path):
    lock = FileLock.try_take(tmp_path / "l")
    assert FileLock.try_take(tmp_path / "l") is None
    lock.release()
    lock.release()
    again = FileLock.try_take(tmp_path / "l")
    assert again is not None
    again.release()


def test_a_wait_is_bounded_and_told_once(tmp_path):
    waits = []
    lock = FileLock.try_take(tmp_path / "l")
    with (
        pytest.raises(StartupError, match="another process has held"),
        locked(tmp_path / "l", timeout_s=0.0, on_wait=lambda: waits.append(1)),
    ):
        pass
    assert waits == [1]
    lock.release()


def test_a_waiter_gets_it_when_it_is_given_back(tmp_path):
    lock = FileLock.try_take(tmp_path / "l")

    def wait():
        with locked(tmp_path / "l", timeout_s=30.0, on_wait=lock.release):
            return True

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(wait).result(timeout=30)


def test_programs_that_the_holder_starts_do_not_hold_it(tmp_path):
    lock = FileLock.try_take(tmp_path / "l")
    with subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        close_fds=False,
    ) as child:
        child.stdout.readline()
        lock.release()
        again = FileLock.try_take(tmp_path / "l")
        assert again is not None
        again.release()
        child.kill()


def test_a_symbolic_link_is_not_followed(tmp_path):
    (tmp_path / "l").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        FileLock.try_take(tmp_path / "l")
    assert not os.path.lexists(tmp_path / "elsewhere")
