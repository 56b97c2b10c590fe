"""A router that is told to end: shut for who comes, open for who is there. Real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import socket
import time

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config import LimitsConfig
from cluster.request import FinishReason
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from router import api, leave
from router.grpc_api import GrpcDoor
from router.http_door import HttpDoor
from tests.router.fakes import (
    EOS_ID,
    FakeCluster,
    assert_conserved,
    make_router,
    metric,
    until,
)

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
        began = time.monotonic()
        call = asyncio.ensure_future(stub.GenerateOnce(request, timeout=CALL_S))
        await until(lambda: is_running(service))
        stopping = asyncio.ensure_future(door.stop(GRACE_S))
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.GenerateOnce(request, timeout=CALL_S / 4)
        assert late.value.code() in (
            grpc.StatusCode.CANCELLED,  # it came amid the closing
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        )
        with pytest.raises(grpc.aio.AioRpcError) as end:
            await call
        # The server closes with its last call: its word and the client's own deadline race that.
        assert time.monotonic() - began > 0.9 * CALL_S, "it was cut"
        assert end.value.code() in (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.UNAVAILABLE,
        )
        await asyncio.wait_for(stopping, 10)


async def test_a_grpc_call_that_ends_while_its_door_closes_is_told_how():
    """CASES P-27: it has its answer, and not the UNAVAILABLE of a connection that was cut."""
    cluster = FakeCluster()
    service = make_router(cluster)
    door = GrpcDoor(service, host="127.0.0.1", port=0)
    port = await door.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = pb.GenerateRequest(prompt="hi")
        call = asyncio.ensure_future(
            pb_grpc.InferenceStub(channel).GenerateOnce(request, timeout=10)
        )  # fmt: skip
        prefill, decode = await cluster.started("p0", "d0")
        stopping = asyncio.ensure_future(door.stop())
        await until(lambda: not door.is_serving)
        key = prefill.legs[0].key
        prefill.say(ord("y"), ends=True, key=key)
        decode.say(ord("y"), EOS_ID, finish=FinishReason.STOP, key=key)
        assert (await call).choices[0].text == "y"
        await asyncio.wait_for(stopping, 10)
    await service.stop()
    assert_conserved(service)


@contextlib.asynccontextmanager
async def both_doors(drain_s=30.0):
    limits = LimitsConfig(drain_s=drain_s)
    service = make_router(FakeCluster(), limits=limits)
    http = HttpDoor(api.build_api(service), host="127.0.0.1", port=0)
    grpc_door = GrpcDoor(service, host="127.0.0.1", port=0)
    await http.start()
    await grpc_door.start()
    try:
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{http.port}", timeout=10) as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{grpc_door.port}") as channel,
        ):
            yield service, http, grpc_door, client, channel
    finally:
        await http.stop()
        await grpc_door.stop()
        await service.stop()


async def test_a_router_without_heirs_says_so_first_and_refuses_politely(monkeypatch):
    """CASES P-27: readiness flips first; then 503 with Retry-After until the last call is over."""
    monkeypatch.setattr(leave, "LAST_CALLS_S", 0.3)
    async with both_doors() as (service, http, grpc_door, client, channel):
        stub, health = pb_grpc.InferenceStub(channel), health_pb2_grpc.HealthStub(channel)
        assert (await client.get("/health/ready")).status_code == 200
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        cluster_watch = stub.WatchCluster(pb.GetClusterRequest())
        await cluster_watch.read()
        body = {"prompt": "hi", "timeout_s": 1.5}
        running = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(lambda: is_running(service))
        leaving = asyncio.ensure_future(leave.Leave(service, http, grpc_door).take(GRACE_S))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        ready = await client.get("/health/ready")
        assert (ready.status_code, ready.json()["missing"]) == (503, ["router"])
        assert ready.headers["connection"] == "close", "it would keep delivering"
        assert (await client.post("/tokenize", json={"prompt": "hi"})).status_code == 200
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await cluster_watch.read()
        assert "this router is shutting down" in told.value.details()
        refused = await client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.GenerateOnce(pb.GenerateRequest(prompt="hi"), timeout=5)
        assert late.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(late.value.trailing_metadata())["retry-after"] == "1"
        assert not leaving.done()
        assert (await running).status_code == 504, "it was cut"
        await asyncio.wait_for(leaving, 5)
        await asyncio.wait_for(grpc_door.stop(GRACE_S), 5)
        assert await watch.read() is grpc.aio.EOF, "a watcher kept the server from its end"
    assert_conserved(service)


def is_refused(port: int) -> bool:
    """Whether nobody listens there; one who turns newcomers away lets them wait."""
    with socket.socket() as newcomer:
        newcomer.settimeout(0.05)
        return newcomer.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


async def test_doors_that_another_has_too_are_closed_at_once(monkeypatch):
    """CASES P-27: the kernel gives newcomers to the other; half of them would be refused here.

    Whoever is connected stays and is served, until gRPC has asked for another connection and HTTP
    has answered once more.
    """
    monkeypatch.setattr(leave, "LAST_CALLS_S", 0.0)
    monkeypatch.setattr(leave, "_LAST_WORDS_S", 0.2)
    others = {"heirs": False}
    monkeypatch.setattr(leave, "is_shared", lambda port: others["heirs"])
    async with both_doors(drain_s=6.0) as (service, http, grpc_door, client, channel):
        stub = pb_grpc.InferenceStub(channel)
        watch = stub.WatchCluster(pb.GetClusterRequest())
        await watch.read()
        body = {"prompt": "hi", "timeout_s": GRACE_S}
        running = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(lambda: is_running(service))
        assert (await client.get("/health/live")).status_code == 200  # and is kept
        leaving = asyncio.ensure_future(leave.Leave(service, http, grpc_door).take(GRACE_S))
        await until(lambda: not service.readiness().is_ready)
        others["heirs"] = True
        for door in (http, grpc_door):
            await until(functools.partial(is_refused, door.port))
            assert door.is_serving, "whoever is connected would be cut"
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(watch.read(), 5)  # it would keep the server from its end
        assert await stub.Tokenize(pb.TokenizeRequest(prompt="hi")), "it refuses who can't leave"
        answer = await client.get("/health/live")
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert not leaving.done()
        await asyncio.wait_for(leaving, 5)
        assert not grpc_door.has_clients, "it was not asked to connect again"
        assert not running.done()
        running.cancel()


async def test_two_routers_that_leave_together_are_no_heirs_of_one_another(monkeypatch):
    """CASES P-27: the one that is left refuses politely; clients of both would hear nothing."""
    monkeypatch.setattr(leave, "LAST_CALLS_S", 0.0)
    monkeypatch.setattr(leave, "_LAST_WORDS_S", 0.2)
    others = {"heirs": True, "turned": 0, "let in": 0}
    monkeypatch.setattr(leave, "is_shared", lambda port: others["heirs"])

    def counted(name, do):
        def call(port):
            others[name] += 1
            return do(port)

        return call

    monkeypatch.setattr(leave, "turn_away", counted("turned", leave.turn_away))
    monkeypatch.setattr(leave, "let_in", counted("let in", leave.let_in))
    async with both_doors() as (service, http, grpc_door, client, _):
        body = {"prompt": "hi", "timeout_s": GRACE_S}
        running = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(lambda: is_running(service))
        leaving = asyncio.ensure_future(leave.Leave(service, http, grpc_door).take(GRACE_S))
        await until(lambda: others["turned"] == 2)
        others["heirs"] = False
        await until(lambda: others["let in"] == 2)
        async with httpx.AsyncClient(base_url=client.base_url, timeout=0.9) as newcomer:
            refused = await newcomer.post("/v1/completions", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert not leaving.done()

        # STEP 1: another one that comes is an heir after all.
        others["heirs"] = True
        await asyncio.wait_for(leaving, 5)
        assert others["turned"] == 4
        running.cancel()
