"""The gRPC server that is put up again where grpc.aio lets it fall."""

import asyncio
import logging
from pathlib import Path

import grpc

from cluster.request import FinishReason
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from router.grpc_api import GrpcDoor
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


async def send(port: int, data: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    writer.close()
