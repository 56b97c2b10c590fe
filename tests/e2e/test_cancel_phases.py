"""A client that leaves, in each phase, by each door: both workers stop and give all back."""

import grpc
import httpx
import pytest

from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from deploy.client import Client
from tests.e2e import reference
from tests.e2e.leaving import (
    COUNTED_AS,
    DOORS,
    GAUGES_S,
    NUM_BLOCKS,
    NUM_LEFT,
    PHASES,
    in_prefill_queue,
    narrow_pair,
    prompt_ids,
)
from tests.e2e.plain_cluster import is_quiet, parse_metrics, running, wait_until

NUM_PROBE = 16 * NUM_BLOCKS - 17


@pytest.fixture(scope="module")
def cluster(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cancel")
    with running(narrow_pair(tiny_llama), tiny_llama, folder) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def canary(tiny_llama):
    """What transformers says to the request that needs all of both pools."""
    return reference.greedy(tiny_llama, [prompt_ids(NUM_PROBE)], 17)


def probe(cluster, canary) -> None:
    """A request that needs every block of the decode pool, and all but one of the prefill pool."""
    with Client(cluster.grpc) as client:
        pieces = list(
            client.generate(
                prompt_ids={"ids": prompt_ids(NUM_PROBE)},
                max_tokens=17,
                temperature=0.0,
                ignore_eos=True,
            )
        )
    assert (pieces[-1].finish_reason, pieces[-1].usage.completion_tokens) == ("length", 17)
    wrong, _ = canary.disagreements([[token for piece in pieces for token in piece.token_ids]])
    assert not wrong


def check_counted(before, after, phase: str | None, num_left: int) -> None:
    """Each call ended once; those that left, in their phase, or well where it was over."""

    def increase(outcome: str, **labels: str) -> float:
        name = f"pdserve_requests_{outcome}_total"
        return after.total(name, **labels) - before.total(name, **labels)

    assert increase("received") == increase("success") + increase("aborted")
    if phase is None:
        assert (increase("success"), increase("aborted")) == (1, 0)
    else:
        assert increase("aborted", phase=phase) == num_left


STOPS = {"blocks": pytest.mark.faults}
"""A process stands still there, for almost as long as it may."""


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=STOPS.get(phase, ())) for phase in PHASES]
)
def test_leaving_gives_everything_back(phase, door, cluster, canary):
    """CASES P-11: the work stops at once, Q holds, and a request as big as the pools is served."""
    cluster.wait_quiet()
    before = cluster.metrics()
    with PHASES[phase](cluster, DOORS[door]) as call:
        DOORS[door].leave(call)
    cluster.wait_quiet(GAUGES_S)
    check_counted(before, cluster.metrics(), COUNTED_AS.get(phase), NUM_LEFT.get(phase, 1))
    probe(cluster, canary)
    cluster.wait_quiet(5)


@pytest.mark.parametrize("door", DOORS)
def test_leaving_the_prefill_workers_queue_costs_it_nothing(door, cluster):
    """CASES P-11: granted, and not begun; not a token of it is computed."""
    cluster.wait_quiet()
    before = cluster.metrics()
    with in_prefill_queue(cluster, DOORS[door]) as call:
        DOORS[door].leave(call)
    cluster.wait_quiet(GAUGES_S)
    check_counted(before, cluster.metrics(), "prefill", 1)


def on_own_connection(address: str) -> grpc.Channel:
    """A channel that shares its connection with no other: the kernel chooses the router anew."""
    return grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


def in_flight(cluster) -> float:
    """What one of the routers, whichever the kernel chose, has in flight."""
    metrics = parse_metrics(httpx.get(f"{cluster.http}/metrics").text)
    return metrics.total("pdserve_requests_in_flight")


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_any_router_cancels_by_id(on_ray):
    """CASES P-11: Cancel reaches a request through whichever router hears it."""
    num_calls = 12
    ask = pb.GenerateRequest(
        prompt_ids=pb.TokenIds(ids=prompt_ids(40)), max_tokens=900, ignore_eos=True
    )
    channels = [on_own_connection(on_ray.grpc) for _ in range(num_calls)]
    calls = [pb_grpc.InferenceStub(channel).Generate(ask) for channel in channels]
    ids = [dict(call.initial_metadata())["x-request-id"] for call in calls]
    assert 0 < in_flight(on_ray) < num_calls, "only one router has requests: try more"
    for request_id in ids:
        with on_own_connection(on_ray.grpc) as channel:
            stub = pb_grpc.InferenceStub(channel)
            assert stub.Cancel(pb.CancelRequest(request_id=request_id)).was_running
    for call, channel in zip(calls, channels, strict=True):
        with pytest.raises(grpc.RpcError) as ended:
            list(call)
        assert ended.value.code() is grpc.StatusCode.CANCELLED
        channel.close()
    wait_until(lambda: is_quiet(on_ray), 5, "work goes on after its client has left")
