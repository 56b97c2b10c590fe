"""Bytes that nobody sensible sends, at both doors of a router: no crash, no hang, service goes on.

``corpus/`` keeps what is tried each time: samples of each kind, and every input that once broke
something (``broke-*``; a fuzzing run writes them there). More are made of them by a slow test.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import traceback
from pathlib import Path

import grpc
import pytest

from cluster.config import LimitsConfig
from cluster.wire import public_v1_pb2 as pb
from router.api import build_api
from router.grpc_api import GrpcDoor
from router.http_door import HttpDoor
from tests.router.doors import grpc_request
from tests.router.fakes import (
    EOS_ID,
    FakeCluster,
    assert_conserved,
    make_router,
    metric,
    speaks,
    until,
)

CORPUS = Path(__file__).parent / "corpus"
KINDS = ("http", "grpc", "message")
METHODS = tuple(method.name for method in pb.DESCRIPTOR.services_by_name["Inference"].methods)
ANSWER_S = 20.0
"""No peer that has said all it says may wait longer, on a machine that stands still at times."""
NUM_MADE = 2000
"""Of each kind, by the slow test."""
GOOD = {"prompt": "hi", "max_tokens": 2}


def samples(kind: str) -> list[bytes]:
    found = [path.read_bytes() for path in sorted((CORPUS / kind).iterdir())]
    assert found
    return found


class Target:
    """A router with both doors open, and how one input is thrown at it."""

    def __init__(self, service, http_port: int, grpc_port: int, channel, caplog) -> None:
        self._service = service
        self._ports = {"http": http_port, "grpc": grpc_port}
        self._channel = channel
        self._caplog = caplog

    async def throw(self, kind: str, data: bytes) -> None:
        """Try one input; AssertionError where it broke something."""
        async with asyncio.timeout(ANSWER_S):
            if kind == "message":
                await self._call(data)
            else:
                answer = await self._send(self._ports[kind], data)
                assert b" 500 " not in answer.partition(b"\r\n")[0], answer
        broken = [r for r in self._caplog.records if r.levelno >= logging.ERROR and is_ours(r)]
        assert not broken, broken

    async def is_well(self) -> None:
        """CASES §0 C and Q."""
        async with asyncio.timeout(ANSWER_S):
            answer = await self._canary()
            assert pb.GenerateOnceResponse.FromString(answer).choices[0].text == "ok"
            await until(lambda: metric(self._service, "pdserve_requests_in_flight") == 0)
            await until(lambda: self._service._num_at_edge + self._service.num_reading == 0)
        assert_conserved(self._service)

    async def _canary(self) -> bytes:
        method = self._channel.unary_unary("/pdserve.v1.Inference/GenerateOnce")
        while True:  # a gRPC server that gave up ends what had just reached it
            try:
                return await method(grpc_request(GOOD).SerializeToString(), wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE):
                    raise
                await asyncio.sleep(0.01)

    async def _send(self, port: int, data: bytes) -> bytes:
        while True:  # a gRPC server that gave up is replaced in a moment
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                break
            except ConnectionError:
                await asyncio.sleep(0.01)
        try:
            with contextlib.suppress(OSError):
                writer.write(data)
                writer.write_eof()
                return await reader.read()
            return b""
        finally:
            writer.close()

    async def _call(self, data: bytes) -> None:
        method = METHODS[data[0] % len(METHODS)] if data else METHODS[0]
        call = self._channel.unary_stream(f"/pdserve.v1.Inference/{method}")(data[1:])
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.read()  # one is enough: WatchCluster never ends
        call.cancel()


def is_ours(record: logging.LogRecord) -> bool:
    """gRPC tells as an error what it could not parse, and is opened again where it gives up."""
    if record.name.startswith(("grpc", "cluster.grpc_server")):
        return False
    frames = traceback.extract_tb(record.exc_info[2]) if record.exc_info else []
    return not frames or "grpcio/grpc" not in frames[-1].filename


@pytest.fixture
async def target(caplog):
    cluster = FakeCluster()
    cluster.script = speaks([*b"ok", EOS_ID])
    limits = LimitsConfig(max_body_bytes=20_000, default_deadline_s=2.0)
    service = make_router(cluster, limits=limits)
    http = HttpDoor(build_api(service), host="127.0.0.1", port=0)
    door = GrpcDoor(service, host="127.0.0.1", port=0)
    http_port, grpc_port = await http.start(), await door.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        yield Target(service, http_port, grpc_port, channel, caplog)
    await http.stop()
    await door.stop()
    await service.stop()


@pytest.mark.parametrize("kind", KINDS)
async def test_what_was_kept_breaks_nothing(kind, target):
    """CASES P-10, P-28: each input of the corpus, one after another, and then all at once."""
    kept = samples(kind)
    for data in kept:
        await target.throw(kind, data)
    await asyncio.gather(*(target.throw(kind, data) for data in kept))
    await target.is_well()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_made_of_it_breaks_nothing(kind, target):
    """CASES P-10, P-28: cut, flipped, doubled, spliced; what breaks something is kept."""
    draw = random.Random(f"{kind} 1")
    kept = samples(kind)
    for number in range(NUM_MADE):
        data = mutated(draw, kept)
        try:
            await target.throw(kind, data)
            if number % 100 == 0:
                await target.is_well()
        except BaseException:
            name = f"broke-{hashlib.sha256(data).hexdigest()[:12]}"
            (CORPUS / kind / name).write_bytes(data)
            raise
    await target.is_well()


def mutated(draw: random.Random, kept: list[bytes]) -> bytes:
    """Change one sample in a few places."""
    data = bytearray(draw.choice(kept))
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice((1, 2, 4, 16, 64)))
        match draw.randrange(6):
            case 0:
                del data[at:end]
            case 1:
                data[at:end] = draw.randbytes(end - at)
            case 2:
                data[at:at] = data[at:end] * draw.choice((1, 2, 50))
            case 3:
                other = draw.choice(kept)
                data[at:end] = other[draw.randrange(len(other) + 1) :]
            case 4:
                data[at:at] = draw.choice(
                    (
                        b"\x00",
                        b"\xff" * 8,
                        b"\r\n",
                        b"\r\n\r\n",
                        b'"',
                        b"[",
                        b"9" * 400,
                        b"\x80" * 11,
                    )
                )
            case 5:
                if at < len(data):
                    data[at] ^= 1 << draw.randrange(8)
    return bytes(data[:60_000])
