"""Hundreds of clients that hold what they can and read nothing: real sockets, both doors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path

import grpc
import httpx
import pytest

from cluster.request import Beat
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from router import api
from router.grpc_api import GrpcCaps, GrpcDoor
from router.http_door import HttpDoor
from router.http_guard import HttpCaps
from tests.router.fakes import EOS_ID, FakeCluster, assert_conserved, make_router, speaks, until

NUM, MAX_PER_ADDRESS = 500, 600
CROWD = "127.0.0.2"
GOOD = "good"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = json.dumps({"prompt": "hi", "stream": True}).encode()
ASKS = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


def come(port: int, says: bytes) -> socket.socket:
    each = socket.socket()
    each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    each.bind((CROWD, 0))
    each.connect(("127.0.0.1", port))
    with contextlib.suppress(OSError):  # one too many, and shut already
        each.sendall(says)
    return each


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def script(worker, leg) -> None:
    """Serve the good ones; the others get a few tokens and no end."""
    if leg.prompt_ids[: len(GOOD)] == tuple(GOOD.encode()):
        speaks([*b"ok", EOS_ID])(worker, leg)
    elif worker.peer.worker_id == "d0":
        worker.say(*b"abcdefgh", key=leg.key)


async def keep_alive(cluster: FakeCluster) -> None:
    while True:
        for worker in cluster.connections:
            worker.events.on_beat(Beat())
        await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def doors_of(service):
    """Open both with caps that the crowd reaches; their ports, and the gRPC door."""
    http_caps = HttpCaps(max_per_address=MAX_PER_ADDRESS)
    http = HttpDoor(api.build_api(service), host="127.0.0.1", port=0, caps=http_caps)
    grpc_caps = GrpcCaps(max_per_address=NUM - 100, look_beat_s=0.2)
    over_grpc = GrpcDoor(service, host="127.0.0.1", port=0, caps=grpc_caps)
    try:
        yield await http.start(), await over_grpc.start(), over_grpc
    finally:
        await over_grpc.stop()
        await http.stop()
        await service.stop()


async def all_at_once(service, start):
    """Have so many calls open; in some steps, since more than the queue holds would be refused."""
    calls, already = [], service.dispatcher.num_open
    while len(calls) < NUM:
        calls += [start() for _ in range(10)]
        num_open = already + len(calls)
        await until(lambda num_open=num_open: service.dispatcher.num_open == num_open)
    return calls


async def check_good_ones(http_port: int, grpc_port: int) -> None:
    options = (("grpc.use_local_subchannel_pool", 1),)
    address = f"127.0.0.1:{grpc_port}"
    async with (
        grpc.aio.insecure_channel(address, options=options) as channel,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=20) as client,
    ):
        for _ in range(10):
            answer = await client.post("/v1/completions", json={"prompt": GOOD})
            assert answer.json()["choices"][0]["text"] == "ok"
            request = pb.GenerateRequest(prompt=GOOD)
            told = await pb_grpc.InferenceStub(channel).GenerateOnce(request, timeout=20)
            assert told.choices[0].text == "ok"


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_five_hundred_silent_ones_of_each_kind_hold_nobody_up(monkeypatch):
    """CASES S-14: streams that nobody reads and half-open sockets, at each door."""
    monkeypatch.setattr("router.answers.TextAnswer.chunks", lambda self, event: ["x" * 20_000])
    cluster = FakeCluster()
    cluster.script = script
    beating = asyncio.create_task(keep_alive(cluster))
    service = make_router(cluster, max_open_calls=3 * NUM)
    async with doors_of(service) as (http_port, grpc_port, over_grpc):
        before = rss_bytes()
        silent = await all_at_once(service, lambda: come(http_port, ASKS))
        half_open = [come(http_port, HEAD) for _ in range(NUM)]
        half_open += [come(grpc_port, b"PRI * HTTP/2.0\r\n\r") for _ in range(NUM)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as crowded:
            generate, ask = pb_grpc.InferenceStub(crowded).Generate, pb.GenerateRequest(prompt="hi")
            calls = await all_at_once(service, lambda: generate(ask))
            await check_good_ones(http_port, grpc_port)
            await until(lambda: over_grpc.connections.num_shut >= 100)
            assert half_open[NUM - 1].recv(12) == b"HTTP/1.1 503"
            assert rss_bytes() - before < 200 << 20
            for call in calls:
                call.cancel()
        for each in (*silent, *half_open):
            each.close()
        await until(lambda: service.dispatcher.num_open == 0)
        beating.cancel()
    assert_conserved(service)
