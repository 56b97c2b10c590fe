"""Workers that are told to end: they end what they have, or hand it on, and take nothing new."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config import Role
from cluster.errors import PdserveError
from deploy import cli, orders
from tests.e2e.leaving import report_of
from tests.e2e.plain_cluster import make_config, wait_until
from tests.e2e.process_cluster import CONTROL, fault, process_cluster
from tests.e2e.stale_router import knock_until_late
from tests.e2e.stalls import Stalls
from tests.e2e.streams import Prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
NUM_PROMPT, NUM_TOKENS = 96, 96
NUM_STREAMS = 6
STEP_S = 0.1
"""So long a step takes where streams must outlast what is done meanwhile."""
LONG_S, SHORT_S = 40.0, 1.5
"""To drain: longer than any stream here, and shorter than each."""


@pytest.fixture(scope="module")
def prompts(tiny_llama):
    return Prompts(tiny_llama, 2 * NUM_STREAMS, num_prompt=NUM_PROMPT, num_tokens=NUM_TOKENS)


def make_shape(model, drain_s: float):
    pools = {"prefill": (Role.PREFILL, 2), "decode": (Role.DECODE, 2)}
    config = make_config(model, pools, max_num_seqs=16)
    limits = dataclasses.replace(config.limits, drain_s=drain_s)
    return dataclasses.replace(config, limits=limits)


@pytest.fixture(scope="module")
def started(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drain")
    with process_cluster(make_shape(tiny_llama, LONG_S), tiny_llama, folder) as cluster:
        yield cluster


@pytest.fixture
def cluster(started):
    """The cluster, whole; and quiet and whole again after the test."""
    for name in (CONTROL, *started.pools):
        if name not in started.processes:
            started.restart(name)
    started.wait_whole()
    yield started
    started.clear_faults()
    started.wait_quiet()


def is_draining(cluster, name: str) -> bool:
    with contextlib.suppress(StopIteration, PdserveError):
        return report_of(cluster, name).is_draining
    return False


def num_legs(cluster, name: str) -> float:
    """Those that it has taken."""
    counters = report_of(cluster, name).counters
    return counters["legs_received"] - counters["legs_rejected"]


def num_resumed(cluster) -> float:
    return cluster.metrics().total("pdserve_requests_resumed_total")


def health_of(cluster, name: str) -> int:
    """What a worker's own health says."""
    with grpc.insecure_channel(f"127.0.0.1:{cluster.ports[name]}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status


def holding(cluster) -> list[str]:
    """The prefill workers that would be idle but for KV that nobody has fetched."""
    reports = {name: report_of(cluster, name) for name in ("prefill-0", "prefill-1")}
    return [
        name
        for name, report in reports.items()
        if report.num_transferring > 0 and report.num_running == report.num_waiting == 0
    ]


def slow_steps(seconds: float):
    return fault("delay", "engine.step", times=0, seconds=seconds)


def running_streams(cluster, prompts: Prompts, numbers=range(NUM_STREAMS)):
    """Streams in the midst of their tokens, on both decode workers, which are slow."""
    for name in ("decode-0", "decode-1"):
        if name in cluster.processes:
            cluster.faults(name).set(slow_steps(STEP_S))
    streams = {n: prompts.stream(cluster.grpc, n, deadline_s=LONG_S) for n in numbers}
    for stream in streams.values():
        stream.wait_tokens(3)
    return streams


def check(prompts: Prompts, streams) -> None:
    for number, stream in streams.items():
        stream.wait_end(60)
        prompts.check(number, stream)


def test_a_decode_worker_ends_its_streams_and_takes_no_more(cluster, prompts):
    """CASES P-27: SIGTERM one D: readiness flips first, no new work after 1 s, 0 failures, exit 0.

    Beside the router that hears of it there is one that does not, and goes on sending legs.
    """
    resumed = num_resumed(cluster)
    streams = running_streams(cluster, prompts)
    assert report_of(cluster, "decode-0").num_running > 0
    told_at = time.monotonic()
    peer = next(w.worker for w in cluster.view().workers if w.worker.worker_id == "decode-0")
    knocks = asyncio.run(knock_until_late(peer, lambda: cluster.terminate("decode-0")))
    taken = [knock.was_serving for knock in knocks if not knock.error]
    assert taken[0], "legs like these were refused all the time"
    assert not all(taken), "it did not say that it leaves before it refused"
    refused = [knock for knock in knocks if knock.error]
    assert not any(knock.was_serving for knock in refused), "it refused before it said why"
    assert knocks[-1].error == "the worker drains", "it takes new work after a second"
    wait_until(lambda: is_draining(cluster, "decode-0"), 5, "it does not say that it drains")
    assert health_of(cluster, "decode-0") == health_pb2.HealthCheckResponse.NOT_SERVING
    num_before = num_legs(cluster, "decode-0")
    numbers = range(NUM_STREAMS, NUM_STREAMS + 3)
    later = running_streams(cluster, prompts, numbers)
    assert is_draining(cluster, "decode-0"), "its streams were too short for this"
    assert num_legs(cluster, "decode-0") == num_before, "new work came to it"
    check(prompts, streams)
    assert cluster.wait_exit("decode-0", LONG_S) == 0
    assert time.monotonic() - told_at < LONG_S + 2
    assert num_resumed(cluster) == resumed, "a stream was cut"
    check(prompts, later)


def test_a_prefill_worker_stays_until_its_kv_is_fetched(cluster, prompts):
    """CASES P-27: one P that holds un-fetched KV; and one of its receivers dies meanwhile."""
    for name in ("decode-0", "decode-1"):
        cluster.faults(name).set(fault("hold", "signal.offer", times=0))
    streams = {number: prompts.stream(cluster.grpc, number) for number in range(NUM_STREAMS)}
    for stream in streams.values():
        stream.wait_tokens(1)
    for name in ("decode-0", "decode-1"):
        cluster.faults(name).wait_fired()
    wait_until(lambda: "prefill-0" in holding(cluster), 5, "it holds no KV, or has other work")
    cluster.terminate("prefill-0")
    wait_until(lambda: is_draining(cluster, "prefill-0"), 5, "it does not say that it drains")
    threading.Event().wait(1.5)
    assert cluster.processes["prefill-0"].is_alive(), "it left with KV that nobody had"
    cluster.kill("decode-0")
    cluster.faults("decode-1").clear()
    check(prompts, streams)
    assert cluster.wait_exit("prefill-0", LONG_S) == 0


def test_a_second_signal_ends_it_at_once(cluster, prompts):
    """CASES P-27: second SIGTERM: a crash by request, which the streams outlive."""
    streams = running_streams(cluster, prompts)
    cluster.terminate("decode-0")
    wait_until(lambda: is_draining(cluster, "decode-0"), 5, "it does not say that it drains")
    cluster.terminate("decode-0")
    assert cluster.wait_exit("decode-0", 5) == 1
    assert any(stream.is_alive() for stream in streams.values()), "it had nothing left to end"
    check(prompts, streams)


def test_a_worker_that_is_killed_while_it_drains_costs_nobody_a_token(cluster, prompts):
    resumed = num_resumed(cluster)
    streams = running_streams(cluster, prompts)
    cluster.terminate("decode-0")
    wait_until(lambda: is_draining(cluster, "decode-0"), 5, "it does not say that it drains")
    cluster.kill("decode-0")
    check(prompts, streams)
    assert num_resumed(cluster) > resumed


def test_a_new_control_plane_learns_who_drains(cluster, prompts):
    """The drain is the worker's own: it says so again, and nothing comes to it."""
    streams = running_streams(cluster, prompts)
    cluster.terminate("decode-0")
    wait_until(lambda: is_draining(cluster, "decode-0"), 5, "it does not say that it drains")
    num_before = num_legs(cluster, "decode-0")
    cluster.kill(CONTROL)
    cluster.restart(CONTROL)
    wait_until(lambda: is_draining(cluster, "decode-0"), 10, "nobody has told the new one")
    numbers = range(NUM_STREAMS, NUM_STREAMS + 3)
    later = running_streams(cluster, prompts, numbers)
    assert is_draining(cluster, "decode-0"), "its streams were too short for this"
    assert num_legs(cluster, "decode-0") == num_before
    check(prompts, {**streams, **later})
    assert cluster.wait_exit("decode-0", LONG_S) == 0


def test_orders_drain_a_role_and_readiness_names_it(cluster, capsys):
    """CASES P-26, P-27: `pdserve drain`, up to the last decode worker; then one is back."""
    for name in ("decode-0", "decode-1"):
        file = str(cluster.folder / "deploy.yaml")
        assert cli.main(["drain", "--config", file, name]) == 0
        assert f"{name} has drained and left" in capsys.readouterr().out
        assert cluster.wait_exit(name, 15) == 0
    url = f"{cluster.http}/health/ready"
    wait_until(lambda: httpx.get(url).status_code == 503, 5, "it says that it is ready")
    assert "decode" in httpx.get(url).text
    with pytest.raises(PdserveError, match="no worker is called 'decode-0': there is prefill-0"):
        orders.drain(cluster.config, "decode-0")
    cluster.restart("decode-0")
    wait_until(lambda: httpx.get(url).status_code == 200, 5, "it is not ready again")


def end_by_grace(cluster, name: str) -> float:
    """Tell one to end, which it does by the end of its grace; returns after how long."""
    with Stalls() as stalls:
        told_at = time.monotonic()
        cluster.terminate(name)
        assert cluster.wait_exit(name, 30) == 0
        took_s = time.monotonic() - told_at
    assert took_s < SHORT_S + 2 + stalls.longest_s
    return took_s


def test_a_prefill_worker_ends_with_its_grace(tiny_llama, tmp_path, prompts):
    """CASES P-27: exit 0 within grace + 2 s, though nobody has fetched its KV; 0 failures."""
    with process_cluster(make_shape(tiny_llama, SHORT_S), tiny_llama, tmp_path) as cluster:
        for name in ("decode-0", "decode-1"):
            cluster.faults(name).set(fault("hold", "signal.offer", times=0))
        streams = {n: prompts.stream(cluster.grpc, n, deadline_s=60) for n in range(NUM_STREAMS)}
        for stream in streams.values():
            stream.wait_tokens(1)
        for name in ("decode-0", "decode-1"):
            cluster.faults(name).wait_fired()
        wait_until(lambda: holding(cluster), 5, "nobody holds KV alone")
        took_s = end_by_grace(cluster, holding(cluster)[0])
        cluster.clear_faults()
        check(prompts, streams)
        assert took_s > SHORT_S - 0.2, "it left with KV that nobody had"
        cluster.wait_quiet()


def test_what_is_left_after_the_grace_goes_on_elsewhere(tiny_llama, tmp_path, prompts):
    """CASES P-27: streams longer than the grace are resumed on another worker, token by token."""
    with process_cluster(make_shape(tiny_llama, SHORT_S), tiny_llama, tmp_path) as cluster:
        streams = running_streams(cluster, prompts)
        end_by_grace(cluster, "decode-0")
        check(prompts, streams)
        assert num_resumed(cluster) > 0
        cluster.wait_quiet()
