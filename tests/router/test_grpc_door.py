"""The gRPC server that is put up again where grpc.aio lets it fall."""

import asyncio
import contextlib
import logging
from pathlib import Path

import grpc

from cluster.request import FinishReason
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from router.grpc_api import GrpcCaps, GrpcDoor
from tests.router.doors import open_doors
from tests.router.fakes import EOS_ID, FakeCluster, assert_conserved, make_router, speaks, until

KILLER = Path(__file__).parent / "corpus" / "grpc" / "broke-by-a-path-that-is-no-utf-8"


async def test_a_call_with_a_broken_path_shuts_nobody_out(caplog):
    """CASES P-28, S-14: found by fuzzing; a stream that runs goes on, and new calls are taken."""
    cluster = FakeCluster()
    service = make_router(cluster)
    door = GrpcDoor(service, host="127.0.0.1", port=0)
    port = await door.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        running = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(prompt="hi"))
        prefill, decode = await cluster.started("p0", "d0")
        await send(port, KILLER.read_bytes())
        await until(lambda: door._server.num_reopened == 1)
        assert door.is_serving
        cluster.script = speaks([*b"ok", EOS_ID])
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as other:
            for connection in cluster.connections:
                connection.script = cluster.script
            stub = pb_grpc.InferenceStub(other)
            answer = await stub.GenerateOnce(pb.GenerateRequest(prompt="hi"), timeout=5)
            assert answer.choices[0].text == "ok"
        key = prefill.legs[0].key
        prefill.say(ord("y"), ends=True, key=key)
        decode.say(ord("y"), EOS_ID, finish=FinishReason.STOP, key=key)
        assert "".join([message.text async for message in running]) == "y"
    await door.stop()
    assert not door.is_serving
    await service.stop()
    assert_conserved(service)
    told = [record for record in caplog.records if record.name == "cluster.grpc_server"]
    assert [record.levelno for record in told] == [logging.ERROR]


async def test_a_message_that_is_no_protobuf_is_the_clients_mistake(caplog):
    """CASES P-28, S-10: whatever the method; nothing is logged of it, and nothing counted."""
    service = make_router(FakeCluster())
    async with open_doors(service) as doors:
        for kind, name in METHODS.items():
            broken = iter([b"\xff"]) if name.startswith("stream") else b"\xff"
            call = getattr(doors.channel, name)(kind)(broken, timeout=5)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, kind
            assert dict(await call.trailing_metadata())["pdserve-code"] == "invalid_request"
        assert_conserved(service)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_metadata_that_is_no_utf_8_is_told_to_no_log(caplog):
    """CASES S-06, S-17: the call is answered; what a client sent may be a secret."""
    service = make_router(FakeCluster())
    async with open_doors(service) as doors:
        host, port = doors.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(PREFACE + models_call((b"x-secret", b"caf\xe9 sk-0123456789")))
        answer = b""
        while b"tiny" not in answer:
            answer += await asyncio.wait_for(reader.read(4096), 10)
        writer.close()
    assert "sk-0123456789" not in caplog.text
    assert "Traceback" not in caplog.text


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def models_call(*metadata: tuple[bytes, bytes]) -> bytes:
    """ListModels as HTTP/2 has it, with the fields spelled out: RFC 9113 and RFC 7541, 6.2.2."""
    fields = (
        (b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"x"),
        (b":path", b"/pdserve.v1.Inference/ListModels"), (b"te", b"trailers"),
        (b"content-type", b"application/grpc"), *metadata,
    )  # fmt: skip
    head = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields
    )
    frames = ((1, 4, head), (0, 1, bytes(5)))
    return b"".join(
        len(body).to_bytes(3, "big") + bytes([kind, flags]) + (1).to_bytes(4, "big") + body
        for kind, flags, body in frames
    )


METHODS = {
    "/pdserve.v1.Inference/Generate": "unary_stream",
    "/pdserve.v1.Inference/GenerateOnce": "unary_unary",
    "/pdserve.v1.Inference/WatchCluster": "unary_stream",
    "/grpc.health.v1.Health/Check": "unary_unary",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "stream_stream",
}


async def test_one_address_has_its_share_of_connections():
    """CASES S-14: silent ones as well; who came first stays, and other addresses are let in."""
    service = make_router(FakeCluster())
    caps = GrpcCaps(max_per_address=64, look_beat_s=0.02)
    door = GrpcDoor(service, host="127.0.0.1", port=0, caps=caps)
    port = await door.start()
    crowd = [await connect_from("127.0.0.2", port) for _ in range(64)]
    other = await connect_from("127.0.0.3", port)
    known = door.connections
    await until(lambda: len(known.kept) == 65)
    late = [await connect_from("127.0.0.2", port) for _ in range(3)]
    await until(lambda: known.num_shut == 3)
    for reader, _ in late:
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 10)  # to its end
    assert not any(reader.at_eof() for reader, _ in (*crowd, other))
    for _, writer in (*crowd, *late, other):
        writer.close()
    await door.stop()
    await service.stop()


async def test_a_connection_that_says_nothing_is_closed():
    """CASES S-14: half-open, from its first byte on."""
    service = make_router(FakeCluster())
    door = GrpcDoor(service, host="127.0.0.1", port=0, caps=GrpcCaps(handshake_timeout_s=0.1))
    port = await door.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI * HT")
    while await asyncio.wait_for(reader.read(4096), 10):
        pass
    writer.close()
    await door.stop()
    await service.stop()


async def connect_from(address: str, port: int):
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


async def send(port: int, data: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    writer.close()
