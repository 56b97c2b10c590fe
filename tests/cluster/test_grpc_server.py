"""The servers inside the cluster stay open as the public one does."""

import asyncio
import gc
import weakref
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cluster.errors import StartupError
from cluster.grpc_server import StandingServer, make_server

KILLER = (
    Path(__file__).parents[1]
    / "router" / "corpus" / "grpc" / "broke-by-a-path-that-is-no-utf-8"
)  # fmt: skip


def make_health_server(port: int) -> tuple[grpc.aio.Server, int]:
    server = make_server(options=(("grpc.so_reuseport", 0),))
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    try:
        return server, server.add_insecure_port(f"127.0.0.1:{port}")
    except RuntimeError as error:
        raise StartupError("taken") from error


async def send(port: int, data: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    writer.close()


async def test_a_server_that_gave_up_is_replaced_on_its_port_again_and_again():
    """CASES S-14: one stream that runs lives through all of it."""
    server = StandingServer(make_health_server)
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        for number in range(1, 4):
            await send(port, KILLER.read_bytes())
            while server.num_reopened < number:  # noqa: ASYNC110 (the test's timeout bounds it)
                await asyncio.sleep(0.01)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as other:
                stub = health_pb2_grpc.HealthStub(other)
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert not watch.done()
        assert server.is_serving
    await server.stop()
    assert not server.is_serving
    await server.stop()


async def test_a_port_that_is_taken_is_an_error_at_the_start():
    first, second = StandingServer(make_health_server), StandingServer(make_health_server)
    port = await first.start()
    with pytest.raises(StartupError):
        await second.start(port)
    assert not second.is_serving
    await second.stop()
    await first.stop()


async def test_what_the_core_writes_to_outlives_the_server_that_gave_up():
    """CASES S-14, P-10: freed too early, it was other people's memory that was written to."""
    server = StandingServer(make_health_server)
    port = await server.start()
    await asyncio.sleep(0)  # the tasks that ask begin
    asking = [task for task in asyncio.all_tasks() if "request" in task.get_coro().__name__]
    assert asking
    await send(port, KILLER.read_bytes())
    while not all(task.done() for task in asking):  # noqa: ASYNC110 (the test's timeout bounds it)
        await asyncio.sleep(0.01)
    assert not any(task.cancelled() for task in asking)
    await server.stop()


async def test_the_loop_that_late_events_name_outlives_the_server():
    """CASES S-14, P-10: the core's events point to it without holding it."""
    server, _ = make_health_server(0)
    await server.start()
    loop = weakref.ref(server._loop)
    await server.stop(None)
    del server
    gc.collect()
    assert loop() is not None
    again, _ = make_health_server(0)
    assert again._loop is loop(), "a server that is opened again and again leaves no more behind"
