"""A router that is told to end: shut for who comes, open for who is there. Real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json

import grpc
import pytest

from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from router import api
from router.grpc_api import GrpcDoor
from router.http_door import HttpDoor
from tests.router.fakes import FakeCluster, make_router, metric, until

CALL_S, GRACE_S = 0.6, 20.0
"""A call that nobody answers ends by its own deadline, long before the grace does."""
LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def door_of(kind):
    service = make_router(FakeCluster())
    make = {"http": lambda: HttpDoor(api.build_api(service), host="127.0.0.1", port=0)}
    make["grpc"] = lambda: GrpcDoor(service, host="127.0.0.1", port=0)
    door = make[kind]()
    port = await door.start()
    try:
        yield service, door, port
    finally:
        await door.stop()
        await service.stop()


def is_running(service) -> bool:
    return metric(service, "pdserve_requests_in_flight") == 1


async def test_http_calls_run_to_their_end_and_nobody_else_is_let_in():
    """CASES P-27: the router; a connection that is kept alive does not keep delivering."""
    async with door_of("http") as (service, door, port):
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", port)
        idle_writer.write(LIVE)
        await idle.readuntil(b"\r\n\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"prompt": "hi", "timeout_s": CALL_S}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            + f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await until(lambda: is_running(service))
        stopping = asyncio.ensure_future(door.stop(GRACE_S))
        await asyncio.wait_for(idle.read(), 5)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        assert not stopping.done()
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 504"), "it was cut"
        await asyncio.wait_for(stopping, 10)
        for each in (writer, idle_writer):
            each.close()


async def test_grpc_calls_run_to_their_end_and_nobody_else_is_let_in():
    """CASES P-27: the router."""
    async with (
        door_of("grpc") as (service, door, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = pb_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(prompt="hi")
        call = asyncio.ensure_future(stub.GenerateOnce(request, timeout=CALL_S))
        await until(lambda: is_running(service))
        stopping = asyncio.ensure_future(door.stop(GRACE_S))
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.GenerateOnce(request, timeout=CALL_S / 4)
        assert late.value.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        )
        with pytest.raises(grpc.aio.AioRpcError) as end:
            await call
        assert end.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED, "it was cut"
        await asyncio.wait_for(stopping, 10)
