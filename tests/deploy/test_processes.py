"""Processes are what they are: pid, start time, and the variable they were started with."""

import os
import signal
import subprocess
import sys

from deploy import processes

STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); input()"
)


def test_a_name_with_brackets_and_spaces_is_read_whole(tmp_path):
    """The kernel does not quote the name in its line."""
    program = tmp_path / "a) R (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "600"]) as child:
        found = processes.look_up(child.pid)
        assert found.name == program.name
        assert found.is_alive()
        child.kill()
    assert not found.is_alive()


def test_a_zombie_is_not_alive():
    child = subprocess.Popen(["sleep", "600"])
    found = processes.look_up(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.look_up(child.pid) is None
    assert not found.is_alive()
    child.wait()


def test_a_process_that_ignores_the_request_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        assert processes.end_all([processes.look_up(child.pid)], term_s=0.2, kill_s=10) == []
        assert child.wait() == -signal.SIGKILL


def test_survivors_are_returned():
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        process = processes.look_up(child.pid)
        assert processes.end_all([process], term_s=0.1, kill_s=0) == [process]
        child.kill()


def test_a_process_that_is_gone_is_no_error():
    child = subprocess.Popen(["sleep", "600"])
    process = processes.look_up(child.pid)
    child.kill()
    child.wait()
    assert processes.end_all([process], term_s=1, kill_s=1) == []


def test_only_the_wanted_value_of_the_variable_is_found():
    children = [
        subprocess.Popen(["sleep", "600"], env=os.environ | {"PDSERVE_TEST_MARK": value})
        for value in ("abc-1", "abd-1")
    ]
    found = processes.find_marked("PDSERVE_TEST_MARK", "abc-")
    for child in children:
        child.kill()
        child.wait()
    assert [process.pid for process in found] == [children[0].pid]
