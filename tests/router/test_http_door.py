"""The HTTP door's own bounds: heads, half-open connections, slow readers. Real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path

import pytest

from router import api
from router.http_door import HttpDoor
from router.http_guard import HttpCaps
from tests.router.fakes import (
    EOS_ID,
    FakeCluster,
    assert_conserved,
    make_router,
    metric,
    speaks,
    until,
)

LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@contextlib.asynccontextmanager
async def door_of(service, **caps):
    door = HttpDoor(api.build_api(service), host="127.0.0.1", port=0, caps=HttpCaps(**caps))
    port = await door.start()
    try:
        yield door, port
    finally:
        await door.stop()
        await service.stop()


def rss_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def read_answer(reader):
    """Return the status and the body of one answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].split()[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


async def test_a_large_head_is_refused_in_our_envelope_and_nothing_grows():
    """P-10, S-10: a header of 1 MB."""
    async with door_of(make_router(FakeCluster())) as (_, port):
        before = rss_bytes()
        for _ in range(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health/live HTTP/1.1\r\nx: " + b"y" * (1 << 20) + b"\r\n\r\n")
            status, body = await read_answer(reader)
            assert (status, body["error"]["code"]) == (431, "request_too_large")
            assert await reader.read() == b""
            writer.close()
        assert rss_bytes() - before < 20 << 20


async def test_what_is_no_http_is_told_so():
    async with door_of(make_router(FakeCluster())) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01 hello\r\n\r\n")
        status, body = await read_answer(reader)
        assert (status, set(body["error"])) == (400, {"message", "type", "param", "code"})
        writer.close()


async def test_a_body_that_breaks_off_the_protocol_ends_its_call():
    """The app is told, and reads no more of it."""
    service = make_router(FakeCluster())
    async with door_of(service) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + b'transfer-encoding: chunked\r\n\r\n4\r\n{"a"\r\n')
        await until(lambda: service.num_reading == 1)
        writer.write(b"no chunk\r\n")
        assert (await read_answer(reader))[0] == 400
        writer.close()
        await until(lambda: service.num_reading == 0)


@pytest.mark.parametrize("sent", [b"", b"GET /health/live HT", LIVE, LIVE + b"GET / HTTP/1.1\r\n"])
async def test_half_open_connections_are_closed(sent):
    """S-14: silent, in the middle of the first head or of a later one, or idle."""
    async with door_of(make_router(FakeCluster()), head_timeout_s=0.1) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        with contextlib.suppress(ConnectionResetError):
            while await asyncio.wait_for(reader.read(4096), 5):
                pass
        writer.close()


async def test_a_slow_answer_is_no_half_open_connection():
    cluster = FakeCluster()
    service = make_router(cluster)
    async with door_of(service, head_timeout_s=0.05) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt": "hi", "timeout_s": 0.3}'
        writer.write(POST + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        assert (await read_answer(reader))[0] == 504
        writer.close()


async def test_connections_above_the_cap_are_told_and_closed():
    async with door_of(make_router(FakeCluster()), max_connections=2) as (_, port):
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in kept:
            writer.write(LIVE)
            assert (await read_answer(reader))[0] == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert (await read_answer(reader))[0] == 503
        writer.close()
        for reader, writer in kept:
            writer.write(LIVE)
            assert (await read_answer(reader))[0] == 200
            writer.close()


async def connect_from(address, port):
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


async def test_one_address_has_its_share_of_connections_and_the_others_theirs():
    """S-14: whoever is told to come later may, as soon as one of its own has gone."""
    async with door_of(make_router(FakeCluster()), max_per_address=2) as (door, port):
        kept = [await connect_from("127.0.0.2", port) for _ in range(2)]
        for reader, writer in kept:
            writer.write(LIVE)
            assert (await read_answer(reader))[0] == 200
        reader, writer = await connect_from("127.0.0.2", port)
        status, body = await read_answer(reader)
        assert (status, body["error"]["code"]) == (503, "cluster_full")
        writer.close()
        reader, writer = await connect_from("127.0.0.3", port)
        writer.write(LIVE)
        assert (await read_answer(reader))[0] == 200
        writer.close()
        kept.pop()[1].close()
        await until(lambda: len(door._server.server_state.connections) == 1)
        reader, writer = await connect_from("127.0.0.2", port)
        writer.write(LIVE)
        assert (await read_answer(reader))[0] == 200
        for _, each in (*kept, (reader, writer)):
            each.close()


async def test_bodies_that_do_not_come_hold_nobody_up(monkeypatch):
    """S-14, P-10: few may be slow, of one address fewer; none of them has a place at the edge."""
    monkeypatch.setattr("router.http_body.PROMPT_S", 0.02)
    monkeypatch.setattr("router.http_body._MAX_SLOW_EACH", 2)
    cluster = FakeCluster()
    cluster.script = speaks([*b"ok", EOS_ID])
    service = make_router(cluster, max_open_calls=1)
    half = POST + b"content-length: 18\r\n\r\n" + b'{"prompt": '
    async with door_of(service) as (_, port):
        slow = [await connect_from("127.0.0.2", port) for _ in range(3)]
        for _, writer in slow:
            writer.write(half)
        first_refused = [asyncio.create_task(read_answer(reader)) for reader, _ in slow]
        done, slow_ones = await asyncio.wait(first_refused, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result()[0] for task in done] == [503]
        assert len(slow_ones) == 2
        for address in ("127.0.0.2", "127.0.0.3"):
            reader, writer = await connect_from(address, port)
            writer.write(half + b'"hi"  }')
            assert (await read_answer(reader))[0] == 200
            writer.close()
        for task, (_, each) in zip(first_refused, slow, strict=True):
            each.write(b'"hi"  }')
            assert (await task)[0] == (503 if task in done else 200)
            each.close()
        await until(lambda: service.dispatcher.num_open == 0)
        assert_conserved(service)


async def test_answers_are_not_held_back_by_nagle():
    """asyncio sets TCP_NODELAY only for sockets whose protocol is named."""
    service = make_router(FakeCluster())
    async with door_of(service) as (door, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(LIVE)
        assert (await read_answer(reader))[0] == 200
        (connection,) = door._server.server_state.connections
        ours = connection.transport.get_extra_info("socket")
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()


def never_reads(port):
    """A connected socket with the smallest buffer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    client.connect(("127.0.0.1", port))
    return client


@pytest.mark.parametrize("by", ["deadline", "stall"])
async def test_a_client_that_does_not_read_is_cut_off(by, monkeypatch):
    """S-14: its stream ends with its deadline, or when nothing has been read for too long."""
    monkeypatch.setattr("router.http_generate.WRITE_GRACE_S", 0.1)
    monkeypatch.setattr("router.answers.TextAnswer.chunks", lambda self, event: ["x" * 1_000_000])
    cluster = FakeCluster()
    cluster.script = lambda worker, leg: (
        worker.say(*b"abcdefgh") if worker.peer.worker_id == "d0" else None
    )
    service = make_router(cluster)
    stall_s = 0.2 if by == "stall" else 60.0
    async with door_of(service, stall_timeout_s=stall_s) as (door, port):
        client = never_reads(port)
        body = b'{"prompt": "hi", "stream": true, "timeout_s": %s}' % (
            b"0.3" if by == "deadline" else b"60"
        )
        client.sendall(POST + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        ends = ("pdserve_requests_failed_total", "pdserve_requests_aborted_total")
        await until(lambda: sum(metric(service, end) for end in ends) == 1)
        await until(lambda: not door._server.server_state.connections)
        client.close()
        assert_conserved(service)


async def test_the_door_says_whether_it_serves():
    service = make_router(FakeCluster())
    door = HttpDoor(api.build_api(service), host="127.0.0.1", port=0)
    assert not door.is_serving
    await door.start()
    assert door.is_serving
    door._server.should_exit = True
    await door._serving
    assert not door.is_serving
    await door.stop()
