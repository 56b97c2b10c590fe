"""CASES P-26: health tells the truth, over HTTP and gRPC, whatever is broken; on no GPU.

"Not ready" comes within 10 s and only where no token can be produced, the body names who is at
fault, and "ready" is back within 5 s of the recovery. The router's process lives all along.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config import Role
from cluster.control.shunned import RETRY_S
from tests.e2e.plain_cluster import make_config, wait_until
from tests.e2e.process_cluster import CONTROL, ProcessCluster, fault, supervised
from tests.e2e.streams import Prompts

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
FAILS_S, BACK_S = 10.0, 5.0
NUM_PROMPT, NUM_TOKENS = 64, 60
PAIR = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
INFERENCE = "pdserve.v1.Inference"
SLOW = fault("delay", "engine.step", times=0, seconds=0.05)


@dataclasses.dataclass(frozen=True)
class Told:
    """What the doors said at one instant."""

    status: int
    missing: tuple[str, ...]
    reasons: tuple[str, ...]
    serving: frozenset[str]
    """The services that gRPC says are well."""

    @property
    def is_ready(self) -> bool:
        return self.status == 200


class Health:
    """Asks one cluster's first router, at both doors."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self._http = httpx.Client(base_url=cluster.http)
        self._channel = grpc.insecure_channel(cluster.grpc)
        self._stub = health_pb2_grpc.HealthStub(self._channel)

    def ask(self) -> Told:
        """CASES P-26: it is live whatever it is told to be."""
        assert self._http.get("/health/live").status_code == 200
        answer = self._http.get("/health/ready")
        body = answer.json()
        serving = frozenset(
            name for name in ("", INFERENCE, "prefill", "decode") if self._is_serving(name)
        )
        return Told(answer.status_code, tuple(body["missing"]), tuple(body["reasons"]), serving)

    def _is_serving(self, name: str) -> bool:
        answer = self._stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def wait(self, is_told, since: float, within_s: float) -> Told:
        """Ask until it is told; fails where that takes longer than it may since then."""
        told = self.ask()
        while not is_told(told):
            assert time.monotonic() - since < within_s, told
            told = self.ask()
        return told

    def wait_ready(self, since: float) -> Told:
        """Both doors say that all of it is well, within the bound."""
        everything = {"", INFERENCE, "prefill", "decode"}
        return self.wait(
            lambda told: told.is_ready and not told.reasons and told.serving == everything,
            since,
            BACK_S,
        )

    def wait_unready(self, role: str, since: float) -> Told:
        """Both doors say that a role lacks, and why, within the bound."""
        told = self.wait(
            lambda told: not told.is_ready and not told.serving & {"", INFERENCE, role},
            since,
            FAILS_S,
        )
        assert role in told.missing
        assert any(reason.startswith(f"{role}: ") for reason in told.reasons), told
        return told

    def close(self) -> None:
        self._http.close()
        self._channel.close()


@contextlib.contextmanager
def always_ready(health: Health, pace_s: float = 0.05) -> Iterator[None]:
    """Ask again and again for the time of a ``with``: it is ready each time."""
    is_over, wrong = threading.Event(), []

    def ask() -> None:
        while not is_over.wait(pace_s):
            told = health.ask()
            if not (told.is_ready and {"", INFERENCE} <= told.serving):
                wrong.append(told)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(10)
    assert wrong == []


