"""Clients of two routers that share their doors, while one of them leaves. Real processes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.kept_connections import KeptGrpc, KeptHttp
from tests.router.leaving_router import HOST

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
REPO = Path(__file__).parents[2]
DRAIN_S, EXIT_S = 6.0, 2.0
NUM_CALLERS, GAP_S = 6, 0.004
PROMPT = [104, 105]
STATUS = health_pb2.HealthCheckResponse


class Router:
    """One process."""

    def __init__(self, stack, http_port: int = 0, grpc_port: int = 0) -> None:
        ports = [str(http_port), str(grpc_port)]
        command = [sys.executable, "-m", "tests.router.leaving_router", *ports, str(DRAIN_S)]
        self.process = stack.enter_context(
            subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(self.process.kill)
        self.http_port, self.grpc_port = map(int, self.process.stdout.readline().split())

    def num_clients(self) -> int:
        """Of the gRPC door."""
        return self._sockets(psutil.CONN_ESTABLISHED).count(self.grpc_port)

    def listens_at(self) -> set[int]:
        return set(self._sockets(psutil.CONN_LISTEN))

    def wait_left(self, told_at: float) -> None:
        assert self.process.wait(DRAIN_S + EXIT_S) == 0
        assert time.monotonic() - told_at < DRAIN_S + EXIT_S

    def _sockets(self, status: str) -> list[int]:
        connections = psutil.Process(self.process.pid).net_connections("tcp")
        return [each.laddr.port for each in connections if each.status == status]


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def routers(stack):
    first = Router(stack)
    return [first, Router(stack, first.http_port, first.grpc_port)]


def test_no_call_on_a_connection_that_is_kept_is_cut(stack, routers):
    """CASES P-27: some come in the moment in which gRPC asks their clients to connect again."""
    http, door = f"http://{HOST}:{routers[0].http_port}", f"{HOST}:{routers[0].grpc_port}"
    callers = [KeptGrpc(door, PROMPT, 2, gap_s=GAP_S) for _ in range(NUM_CALLERS)]
    callers += [KeptHttp(http, PROMPT, 2), KeptHttp(http, PROMPT, 2, gap_s=2.2)]
    with contextlib.ExitStack() as calling:
        for caller in callers:
            calling.enter_context(caller)
        for _ in routers[:]:
            leaving = next(each for each in routers if each.num_clients())
            told_at = time.monotonic()
            leaving.process.terminate()
            leaving.wait_left(told_at)
            routers.remove(leaving)
            routers.append(Router(stack, leaving.http_port, leaving.grpc_port))
    for caller in callers:
        caller.check()


def test_a_router_says_that_it_leaves_before_it_lets_nobody_in(stack, routers):
    """CASES P-27: readiness flips first."""
    leaving = routers[0]
    while not leaving.num_clients():
        own = (("grpc.use_local_subchannel_pool", 1),)
        channel = grpc.insecure_channel(f"{HOST}:{leaving.grpc_port}", own)
        stack.enter_context(channel)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == STATUS.SERVING
    told_at = time.monotonic()
    leaving.process.terminate()
    assert next(watch).status == STATUS.NOT_SERVING
    assert leaving.listens_at() == {leaving.http_port, leaving.grpc_port}
    leaving.wait_left(told_at)
