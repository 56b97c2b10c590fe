"""Routers that are told to end while streams run: nobody is cut, nobody finds a closed door."""

from __future__ import annotations

import dataclasses
import time

import grpc
import httpx
import pytest

from cluster.config import Role
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from router.leave import LAST_CALLS_S
from tests.e2e.plain_cluster import make_config, wait_until
from tests.e2e.process_cluster import fault, process_cluster
from tests.e2e.streams import Prompts, SteadyLoad

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
DRAIN_S = 30.0
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