@pytest.fixture(scope="module")
def prompts(tiny_llama):
    return Prompts(tiny_llama, 16, num_prompt=NUM_PROMPT, num_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def cluster(tiny_llama, tmp_path_factory):
    """One pair, not started yet."""
    config = make_config(tiny_llama, PAIR, max_num_seqs=2)
    scheduling = dataclasses.replace(config.scheduling, max_queue_requests=4)
    config = dataclasses.replace(config, scheduling=scheduling)
    cluster = ProcessCluster(config, tiny_llama, tmp_path_factory.mktemp("health"))
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def health(cluster):
    """All of the cluster runs and is ready, before and after."""
    for name in (CONTROL, "router-0", *cluster.pools):
        if name not in cluster.processes:
            cluster.restart(name)
    cluster.wait_whole()
    health = Health(cluster)
    try:
        health.wait_ready(time.monotonic())
        yield health
        cluster.clear_faults()
        health.wait_ready(time.monotonic())
        cluster.wait_quiet(20)
    finally:
        health.close()


def serve_one(cluster, prompts: Prompts, number: int = 0) -> None:
    stream = prompts.stream(cluster.grpc, number)
    stream.wait_end(30)
    prompts.check(number, stream)


def test_it_is_ready_once_both_roles_are_there(cluster, prompts):
    """A router without workers; then only a prefill worker; then both."""
    for name in (CONTROL, "router-0"):
        cluster.restart(name)
    health = Health(cluster)
    try:
        told = health.wait(
            lambda told: "decode" in told.missing and not told.serving, time.monotonic(), FAILS_S
        )
        assert (told.status, told.missing, told.serving) == (503, ("prefill", "decode"), set())
        cluster.restart("prefill-0")
        told = health.wait(lambda told: "prefill" in told.serving, time.monotonic(), BACK_S)
        assert (told.status, told.missing, told.serving) == (503, ("decode",), {"prefill"})
        assert told.reasons == ("decode: no decode worker",)
        cluster.restart("decode-0")
        health.wait_ready(time.monotonic())
    finally:
        health.close()
    serve_one(cluster, prompts)


def test_a_stopped_decode_worker_is_missed(cluster, health, prompts):
    """SIGSTOP: nobody produces tokens. Nobody is replaced for it."""
    pid, stopped_at = cluster.pid("decode-0"), time.monotonic()
    with cluster.stopped("decode-0"):
        health.wait_unready("decode", stopped_at)
    health.wait_ready(time.monotonic())
    assert cluster.pid("decode-0") == pid
    serve_one(cluster, prompts)


def test_without_a_prefill_worker_it_is_ready_and_says_so(cluster, health, prompts):
    """SIGSTOP: the decode worker prefills; the role is named, and no request fails."""
    stopped_at = time.monotonic()
    with cluster.stopped("prefill-0"), always_ready(health):
        others = {"", INFERENCE, "decode"}
        told = health.wait(lambda told: told.serving == others, stopped_at, FAILS_S)
        assert told.missing == ("prefill",)
        serve_one(cluster, prompts)
    health.wait_ready(time.monotonic())
    serve_one(cluster, prompts)


def test_an_engine_that_hangs_is_missed_and_replaced(cluster, health, prompts):
    """Its process lives and reports: only its steps tell. Its streams go on with its heir."""
    pid = cluster.pid("decode-0")
    cluster.faults("decode-0").set(fault("hold", "engine.step", nth=8))
    with supervised(cluster):
        stream = prompts.stream(cluster.grpc, 1, deadline_s=50)
        cluster.faults("decode-0").wait_fired()
        told = health.wait_unready("decode", time.monotonic())
        assert told.reasons == ("decode: the engine makes no step",)
        assert cluster.pid("decode-0") == pid, "it was killed before it was missed"
        wait_until(lambda: _is_replaced(cluster, pid), 30, "it was not replaced")
        health.wait_ready(time.monotonic())
    stream.wait_end(60)
    prompts.check(1, stream)


def test_nobody_waits_for_a_prefill_engine_that_hangs(cluster, health, prompts):
    """Its process lives and reports: the decode worker prefills before it is replaced."""
    pid = cluster.pid("prefill-0")
    cluster.faults("prefill-0").set(fault("hold", "engine.step"))
    with supervised(cluster), always_ready(health):
        first = prompts.stream(cluster.grpc, 3, deadline_s=50)
        cluster.faults("prefill-0").wait_fired()
        told = health.wait(lambda told: told.missing, time.monotonic(), FAILS_S)
        assert told.reasons == ("prefill: the engine makes no step",)
        serve_one(cluster, prompts, 4)
        assert cluster.pid("prefill-0") == pid, "its heir was waited for"
        first.wait_end(60)
        prompts.check(3, first)
        wait_until(lambda: _is_replaced(cluster, pid, Role.PREFILL), 30, "it was not replaced")
        health.wait_ready(time.monotonic())


def test_an_engine_that_raises_is_missed_and_replaced(cluster, health, prompts):
    pid = cluster.pid("decode-0")
    cluster.faults("decode-0").set(fault("fail", "engine.step", nth=8))
    stream = prompts.stream(cluster.grpc, 2)
    failed_at = time.monotonic()
    cluster.processes["decode-0"].join(FAILS_S)
    assert cluster.processes.pop("decode-0").exitcode == 1
    health.wait_unready("decode", failed_at)
    cluster.restart("decode-0")
    health.wait_ready(time.monotonic())
    assert cluster.pid("decode-0") != pid
    # P-26: the step that failed was its own, and one is a worker's death like any other.
    stream.wait_end(60)
    prompts.check(2, stream)
    serve_one(cluster, prompts)


def _is_replaced(cluster, pid: int, role: Role = Role.DECODE) -> bool:
    pids = {w.worker.pid for w in cluster.view().workers if w.worker.role is role}
    return bool(pids) and pid not in pids


def test_the_only_link_is_broken_and_tokens_come_all_the_same(cluster, health, prompts):
    """No byte arrives: the decode worker prefills; the link is named until it works again."""
    cluster.faults("prefill-0").set(fault("hold", "data.send", times=0))
    broken_at = time.monotonic()
    with always_ready(health):
        first = prompts.stream(cluster.grpc, 3, deadline_s=30)
        cluster.faults("prefill-0").wait_fired()
        told = health.wait(lambda told: told.missing, broken_at, 2 * FAILS_S)
        assert told.missing == ("link",)
        assert told.reasons == ("link: 1 of 1 from prefill to decode workers fail",)
        first.wait_end(40)
        prompts.check(3, first)
        began = time.monotonic()
        serve_one(cluster, prompts, 4)
        assert time.monotonic() - began < BACK_S, "it tried the link first"
        cluster.faults("prefill-0").clear()
        mended_at, number = time.monotonic(), 5
        while health.ask().missing:
            assert time.monotonic() - mended_at < RETRY_S + BACK_S, "the link is not tried again"
            serve_one(cluster, prompts, number)
            number = 5 + number % 8


def test_saturated_is_ready(cluster, health, prompts):
    """Every slot and the queue are taken, clients are refused; nobody is restarted for it."""
    pids = {name: cluster.pid(name) for name in cluster.processes}
    cluster.faults("decode-0").set(SLOW)
    with always_ready(health):
        streams = [prompts.stream(cluster.grpc, number) for number in range(16)]
        for stream in streams:
            stream.wait_end(60)
    assert any(stream.error for stream in streams), "nobody was refused: it was not full"
    assert sum(not stream.error for stream in streams) >= 6
    assert {name: cluster.pid(name) for name in cluster.processes} == pids


def test_without_a_control_plane_nobody_new_is_served(cluster, health, prompts):
    """SIGKILL, then another at its address."""
    killed_at = time.monotonic()
    cluster.kill(CONTROL)
    health.wait_unready("control plane", killed_at)
    cluster.restart(CONTROL)
    health.wait_ready(time.monotonic())
    serve_one(cluster, prompts)
