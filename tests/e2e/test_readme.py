"""Every command of the README does what it says, on a cluster started as the README starts it."""

import re
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest

from deploy.run_state import RunState
from tests.e2e.plain_cluster import REPO

pytestmark = [pytest.mark.smollm, pytest.mark.ray, pytest.mark.timeout(600)]

PORTS = (8000, 8001, 8002)
"""The README's: its commands name them, so the test can't choose."""
PDSERVE = REPO / ".venv" / "bin" / "pdserve"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.M | re.S)


def blocks(language: str) -> list[str]:
    found = BLOCK.findall((REPO / "README.md").read_text())
    return [text for label, text in found if label == language]


def commands() -> list[str]:
    """The lines of all sh blocks; joined where a backslash or an open quote says so."""
    lines: list[str] = []
    pending = ""
    for line in "\n".join(blocks("sh")).splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # an open quote
            pending += "\n"
            continue
        if words:
            lines.append(pending)
        pending = ""
    assert not pending, pending
    return lines


def starting_with(*prefixes: str) -> list[str]:
    return [line for line in commands() if line.startswith(prefixes)]


SERVES = starting_with(".venv/bin/pdserve serve")
MAKES = starting_with("make ")
DOWNS = starting_with(".venv/bin/pdserve down")
CALLS = [line for line in commands() if line not in {*SERVES, *MAKES, *DOWNS}]


def run(command: str, timeout_s: float = 240) -> str:
    """Run a line as it stands; curl with -f, since it says 0 to an error's status."""
    line = re.sub(r"^curl ", "curl -sSf ", command)
    done = subprocess.run(
        ["bash", "-c", line], cwd=REPO, capture_output=True, text=True, timeout=timeout_s,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def taken_port() -> int | None:
    for port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                probe.listen(1)
            except OSError:
                return port
    return None


@pytest.fixture(scope="module")
def free_machine():
    port = taken_port()
    if port is not None:
        pytest.skip(f"port {port}, which the README's commands name, is taken")
    if not PDSERVE.exists():
        pytest.skip("the README's commands are in .venv/bin, and this repository has none")


@pytest.fixture(scope="class")
def trial(free_machine, tmp_path_factory):
    """The default trial, started by the installed command."""
    output = tmp_path_factory.mktemp("readme") / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen([PDSERVE, "serve"], stdout=file, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 240
    try:
        while "serving; stop with Ctrl-C" not in output.read_text():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        RunState(PORTS[2]).clear(10)


def test_the_readme_has_commands_of_every_kind():
    assert CALLS
    assert SERVES
    assert MAKES
    assert len(blocks("python")) >= 2


@pytest.mark.parametrize("command", MAKES)
def test_ci_runs_every_make_target(command):
    """They take minutes each, and CI runs them anyway."""
    target = shlex.split(command, comments=True)[1]
    ci = (REPO / ".ci" / "run").read_text()
    assert re.search(rf"\bmake {target}\b", ci), f"{command} is not in .ci/run"


class TestOnTheTrial:
    """The class has the trial's scope: it is stopped before the next test starts another."""

    @pytest.mark.parametrize("command", CALLS)
    def test_call(self, command, trial):
        answer = run(command)
        assert answer.strip()
        assert '"error"' not in answer, answer

    @pytest.mark.parametrize("program", blocks("python"))
    def test_python(self, program, trial, tmp_path):
        """From another folder: only what is installed is there."""
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


@pytest.mark.parametrize("command", SERVES)
def test_serve(command, free_machine):
    assert "total" in run(command)


@pytest.mark.parametrize("command", DOWNS)
def test_down(command, free_machine):
    assert run(command).strip()
