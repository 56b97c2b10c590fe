"""One router composed for real, without a cluster behind it."""

from __future__ import annotations

import dataclasses

import grpc
import pytest

from cluster.config import (
    AuthConfig,
    DeployConfig,
    EndpointsConfig,
    FaultsConfig,
    PoolConfig,
    Role,
    SchedulingConfig,
)
from cluster.errors import EngineFault, StartupError
from cluster.rpc.fault_seam import FaultyTap
from cluster.wire import faults_pb2 as wire
from cluster.wire import faults_pb2_grpc as wire_grpc
from router.ingress import Ingress
from tests.factories_model import write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def ingress(model, request):
    config = DeployConfig(
        pools=(
            PoolConfig(name="prefill", role=Role.PREFILL, max_num_seqs=3),
            PoolConfig(name="decode", role=Role.DECODE, count=2, max_num_seqs=4),
        ),
        scheduling=SchedulingConfig(max_queue_requests=5),
        endpoints=EndpointsConfig(http_port=0, grpc_port=0, control_port=1),
    )
    ingress = Ingress(dataclasses.replace(config, **getattr(request, "param", {})), model)
    yield ingress
    await ingress.stop()
    await ingress.stop()


@pytest.mark.parametrize("door", ["HTTP", "gRPC"])
async def test_health_fails_where_a_door_is_not_open(ingress, door):
    with pytest.raises(EngineFault, match="HTTP"):
        await ingress.check_health()
    await ingress.start()
    await ingress.check_health()
    await {"HTTP": ingress._http, "gRPC": ingress._grpc}[door].stop()
    with pytest.raises(EngineFault, match=door):
        await ingress.check_health()


def test_a_key_of_an_unknown_tier_ends_the_start(tmp_path, model):
    keys = tmp_path / "keys"
    keys.write_text("acme::gold=sk-acme-0123456789\n")
    config = DeployConfig(
        pools=(PoolConfig(name="both", role=Role.MIXED),), auth=AuthConfig(keys_file=str(keys))
    )
    with pytest.raises(StartupError, match="'gold' is none of"):
        Ingress(config, model)


async def test_as_many_calls_are_open_as_can_run_or_wait(ingress):
    assert ingress._service.max_open_calls == 5 + 3 + 2 * 4


LOST_WANT = wire.FaultPlan(
    faults=[wire.Fault(verb="drop", point="control.out", peer="want", nth=1, times=1)]
)


async def lose_a_want(ingress):
    """Set a plan at the router's own door, and send two wants; what gets through, and the state."""
    await ingress.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ingress._grpc.port}") as channel:
        faults = wire_grpc.FaultsStub(channel)
        await faults.Set(LOST_WANT, timeout=5)
        tap, passed = ingress._service.dispatcher.route._stream.tap, []
        assert isinstance(tap, FaultyTap)
        for number in range(2):
            tap.outgoing("want", lambda n=number: passed.append(n))
        return passed, await faults.Fired(wire.GetFired(), timeout=5)


@pytest.mark.parametrize("ingress", [{"faults": FaultsConfig(enabled=True)}], indirect=True)
async def test_with_the_fault_seam_what_a_router_says_can_be_lost(ingress):
    passed, state = await lose_a_want(ingress)
    assert (passed, list(state.fired)) == ([1], [1])


async def test_without_it_nothing_stands_in_the_way(ingress):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await lose_a_want(ingress)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert ingress._service.dispatcher.route._stream.tap is None
