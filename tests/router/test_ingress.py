"""One router composed for real, without a cluster behind it."""

from __future__ import annotations

import pytest

from cluster.config import DeployConfig, EndpointsConfig, PoolConfig, Role, SchedulingConfig
from cluster.errors import EngineFault
from router.ingress import Ingress
from tests.factories_model import write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def ingress(model):
    config = DeployConfig(
        pools=(
            PoolConfig(name="prefill", role=Role.PREFILL, max_num_seqs=3),
            PoolConfig(name="decode", role=Role.DECODE, count=2, max_num_seqs=4),
        ),
        scheduling=SchedulingConfig(max_queue_requests=5),
        endpoints=EndpointsConfig(http_port=0, grpc_port=0, control_port=1),
    )
    ingress = Ingress(config, model)
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


async def test_as_many_calls_are_open_as_can_run_or_wait(ingress):
    assert ingress._service.max_open_calls == 5 + 3 + 2 * 4
