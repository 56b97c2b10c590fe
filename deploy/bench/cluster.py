"""A cluster for benchmarks: started as a user starts one, on free ports, never left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from cluster import config as deploy_config
from cluster.config import Dtype
from cluster.errors import StartupError
from deploy.doors import http_url
from deploy.run_state import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import IO

    from cluster.config import DeployConfig

PDSERVE = (sys.executable, "-u", "-m", "deploy.cli")
_CONFIGS = Path(__file__).parents[1] / "configs"
_READY = "serving;"
"""How the line begins that ``pdserve serve`` prints when it has proved itself."""
_REASON = "pdserve: "
"""How the line begins in which the command says why it ended."""
_READY_TIMEOUT_S = 240.0
_STOP_TIMEOUT_S = 20.0
_CLEAR_TIMEOUT_S = 10.0
_KEPT_LINES = 30


def bench_config(file_name: str) -> DeployConfig:
    """Return one of the shipped deploy files with bf16 everywhere and ports that are free."""
    config = deploy_config.load(_CONFIGS / file_name)
    pools = tuple(dataclasses.replace(pool, dtype=Dtype.BF16) for pool in config.pools)
    return on_free_ports(dataclasses.replace(config, pools=pools))


def on_free_ports(config: DeployConfig) -> DeployConfig:
    """Return the same config with doors nobody else has, so that clusters don't meet."""
    http, grpc, control = _free_ports(3)
    endpoints = dataclasses.replace(
        config.endpoints, http_port=http, grpc_port=grpc, control_port=control
    )
    return dataclasses.replace(config, endpoints=endpoints)


def _free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago; all distinct."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class BenchCluster:
    """A running cluster; made by ``running``."""

    def __init__(self, config: DeployConfig) -> None:
        self.config = config

    @property
    def http(self) -> str:
        """Base URL of the HTTP door."""
        return http_url(self.config)

    @property
    def grpc(self) -> str:
        """Address of the gRPC door."""
        return f"{self.config.endpoints.host}:{self.config.endpoints.grpc_port}"


@contextlib.contextmanager
def running(config: DeployConfig, *, command: Sequence[str] = PDSERVE) -> Iterator[BenchCluster]:
    """Run a cluster for the time of a ``with``; raises StartupError with its last words.

    However the ``with`` is left, the cluster is stopped and what remains of it cleared; a second
    Ctrl-C does not cut that short.
    """
    state = RunState(config.endpoints.control_port)
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        path = Path(folder) / "deploy.yaml"
        path.write_text(yaml.safe_dump(deploy_config.to_tree(config)), encoding="utf-8")
        process = subprocess.Popen(
            [*command, "serve", "--config", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Ctrl-C is ours to pass on: the cluster must outlive the clients that leave it. But not
            # a session of its own: Linux shares cores out between sessions (autogroup), and the
            # clients here waited 10 ms for theirs at each of their turns, beside a busy cluster.
            process_group=0,
        )
        try:
            _wait_ready(process)
            yield BenchCluster(config)
        finally:
            with _no_interrupt():
                _stop(process)
                state.clear(_CLEAR_TIMEOUT_S)


def _wait_ready(process: subprocess.Popen[str]) -> None:
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    is_told = threading.Event()
    assert process.stdout is not None
    reader = threading.Thread(
        target=_read, args=(process.stdout, lines, is_told), name="cluster-output", daemon=True
    )
    reader.start()
    if not is_told.wait(_READY_TIMEOUT_S):
        raise StartupError(f"the cluster was not ready after {_READY_TIMEOUT_S:.0f} s")
    if not any(line.startswith(_READY) for line in lines):
        reader.join(_STOP_TIMEOUT_S)
        reasons = [line for line in lines if line.startswith(_REASON)]
        reason = (reasons or list(lines) or ["it said nothing"])[-1]
        raise StartupError(f"the cluster ended: {reason.removeprefix(_REASON).strip()}")


def _read(output: IO[str], lines: deque[str], is_told: threading.Event) -> None:
    """Read until the end, also when nobody asks any more: a full pipe would stop the cluster."""
    with output:
        for line in output:
            lines.append(line)
            if line.startswith(_READY):
                is_told.set()
    is_told.set()


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
