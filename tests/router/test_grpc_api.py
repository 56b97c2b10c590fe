"""The gRPC door: streams, statuses, deadlines, cancels, health and reflection."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster import errors
from cluster.config import Role
from cluster.handoff import AbortCause
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from router.grpc_api import GrpcCaps, GrpcDoor
from tests.router.fakes import (
    EOS_ID,
    FakeCluster,
    assert_conserved,
    make_router,
    make_view,
    make_worker,
    metric,
    speaks,
    until,
)

A, B, C = b"abc"
REPO = Path(__file__).resolve().parents[2]


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
    cluster.route.error = error_type(
        "p0 at ipv4:127.0.0.1:5 is gone", worker_id="p0", retry_after_s=2.5
    )
    error = await failure_of(stub.Generate(pb.GenerateRequest(prompt="hi")))
    assert error.code() is grpc.StatusCode[error_type.grpc_code]
    is_mistake = error_type.http_status in (400, 401, 404, 413)
    assert (error.details() == "p0 at ipv4:127.0.0.1:5 is gone") is is_mistake
    assert is_mistake or "p0" not in error.details()
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


@contextlib.asynccontextmanager
async def served(service, **caps):
    """Yield a door's port, with caps of the test's own."""
    door = GrpcDoor(service, host="127.0.0.1", port=0, caps=GrpcCaps(**caps))
    port = await door.start()
    try:
        yield port
    finally:
        await door.stop()
        await service.stop()


async def test_health_follows_readiness(cluster, service):
    """P-26: as /health/ready, and back again; each role is a service of its own."""
    status = health_pb2.HealthCheckResponse
    lone = make_view(make_worker("p0", Role.PREFILL))
    cluster.route.view = None
    async with (
        served(service, health_beat_s=0.01) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="pdserve.v1.Inference"))
        assert (await watch.read()).status == status.NOT_SERVING
        for view, expected in (
            (make_view(), status.SERVING),
            (lone, status.NOT_SERVING),
            (make_view(), status.SERVING),
        ):
            cluster.route.view = view
            assert (await watch.read()).status == expected
            for service_name in ("", "decode"):
                asked = health_pb2.HealthCheckRequest(service=service_name)
                assert (await stub.Check(asked)).status == expected
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="prefill"))
            assert answer.status == status.SERVING
        watch.cancel()


async def test_a_bug_is_a_fault_of_ours_and_names_nothing(stub, service, monkeypatch, caplog):
    def explode(self, *args, **kwargs):
        raise RuntimeError("inside")

    monkeypatch.setattr("router.text.TextCodec.encode", explode)
    error = await failure_of(stub.Generate(pb.GenerateRequest(prompt="hi")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == "an internal error (stage: edge)"
    monkeypatch.setattr("router.service.Service.cancel", explode)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Cancel(pb.CancelRequest(request_id="r"))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "RuntimeError" not in caught.value.details()
    assert "inside" in caplog.text
    assert metric(service, 'pdserve_requests_failed_total{code="engine_fault"}') == 1
    assert_conserved(service)


async def test_a_full_edge_refuses(stub, service):
    service.max_open_calls = 0
    error = await failure_of(stub.Generate(pb.GenerateRequest(prompt="hi")))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(error.trailing_metadata())["retry-after"]
    assert_conserved(service)


async def test_a_client_may_ping_each_second(service, cluster):
    """P-28: no GOAWAY at the documented rate, beside a silent stream."""
    options = (
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    async with (
        served(service) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel,
    ):
        call = pb_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(prompt="hi", timeout_s=4.5)
        )
        # Three strikes would be enough to be sent away: the deadline comes first.
        error = await failure_of(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert_conserved(service)


STOPPED_CLIENT = """
import os, signal, sys
import grpc
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
channel = grpc.insecure_channel(sys.argv[1])
call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(prompt="hi"))
call.initial_metadata()
os.kill(os.getpid(), signal.SIGSTOP)
"""


async def test_a_client_that_is_stopped_is_found(service, cluster):
    """P-28: its connection stays open and says nothing; pings find that out."""
    async with served(service, keepalive_s=1.0, ping_timeout_s=0.5) as port:
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STOPPED_CLIENT, f"127.0.0.1:{port}", cwd=REPO
        )
        try:
            await cluster.started("p0", "d0")
            async with asyncio.timeout(20):
                await until(lambda: metric(service, "pdserve_requests_in_flight") == 0)
        finally:
            client.kill()
            await client.wait()
    assert metric(service, "pdserve_requests_aborted_total") == 1
    assert_conserved(service)


def num_connections(port):
    """Connections that the server's end of this port holds."""
    connections = psutil.Process().net_connections("tcp")
    return sum(c.laddr.port == port and c.status == "ESTABLISHED" for c in connections)


async def test_a_client_that_does_not_read_is_let_go(service, cluster, monkeypatch, caplog):
    """P-28, S-14: its handler ends after its deadline, its connection when that is too old."""
    monkeypatch.setattr(
        "router.grpc_api.inference.Replies.message",
        lambda replies, event: pb.GenerateResponse(text="x" * 1_000_000),
    )
    cluster.script = lambda worker, leg: (
        worker.say(*range(40)) if leg.kind.value == "decode" else None
    )
    service.limits = dataclasses.replace(service.limits, max_deadline_s=0.5)
    options = (("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.http2.bdp_probe", 0))
    async with served(service, write_grace_s=0.1, connection_age_s=1.0) as port:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
        call = pb_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(prompt="hi", timeout_s=0.3)
        )
        await until(lambda: "reads too slowly" in caplog.text)
        await until(lambda: metric(service, "pdserve_requests_in_flight") == 0)
        # The stream itself can't be reset; it goes with its connection.
        assert num_connections(port) > 0
        async with asyncio.timeout(10):
            await until(lambda: num_connections(port) == 0)
        call.cancel()
        await channel.close()
    assert_conserved(service)


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
