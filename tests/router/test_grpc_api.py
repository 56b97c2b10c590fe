"""The gRPC door: streams, statuses, deadlines, cancels, health and reflection."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster import errors
from cluster.handoff import AbortCause
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from router.grpc_api import GrpcDoor
from tests.router.fakes import (
    EOS_ID,
    FakeCluster,
    assert_conserved,
    make_router,
    metric,
    speaks,
    until,
)

A, B, C = b"abc"


@pytest.fixture
async def cluster():
    return FakeCluster()


@pytest.fixture
async def service(cluster):
    return make_router(cluster)


@pytest.fixture
async def channel(service):
    door = GrpcDoor(service, host="127.0.0.1", port=0)
    port = await door.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await door.stop()
    await door.stop()
    await service.stop()


@pytest.fixture
def stub(channel):
    return pb_grpc.InferenceStub(channel)


async def failure_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def test_generate_streams_tokens_text_usage_and_timeline(stub, cluster, service):
    cluster.script = speaks([*"é!".encode(), EOS_ID])
    call = stub.Generate(
        pb.GenerateRequest(
            chat=pb.Chat(messages=[pb.Message(role="user", content="hi")]), timeline=True
        )
    )
    request_id = dict(await call.initial_metadata())["x-request-id"]
    messages = [message async for message in call]
    assert {message.request_id for message in messages} == {request_id}
    assert "".join(message.text for message in messages) == "é!"
    assert [i for message in messages for i in message.token_ids] == [*"é!".encode(), EOS_ID]
    assert [message.finish_reason for message in messages] == ["", "", "", "", "stop"]
    last = messages[-1]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (19, 4)
    assert (last.timeline.prefill_worker, last.timeline.prefill.transfer_bytes) == ("p0", 64)
    assert not any(message.HasField("usage") for message in messages[:-1])
    assert_conserved(service)


async def test_timeline_only_when_asked(stub, cluster):
    cluster.script = speaks([A])
    *_, last = [m async for m in stub.Generate(pb.GenerateRequest(prompt="hi"))]
    assert not last.HasField("timeline")


@pytest.mark.parametrize("error_type", errors.BY_CODE.values())
async def test_each_error_has_its_status_and_nothing_of_the_inside(stub, cluster, error_type):
    cluster.route.error = error_type("what went wrong", worker_id="p0", retry_after_s=2.5)
    error = await failure_of(stub.Generate(pb.GenerateRequest(prompt="hi")))
    assert error.code() is grpc.StatusCode[error_type.grpc_code]
    assert error.details() == "what went wrong"
    trailing = dict(error.trailing_metadata())
    assert trailing["pdserve-code"] == error_type.code
    assert trailing["retry-after"] == "3"


async def test_an_error_in_mid_stream_ends_the_call_with_its_status(stub, cluster):
    def script(worker, leg):
        if worker.peer.worker_id == "p0":
            worker.say(A, ends=True)
        else:
            worker.say(error=errors.HandoffFailed("broken"))

    cluster.script = script
    call = stub.Generate(pb.GenerateRequest(prompt="hi"))
    assert (await anext(aiter(call))).text == "a"
    assert (await failure_of(call)).code() is grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
async def test_a_client_that_cancels_stops_the_work(stub, cluster, service, phase):
    """P-11, P-28: the call is cancelled by its client, in every phase."""
    if phase == "queue":
        cluster.route.default_pair = None
    call = stub.Generate(pb.GenerateRequest(prompt="hi"))
    await cluster.route.wanted.wait()
    if phase != "queue":
        prefill, _ = await cluster.started("p0", "d0")
        if phase == "decode":
            prefill.say(A)
            await anext(aiter(call))
    call.cancel()
    await until(lambda: metric(service, "pdserve_requests_in_flight") == 0)
    assert metric(service, f'pdserve_requests_aborted_total{{phase="{phase}"}}') == 1
    if phase != "queue":
        workers = cluster.worker("p0"), cluster.worker("d0")
        await until(lambda: all(worker.aborts for worker in workers))
    assert_conserved(service)


@pytest.mark.parametrize("by", ["grpc deadline", "timeout_s"])
async def test_the_earlier_deadline_ends_the_work(stub, cluster, service, by):
    """P-28: gRPC's own deadline and the field count alike; the work ends with them."""
    timeout_s = 0.1 if by == "timeout_s" else 50
    call = stub.Generate(
        pb.GenerateRequest(prompt="hi", timeout_s=timeout_s),
        timeout=0.1 if by == "grpc deadline" else 50,
    )
    error = await failure_of(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    workers = await cluster.started("p0", "d0")
    await until(lambda: all(worker.aborts for worker in workers))
    # Whichever of the two ends of the deadline is first: the work is over.
    causes = {cause for worker in workers for _, cause in worker.aborts}
    assert causes <= {AbortCause.DEADLINE, AbortCause.CANCELLED}
    await until(lambda: metric(service, "pdserve_requests_in_flight") == 0)
    assert_conserved(service)


async def test_cancel_by_id(stub, cluster, service):
    call = stub.Generate(pb.GenerateRequest(prompt="hi"))
    request_id = dict(await call.initial_metadata())["x-request-id"]
    answer = await stub.Cancel(pb.CancelRequest(request_id=request_id))
    assert answer.was_running
    assert (await failure_of(call)).code() is grpc.StatusCode.CANCELLED
    answer = await stub.Cancel(pb.CancelRequest(request_id=request_id))
    assert not answer.was_running
    for bad in ("", "x" * 500):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Cancel(pb.CancelRequest(request_id=bad))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_above_the_cap_is_refused(stub):
    """P-28: the documented limit, with a clear status."""
    error = await failure_of(stub.Generate(pb.GenerateRequest(prompt="x" * 100_000)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_health_and_reflection_tell_what_is_served(channel):
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "pdserve.v1.Inference"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert "pdserve.v1.Inference" in names
    call.cancel()


async def test_replicas_share_a_port_and_a_taken_one_is_named(service):
    first = GrpcDoor(service, host="127.0.0.1", port=0)
    port = await first.start()
    second = GrpcDoor(service, host="127.0.0.1", port=port)
    assert await second.start() == port
    await asyncio.gather(first.stop(), second.stop())

    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    with pytest.raises(errors.StartupError, match=str(port)):
        await GrpcDoor(service, host="127.0.0.1", port=port).start()
    taken.close()
