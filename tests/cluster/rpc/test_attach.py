"""Both ends of an Attach stream: what goes over it, and how either side gives the other up."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.errors import Cancelled, HandoffFailed, InvalidRequest, WorkerLost
from cluster.handoff import AbortCause
from cluster.request import (
    Beat,
    ExportWaiting,
    FinishReason,
    LegEnd,
    LegKey,
    Peer,
    Preempted,
    Redirect,
    Token,
)
from cluster.rpc import client as client_module
from cluster.rpc import convert, session
from cluster.rpc.options import INCARNATION_METADATA
from cluster.wire import worker_pb2 as wire
from cluster.wire import worker_pb2_grpc as wire_grpc
from tests.factories_attach import KEY, make_leg, soon


async def test_legs_aborts_tokens_and_ends_go_both_ways(attached):
    client, events = attached.client()
    await client.start_leg(make_leg())
    leg, sink = await soon(attached.handler.legs)
    assert leg == make_leg()
    await client.abort_leg(KEY, AbortCause.STOPPED, "grant")
    assert await soon(attached.handler.aborts) == (KEY, AbortCause.STOPPED)
    assert attached.handler.aborted == [("grant", sink)]
    sink.emit([Token(KEY, 0, 5)], [])
    sink.emit([Token(KEY, 1, 6)], [LegEnd(key=KEY, finish_reason=FinishReason.LENGTH)])
    tokens, ends = await soon(events.batches)
    assert tokens == [Token(KEY, 0, 5), Token(KEY, 1, 6)]
    assert ends == [LegEnd(key=KEY, finish_reason=FinishReason.LENGTH)]
    sink.emit([], [LegEnd(key=KEY, error=Cancelled("not here"), grant_id="grant")])
    _, (answer,) = await soon(events.batches)
    assert (answer.key, answer.grant_id, type(answer.error)) == (KEY, "grant", Cancelled)


async def test_a_router_that_goes_away_takes_its_legs_along(attached):
    """CASES P-11: the worker hears of it at once, by the stream."""
    client, events = attached.client()
    await client.start_leg(make_leg())
    _, sink = await soon(attached.handler.legs)
    await client.close()
    assert await soon(attached.handler.lost) is sink
    sink.emit([Token(KEY, 0, 1)], [])
    assert events.lost.empty()
    with pytest.raises(WorkerLost):
        await client.start_leg(make_leg())


async def test_a_worker_that_stops_says_its_last_words_and_is_lost_once(attached):
    """CASES P-20."""
    client, events = attached.client()
    await client.start_leg(make_leg())
    _, sink = await soon(attached.handler.legs)
    sink.emit([], [LegEnd(key=KEY, error=WorkerLost("stopping"))])
    await attached.server.stop(1.0)
    _, (end,) = await soon(events.batches)
    assert isinstance(end.error, WorkerLost)
    peer, _ = await soon(events.lost)
    assert peer == client.peer
    assert client.is_lost
    with pytest.raises(WorkerLost):
        await client.start_leg(make_leg())
    await client.abort_leg(KEY, AbortCause.CANCELLED)
    assert events.lost.empty()


async def test_another_incarnation_at_the_address_is_a_lost_worker(attached):
    """CASES P-23: nothing is sent to a successor by mistake."""
    client, events = attached.client(incarnation="w0")
    await client.start_leg(make_leg())
    _, reason = await soon(events.lost)
    assert "w1" in reason or "w0" in reason
    assert attached.handler.legs.empty()


async def test_nobody_at_the_address_is_a_lost_worker(attached):
    await attached.server.stop(0)
    client, events = attached.client()
    await client.start_leg(make_leg())
    await soon(events.lost)


async def test_a_leg_that_cannot_be_read_is_ended_and_the_stream_lives(attached):
    client, events = attached.client()
    await client.start_leg(make_leg(peer=Peer(worker_id="", incarnation="", address="")))
    _, (end,) = await soon(events.batches)
    assert (type(end.error), end.error.field, end.key) == (InvalidRequest, "peer", KEY)
    await client.start_leg(make_leg())
    await soon(attached.handler.legs)


async def test_an_attach_begins_with_its_one_hello(attached):
    async with grpc.aio.insecure_channel(attached.address) as channel:
        call = wire_grpc.WorkerStub(channel).Attach(metadata=((INCARNATION_METADATA, "w1"),))
        await call.write(wire.RouterMessage(start=convert.leg_to_wire(make_leg())))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert attached.handler.legs.empty()


async def test_a_router_that_does_not_read_is_cut_off(attached, monkeypatch):
    """CASES P-28: what waits for a slow reader is bounded."""
    monkeypatch.setattr(session, "MAX_QUEUED_ITEMS", 100)
    async with grpc.aio.insecure_channel(attached.address) as channel:
        call = wire_grpc.WorkerStub(channel).Attach(metadata=((INCARNATION_METADATA, "w1"),))
        await call.write(wire.RouterMessage(hello=wire.RouterHello(router_id="r")))
        await call.write(wire.RouterMessage(start=convert.leg_to_wire(make_leg())))
        _, sink = await soon(attached.handler.legs)
        await call.read()  # the sign of life that every stream begins with
        for i in range(101):
            sink.emit([Token(KEY, i, 1)], [])
        assert await soon(attached.handler.lost) is sink
        assert await asyncio.wait_for(call.code(), 5) is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("how", ["overrun", "timeout"])
async def test_a_router_that_takes_no_bytes_is_cut_off_in_mid_write(attached, monkeypatch, how):
    """CASES P-28: its legs are given up though a write to it never returns."""
    monkeypatch.setattr(session, "WRITE_TIMEOUT_S", 0.5 if how == "timeout" else 60.0)
    monkeypatch.setattr(session, "MAX_QUEUED_ITEMS", 10**6)
    async with grpc.aio.insecure_channel(attached.address) as channel:
        call = wire_grpc.WorkerStub(channel).Attach(metadata=((INCARNATION_METADATA, "w1"),))
        await call.write(wire.RouterMessage(hello=wire.RouterHello(router_id="r")))
        await call.write(wire.RouterMessage(start=convert.leg_to_wire(make_leg())))
        _, sink = await soon(attached.handler.legs)
        writing = None
        async with asyncio.timeout(10):
            while writing is None or sink.seat._patience is not writing:  # until one write stays
                writing = sink.seat._patience
                if writing is None:
                    sink.emit([Token(LegKey("x" * 120, 0, 0), 0, 1) for _ in range(8000)], [])
                await asyncio.sleep(0.1)
        if how == "overrun":
            assert attached.handler.lost.empty()
            monkeypatch.setattr(session, "MAX_QUEUED_ITEMS", 100)
            sink.emit([Token(KEY, 0, 1)], [])
        assert await soon(attached.handler.lost) is sink
        assert sink.is_closed


async def test_a_handler_that_fails_ends_the_attach_and_says_so(attached, caplog):
    def fail(leg, sink) -> None:
        raise ZeroDivisionError

    attached.handler.start_leg = fail
    client, events = attached.client()
    await client.start_leg(make_leg())
    _, reason = await soon(events.lost)
    assert reason.startswith("INTERNAL")
    assert "an attach failed" in caplog.text
    await soon(attached.handler.lost)


async def test_whatever_fails_in_the_client_loses_the_worker(attached, caplog):
    client, events = attached.client()
    await client.start_leg(make_leg())
    _, sink = await soon(attached.handler.legs)

    def fail(*news) -> None:
        raise KeyError("no such leg")

    events.on_tokens = fail
    sink.emit([Token(KEY, 0, 1)], [])
    _, reason = await soon(events.lost)
    assert "KeyError" in reason
    assert client.is_lost
    assert await soon(attached.handler.lost) is sink
    assert "failed here" in caplog.text


async def test_a_worker_that_does_not_read_is_lost_and_nobody_waits(attached, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_QUEUED_MESSAGES", 8)
    client, events = attached.client()
    for _ in range(8):
        await client.start_leg(make_leg())
    with pytest.raises(WorkerLost, match="reads nothing"):
        await asyncio.wait_for(client.start_leg(make_leg()), 5)
    _, reason = await soon(events.lost)
    assert "does not read" in reason
    assert client.is_lost
    await client.abort_leg(KEY, AbortCause.CANCELLED)
    assert events.lost.empty()


async def test_many_news_become_messages_under_the_size_cap(attached, monkeypatch):
    monkeypatch.setattr(session, "MAX_ITEMS_PER_MESSAGE", 10)
    client, events = attached.client()
    await client.start_leg(make_leg())
    _, sink = await soon(attached.handler.legs)
    sent = [Token(KEY, i, i) for i in range(25)]
    sink.emit(sent, [LegEnd(key=KEY)])
    received, ends = [], []
    while not ends:
        tokens, ends = await soon(events.batches)
        assert len(tokens) <= 10
        received += tokens
    assert received == sent


async def test_a_prefill_only_worker_refuses_links(attached):
    async with grpc.aio.insecure_channel(attached.address) as channel:
        call = wire_grpc.WorkerStub(channel).Link()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 5)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_health_is_told(attached):
    async with grpc.aio.insecure_channel(attached.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_exports_that_wait_go_down_and_redirects_up(attached):
    client, events = attached.client()
    await client.start_leg(make_leg())
    _, sink = await soon(attached.handler.legs)
    error = HandoffFailed("refused", stage="handoff")
    notice = ExportWaiting(key=KEY, handoff_id="handoff", error=error, lease_s=10.0)
    sink.emit((), (), (notice,))
    heard = await soon(events.waiting)
    assert (heard.key, heard.handoff_id, heard.lease_s) == (KEY, "handoff", 10.0)
    assert heard.error.message == "refused"
    peer = Peer(worker_id="e", incarnation="e1", address="127.0.0.1:3")
    redirect = Redirect(key=KEY, handoff_id="h2", peer=peer, num_preemptions=2)
    await client.redirect_leg(redirect)
    assert await soon(attached.handler.redirects) == redirect


async def test_preemptions_go_down_with_a_steps_tokens(attached):
    client, events = attached.client()
    await client.start_leg(make_leg())
    _, sink = await soon(attached.handler.legs)
    sink.emit([Token(KEY, 0, 5)], [], [Preempted(KEY, 3)])
    assert await soon(events.batches) == ([Token(KEY, 0, 5)], [])
    assert await soon(events.waiting) == Preempted(KEY, 3)


async def test_a_worker_says_that_it_lives_and_how_far_its_engine_is(attached, monkeypatch):
    """With news and without: a leg that waits for its KV has none."""
    monkeypatch.setattr(session, "BEAT_S", 0.01)
    client, events = attached.client()
    await client.start_leg(make_leg())
    assert await soon(events.beats) == Beat(3, 0.0)
    attached.handler.beat = Beat(4, 8.0)
    while await soon(events.beats) != Beat(4, 8.0):
        pass
    assert events.batches.empty()
