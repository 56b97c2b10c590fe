"""The cluster of a benchmark run: ready or refused, and never left behind."""

import os
import sys

import pytest

from cluster.config import Dtype
from cluster.errors import StartupError
from deploy import processes
from deploy.bench.cluster import bench_config, running

SERVER = """
import os, signal, sys
print("starting the cluster ...")
if {fails}:
    print("Traceback, and what else there may be")
    print("pdserve: port 8000 is taken: choose another", file=sys.stderr)
    sys.exit(1)
def stop(*_):
    os.kill(os.getppid(), signal.SIGINT)  # an impatient second Ctrl-C, just while it stops
    sys.exit(0)
signal.signal(signal.SIGINT, stop)
open({notes!r}, "w").write(str(os.getpid()))
print("serving; stop with Ctrl-C", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def command(tmp_path):
    def make(*, fails: bool) -> list[str]:
        script = tmp_path / "server.py"
        script.write_text(SERVER.format(fails=fails, notes=str(tmp_path / "pid")))
        return [sys.executable, "-u", str(script)]

    return make


def test_the_config_is_the_shipped_one_in_bf16_on_other_ports():
    first, second = bench_config("trial.yaml"), bench_config("trial.yaml")

    assert [pool.role.value for pool in first.pools] == ["prefill", "decode"]
    assert {pool.dtype for pool in first.pools} == {Dtype.BF16}
    ports = {first.endpoints.http_port, first.endpoints.grpc_port, first.endpoints.control_port}
    assert len(ports) == 3
    assert first.endpoints != second.endpoints


def test_a_cluster_that_cannot_start_says_why(command):
    with (
        pytest.raises(
            StartupError, match=r"^the cluster ended: port 8000 is taken: choose another$"
        ),
        running(bench_config("trial.yaml"), command=command(fails=True)),
    ):
        pytest.fail("not reached")


@pytest.mark.parametrize("leaving", [None, KeyboardInterrupt, StartupError("a benchmark failed")])
def test_a_cluster_is_stopped_however_it_is_left(command, tmp_path, leaving):
    config = bench_config("trial.yaml")

    def use() -> None:
        with running(config, command=command(fails=False)) as cluster:
            assert cluster.grpc == f"127.0.0.1:{config.endpoints.grpc_port}"
            # Ctrl-C reaches it by us alone; and Linux shares cores out between sessions, where
            # clients beside a busy cluster would come last.
            pid = int((tmp_path / "pid").read_text())
            assert (os.getpgid(pid), os.getsid(pid)) == (pid, os.getsid(0))
            assert cluster.http == f"http://127.0.0.1:{config.endpoints.http_port}"
            if leaving is not None:
                raise leaving

    if leaving is None:
        use()
    else:
        with pytest.raises(type(leaving) if isinstance(leaving, Exception) else leaving):
            use()

    assert processes.look_up(int((tmp_path / "pid").read_text())) is None
