"""The cluster token: who may call a worker or the control plane (S-16)."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from cluster.clock import SystemClock
from cluster.config import SecurityConfig, from_tree
from cluster.control.server import ControlServer
from cluster.control.status import get_cluster
from cluster.errors import NoWorker, StartupError
from cluster.trust import ClusterToken
from cluster.wire import worker_pb2_grpc

TOKEN = "0123456789abcdef0123456789abcdef"
NAMED = SecurityConfig(cluster_token_env="TOKEN")


def shown(token: ClusterToken):
    return [*token.metadata, ("other", "entry")]


def test_without_a_token_nobody_is_asked():
    open_one = ClusterToken.load(SecurityConfig(), {})
    assert (open_one.metadata, open_one.guards) == ((), ())


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        [],
        [("pdserve-cluster-token", "")],
        [("pdserve-cluster-token", TOKEN[:-1])],
        [("pdserve-cluster-token", TOKEN), ("pdserve-cluster-token", TOKEN)],
        [("authorization", TOKEN)],
    ],
)
def test_only_the_token_itself_is_taken(metadata):
    token = ClusterToken(TOKEN)
    assert token.is_shown_in(shown(ClusterToken(TOKEN)))
    assert not token.is_shown_in(metadata)


def test_it_is_read_from_a_file_or_the_environment(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    from_file = ClusterToken.load(SecurityConfig(cluster_token_file=str(file)), {})
    assert from_file.is_shown_in(ClusterToken.load(NAMED, {"TOKEN": TOKEN}).metadata)


@pytest.mark.parametrize("text", ["", "short", "x" * 600, "with\x00zero-0123456789", "ü" * 20])
def test_what_is_no_token_is_refused_without_being_told(text, tmp_path):
    file = tmp_path / "token"
    file.write_text(text)
    for config in (NAMED, SecurityConfig(cluster_token_file=str(file))):
        with pytest.raises(StartupError, match=r"security\.cluster_token_") as caught:
            ClusterToken.load(config, {"TOKEN": text})
        assert not text or text not in caught.value.message.replace("a token", "")


def test_one_that_is_missing_is_named(tmp_path):
    with pytest.raises(StartupError, match="TOKEN is not set on this node"):
        ClusterToken.load(NAMED, {})
    gone = SecurityConfig(cluster_token_file=str(tmp_path / "none"))
    with pytest.raises(StartupError, match="none cannot be read on this node"):
        ClusterToken.load(gone, {})


@pytest.fixture
async def guarded():
    """A server of the Worker service behind a token; returns its address."""
    server = grpc.aio.server(interceptors=ClusterToken(TOKEN).guards)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker_pb2_grpc.WorkerServicer(), server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.mark.parametrize("method", ["Attach", "Link"])
async def test_every_method_asks_for_it_before_it_reads_anything(guarded, method):
    """A stranger who sends nothing is refused all the same."""
    async with grpc.aio.insecure_channel(guarded) as channel:
        call = getattr(worker_pb2_grpc.WorkerStub(channel), method)()
        async with asyncio.timeout(10):
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        member = getattr(worker_pb2_grpc.WorkerStub(channel), method)(
            metadata=ClusterToken(TOKEN).metadata
        )
        assert await member.code() is grpc.StatusCode.UNIMPLEMENTED
        nowhere = channel.unary_unary("/pdserve.worker.v1.Worker/Nothing")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await nowhere(b"")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_is_told_to_anybody(guarded):
    async with grpc.aio.insecure_channel(guarded) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_control_plane_tells_members_only(monkeypatch):
    monkeypatch.setenv("TOKEN", TOKEN)
    tree = {"pools": [{"name": "a", "role": "mixed"}], "security": {"cluster_token_env": "TOKEN"}}
    server = ControlServer(from_tree(tree), SystemClock())
    address = await server.start("127.0.0.1", 0)
    try:
        assert (await get_cluster(address, 5.0, ClusterToken(TOKEN))).workers == ()
        for stranger in (None, ClusterToken(TOKEN[::-1])):
            with pytest.raises(NoWorker, match="UNAUTHENTICATED"):
                await get_cluster(address, 5.0, stranger)
    finally:
        await server.stop()
