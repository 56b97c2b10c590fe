"""Routers that are told to end while streams run: nobody is cut, nobody finds a closed door."""

from __future__ import annotations

import contextlib
import dataclasses
import time

import grpc
import httpx
import pytest

from cluster.config import Role
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from router.leave import LAST_CALLS_S
from tests.e2e.kept_connections import KeptGrpc, KeptHttp
from tests.e2e.plain_cluster import make_config, wait_until
from tests.e2e.process_cluster import fault, process_cluster
from tests.e2e.streams import Prompts, SteadyLoad

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
DRAIN_S, SHORT_DRAIN_S = 30.0, 6.0
EXIT_S = 2.0
"""Beyond its time to drain: so soon a process has ended."""
NUM_STREAMS = 4


@pytest.fixture(scope="module")
def prompts(tiny_llama):
    return Prompts(tiny_llama, 20, num_prompt=48, num_tokens=60)


@pytest.fixture(scope="module")
def config(tiny_llama):
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    config = make_config(tiny_llama, pools, max_num_seqs=16)
    limits = dataclasses.replace(config.limits, drain_s=DRAIN_S)
    return dataclasses.replace(config, limits=limits)


def test_a_router_with_doors_of_its_own(config, tiny_llama, tmp_path, prompts):
    """CASES P-27: SIGTERM the router: readiness flips first, streams finish, newcomers hear 503."""
    with process_cluster(config, tiny_llama, tmp_path) as cluster:
        cluster.faults("decode-0").set(fault("delay", "engine.step", times=0, seconds=0.15))
        streams = {n: prompts.stream(cluster.grpc, n, deadline_s=60) for n in range(NUM_STREAMS)}
        for stream in streams.values():
            stream.wait_tokens(3)
        with (
            httpx.Client(base_url=cluster.http, timeout=10) as client,
            grpc.insecure_channel(cluster.grpc) as channel,
        ):
            assert client.get("/health/ready").status_code == 200
            cluster.terminate("router-0")
            body = {"prompt": "hi", "max_tokens": 1}
            wait_until(lambda: client.get("/health/ready").status_code == 503, 5, "it is ready")
            wait_until(
                lambda: client.post("/v1/completions", json=body).status_code == 503,
                5, "it takes whoever comes",
            )  # fmt: skip
            refused = client.post("/v1/completions", json=body)
            assert refused.headers["retry-after"] == "1"
            assert "this router is shutting down" in refused.text
            request = pb.GenerateRequest(prompt="hi", max_tokens=1)
            with pytest.raises(grpc.RpcError) as late:
                pb_grpc.InferenceStub(channel).GenerateOnce(request, timeout=5)
            assert late.value.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(late.value.trailing_metadata())["retry-after"] == "1"
            assert all(stream.is_alive() for stream in streams.values()), "they ended too soon"
        for number, stream in streams.items():
            stream.wait_end(60)
            prompts.check(number, stream)
        assert cluster.wait_exit("router-0", 10) == 0, "it waited for nobody"


def test_a_router_ends_with_its_grace(config, tiny_llama, tmp_path, prompts):
    """CASES P-27: exit 0 within grace + 2 s, though streams run that would last longer."""
    limits = dataclasses.replace(config.limits, drain_s=SHORT_DRAIN_S)
    config = dataclasses.replace(config, limits=limits)
    with process_cluster(config, tiny_llama, tmp_path) as cluster:
        cluster.faults("decode-0").set(fault("delay", "engine.step", times=0, seconds=0.3))
        streams = [prompts.stream(cluster.grpc, n, deadline_s=60) for n in range(NUM_STREAMS)]
        body = {"prompt": prompts.prompts[NUM_STREAMS], "max_tokens": prompts.num_tokens}
        body |= {"ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{cluster.http}/v1/completions", json=body, timeout=30) as http:
            lines = http.iter_lines()
            next(lines)
            for stream in streams:
                stream.wait_tokens(3)
            told_at = time.monotonic()
            cluster.terminate("router-0")
            assert cluster.wait_exit("router-0", SHORT_DRAIN_S + EXIT_S) == 0
            took_s = time.monotonic() - told_at
            assert "[DONE]" not in "".join(_what_came(lines)), "it ended before its router"
        for stream in streams:
            stream.wait_end()
            assert stream.error, "it ended before its router"
        assert SHORT_DRAIN_S - 0.5 < took_s < SHORT_DRAIN_S + EXIT_S


def _what_came(lines) -> list[str]:
    """All that was said over a connection that may be cut."""
    came = []
    with contextlib.suppress(httpx.HTTPError):
        came.extend(lines)
    return came


def test_routers_that_share_their_doors(config, tiny_llama, tmp_path, prompts):
    """CASES P-27: one of two is replaced under 10 requests a second: the other serves newcomers."""
    with process_cluster(
        config, tiny_llama, tmp_path, num_routers=2, are_doors_shared=True
    ) as cluster:
        with SteadyLoad(cluster.grpc, prompts) as load:
            load.wait_started(10)
            for name in cluster.routers:
                told_at = time.monotonic()
                cluster.terminate(name)
                assert cluster.wait_exit(name, DRAIN_S) == 0
                assert time.monotonic() - told_at >= LAST_CALLS_S
                load.wait_started(10)
                cluster.restart(name)
                cluster.wait_whole()
        load.check()
        cluster.wait_quiet()


def test_clients_that_keep_their_connections(config, tiny_llama, tmp_path, prompts):
    """CASES P-27: each of two routers is replaced; no call on a connection that is kept is cut.

    Some of them come in the very moment in which its router closes it, as they call all the time.
    """
    limits = dataclasses.replace(config.limits, drain_s=SHORT_DRAIN_S)
    config = dataclasses.replace(config, limits=limits)
    with process_cluster(
        config, tiny_llama, tmp_path, num_routers=2, are_doors_shared=True
    ) as cluster:
        callers = [KeptHttp(cluster.http, prompts.prompts[0], 1)]
        callers += [KeptGrpc(cluster.grpc, p, 1, gap_s=0.01) for p in prompts.prompts[1:7]]
        with contextlib.ExitStack() as stack:
            for caller in callers:
                stack.enter_context(caller)
            for name in cluster.routers:
                began = [caller.num_calls for caller in callers]
                cluster.terminate(name)
                assert cluster.wait_exit(name, SHORT_DRAIN_S + EXIT_S) == 0
                went_on = [caller.num_calls for caller in callers]
                assert all(b < a for b, a in zip(began, went_on, strict=True))
                cluster.restart(name)
                cluster.wait_whole()
        for caller in callers:
            caller.check()
        cluster.wait_quiet()
