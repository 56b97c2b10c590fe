"""Legs on the wire: conversion, the rules, the book, and both ends of an Attach stream."""

import asyncio
import dataclasses

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.errors import BY_CODE, DeadlineExceeded, InvalidRequest, PdserveError, WorkerLost
from cluster.handoff import AbortCause
from cluster.kv.layout import KVLayout
from cluster.lifetime import LegTimes
from cluster.request import (
    FinishReason,
    Leg,
    LegEnd,
    LegKey,
    LegKind,
    Peer,
    SamplingParams,
    Token,
)
from cluster.rpc import client as client_module
from cluster.rpc import convert, server
from cluster.rpc.client import WorkerClient
from cluster.rpc.leg_rules import LegRules
from cluster.rpc.legs import LegBook
from cluster.rpc.options import INCARNATION_METADATA
from cluster.rpc.server import WorkerServer
from cluster.wire import worker_pb2 as wire
from cluster.wire import worker_pb2_grpc as wire_grpc

KEY = LegKey("req-1", 2, 3)
LAYOUT = KVLayout(
    num_layers=1, num_kv_heads=1, head_dim=1, block_size=4, dtype="fp32", model_fingerprint="f"
)


def make_leg(**fields) -> Leg:
    params = {"max_tokens": 8, **fields.pop("params", {})}
    defaults = {
        "key": KEY,
        "kind": LegKind.PREFILL,
        "prompt_ids": (1, 2, 3),
        "params": SamplingParams(**params),
        "remaining_s": 5.0,
        "grant_id": "grant",
        "handoff_id": "handoff",
        "peer": Peer(worker_id="d", incarnation="d1", address="127.0.0.1:2"),
    }
    return Leg(**{**defaults, **fields})


# ---- conversion


@pytest.mark.parametrize(
    "leg",
    [
        make_leg(),
        make_leg(kind=LegKind.DECODE, peer=None, output_ids=(4, 5)),
        make_leg(
            kind=LegKind.LOCAL,
            params={
                "temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 2**64 - 1,
                "stop_token_ids": (1,), "ignore_eos": True,
            },
        ),
    ],
)  # fmt: skip
def test_a_leg_survives_the_wire(leg):
    data = convert.leg_to_wire(leg).SerializeToString()
    assert convert.leg_from_wire(wire.Leg.FromString(data)) == leg


def test_stop_strings_stay_in_the_router():
    leg = make_leg(params={"stop": ("secret",)})
    assert b"secret" not in convert.leg_to_wire(leg).SerializeToString()


def test_tokens_and_ends_survive_the_wire():
    token = Token(KEY, 4, 99)
    assert convert.token_from_wire(convert.token_to_wire(token)) == token
    times = LegTimes(**{f.name: 1 for f in dataclasses.fields(LegTimes)})
    for reason in (None, *FinishReason):
        end = LegEnd(key=KEY, finish_reason=reason, times=times)
        assert convert.end_from_wire(convert.end_to_wire(end)) == end


@pytest.mark.parametrize("kind", BY_CODE.values())
def test_errors_survive_the_wire(kind):
    error = kind("what", stage="prefill", worker_id="p", field="seed")
    back = convert.error_from_wire(convert.error_to_wire(error))
    assert type(back) is kind
    assert (back.message, back.stage, back.worker_id, back.field) == (
        "what",
        "prefill",
        "p",
        "seed",
    )


def test_unknown_codes_and_causes_are_errors_all_the_same():
    assert type(convert.error_from_wire(wire.Error(code="new", message="m"))) is PdserveError
    assert convert.cause_from_wire(77) is AbortCause.FAULT
    for cause in AbortCause:
        assert convert.cause_from_wire(convert.cause_to_wire(cause)) is cause


def test_a_leg_without_a_kind_or_with_half_a_peer_is_refused():
    message = convert.leg_to_wire(make_leg())
    message.kind = wire.LEG_KIND_UNSPECIFIED
    with pytest.raises(InvalidRequest) as caught:
        convert.leg_from_wire(message)
    assert caught.value.field == "kind"
    message = convert.leg_to_wire(make_leg())
    message.peer.address = ""
    with pytest.raises(InvalidRequest) as caught:
        convert.leg_from_wire(message)
    assert caught.value.field == "peer"


# ---- rules

RULES = LegRules(layout=LAYOUT, num_blocks=8, max_model_len=64, vocab_size=100, worker_id="p")
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("leg", "field"),
    [
        (make_leg(key=LegKey("", 0, 0)), "request_id"),
        (make_leg(key=LegKey("x" * 129, 0, 0)), "request_id"),
        (make_leg(handoff_id="x" * 129), "handoff_id"),
        (make_leg(prompt_ids=()), "prompt_ids"),
        (make_leg(prompt_ids=(1, 100)), "prompt_ids"),
        (make_leg(output_ids=(100,)), "output_ids"),
        (make_leg(prompt_ids=(1,) * 57), "max_tokens"),
        (make_leg(kind=LegKind.DECODE, prompt_ids=(1,) * 26), "max_tokens"),
        (make_leg(prompt_ids=(1,) * 33), "max_tokens"),
        (make_leg(params={"max_tokens": 0}), "max_tokens"),
        (make_leg(output_ids=(1,) * 8), "max_tokens"),
        (make_leg(params={"temperature": -1.0}), "temperature"),
        (make_leg(params={"temperature": NAN}), "temperature"),
        (make_leg(params={"temperature": INF}), "temperature"),
        (make_leg(params={"top_p": 0.0}), "top_p"),
        (make_leg(params={"top_p": NAN}), "top_p"),
        (make_leg(params={"top_k": -1}), "top_k"),
        (make_leg(handoff_id=""), "handoff_id"),
        (make_leg(kind=LegKind.DECODE, handoff_id=""), "handoff_id"),
        (make_leg(peer=None), "peer"),
        (make_leg(peer=Peer(worker_id="p", incarnation="1", address="a")), "peer"),
    ],
)
def test_a_bad_leg_is_refused_by_the_name_of_its_field(leg, field):
    with pytest.raises(InvalidRequest) as caught:
        RULES.check(leg)
    assert caught.value.field == field


@pytest.mark.parametrize("remaining_s", [0.0, -1.0, NAN])
def test_a_leg_past_its_deadline_is_refused(remaining_s):
    with pytest.raises(DeadlineExceeded):
        RULES.check(make_leg(remaining_s=remaining_s))


@pytest.mark.parametrize(
    "leg",
    [
        make_leg(),
        make_leg(prompt_ids=(1,) * 32),
        make_leg(params={"max_tokens": 1}, handoff_id="", peer=None),
        make_leg(kind=LegKind.DECODE, peer=None, prompt_ids=(1,) * 25),
        make_leg(kind=LegKind.LOCAL, handoff_id="", peer=None),
    ],
)
def test_what_can_be_served_passes(leg):
    RULES.check(leg)


# ---- the book


class ListSink:
    def __init__(self) -> None:
        self.messages = []

    def emit(self, tokens, ends) -> None:
        self.messages.append((list(tokens), list(ends)))


def test_a_step_is_one_message_for_each_router():
    book, one, other = LegBook(), ListSink(), ListSink()
    legs = [book.open(make_leg(key=LegKey(f"r{i}", 0, 0)), one, 0.0) for i in range(2)]
    legs.append(book.open(make_leg(key=LegKey("r2", 0, 0)), other, 0.0))
    for opened in legs:
        book.token(opened, Token(opened.key, 0, 1))
    book.end(legs[0], finish_reason=FinishReason.STOP)
    book.flush()
    book.flush()
    assert [(len(t), len(e)) for t, e in one.messages] == [(2, 1)]
    assert [(len(t), len(e)) for t, e in other.messages] == [(1, 0)]
    assert legs[0].key not in book
    assert book.counts == {"received": 3, "stop": 1}


def test_the_book_tells_of_every_change():
    changes = []
    book = LegBook(lambda: changes.append(1))
    book.end(book.open(make_leg(), ListSink(), 0.0))
    assert len(changes) == 2


# ---- server and client


class Handler:
    """A worker that keeps what it is told, and answers when the test says so."""

    def __init__(self) -> None:
        self.legs: asyncio.Queue = asyncio.Queue()
        self.aborts: asyncio.Queue = asyncio.Queue()
        self.lost: asyncio.Queue = asyncio.Queue()

    def start_leg(self, leg, sink) -> None:
        self.legs.put_nowait((leg, sink))

    def abort_leg(self, key, cause) -> None:
        self.aborts.put_nowait((key, cause))

    def router_lost(self, sink) -> None:
        self.lost.put_nowait(sink)


class Events:
    def __init__(self) -> None:
        self.batches: asyncio.Queue = asyncio.Queue()
        self.lost: asyncio.Queue = asyncio.Queue()

    def on_tokens(self, tokens, ends) -> None:
        self.batches.put_nowait((list(tokens), list(ends)))

    def on_worker_lost(self, peer, reason) -> None:
        self.lost.put_nowait((peer, reason))


class Attached:
    def __init__(self, worker_server, address, handler) -> None:
        self.server = worker_server
        self.address = address
        self.handler = handler
        self.clients = []

    def client(self, incarnation="w1"):
        events = Events()
        peer = Peer(worker_id="w", incarnation=incarnation, address=self.address)
        client = WorkerClient(peer, router_id="router", incarnation="r1", events=events)
        self.clients.append(client)
        return client, events


@pytest.fixture
async def attached():
    handler = Handler()
    worker_server = WorkerServer(handler, None, incarnation="w1", host="127.0.0.1")
    address = await worker_server.start()
    world = Attached(worker_server, address, handler)
    yield world
    for client in world.clients:
        await client.close()
    await worker_server.stop(0.5)


async def soon(queue):
    return await asyncio.wait_for(queue.get(), 5)


async def test_legs_aborts_tokens_and_ends_go_both_ways(attached):
    client, events = attached.client()
    await client.start_leg(make_leg())
    leg, sink = await soon(attached.handler.legs)
    assert leg == make_leg()
    await client.abort_leg(KEY, AbortCause.STOPPED)
    assert await soon(attached.handler.aborts) == (KEY, AbortCause.STOPPED)
    sink.emit([Token(KEY, 0, 5)], [])
    sink.emit([Token(KEY, 1, 6)], [LegEnd(key=KEY, finish_reason=FinishReason.LENGTH)])
    tokens, ends = await soon(events.batches)
    assert tokens == [Token(KEY, 0, 5), Token(KEY, 1, 6)]
    assert ends == [LegEnd(key=KEY, finish_reason=FinishReason.LENGTH)]


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
    monkeypatch.setattr(server, "MAX_QUEUED_ITEMS", 100)
    async with grpc.aio.insecure_channel(attached.address) as channel:
        call = wire_grpc.WorkerStub(channel).Attach(metadata=((INCARNATION_METADATA, "w1"),))
        await call.write(wire.RouterMessage(hello=wire.RouterHello(router_id="r")))
        await call.write(wire.RouterMessage(start=convert.leg_to_wire(make_leg())))
        _, sink = await soon(attached.handler.legs)
        for i in range(101):
            sink.emit([Token(KEY, i, 1)], [])
        assert await soon(attached.handler.lost) is sink
        assert await asyncio.wait_for(call.code(), 5) is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("how", ["overrun", "timeout"])
async def test_a_router_that_takes_no_bytes_is_cut_off_in_mid_write(attached, monkeypatch, how):
    """CASES P-28: its legs are given up though a write to it never returns."""
    monkeypatch.setattr(server, "WRITE_TIMEOUT_S", 0.5 if how == "timeout" else 60.0)
    async with grpc.aio.insecure_channel(attached.address) as channel:
        call = wire_grpc.WorkerStub(channel).Attach(metadata=((INCARNATION_METADATA, "w1"),))
        await call.write(wire.RouterMessage(hello=wire.RouterHello(router_id="r")))
        await call.write(wire.RouterMessage(start=convert.leg_to_wire(make_leg())))
        _, sink = await soon(attached.handler.legs)
        writing = None
        async with asyncio.timeout(10):
            while writing is None or sink._patience is not writing:  # until one write stays
                writing = sink._patience
                if writing is None:
                    sink.emit([Token(LegKey("x" * 120, 0, 0), 0, 1) for _ in range(8000)], [])
                await asyncio.sleep(0.1)
        if how == "overrun":
            assert attached.handler.lost.empty()
            sink.emit([Token(KEY, 0, 1) for _ in range(server.MAX_QUEUED_ITEMS + 1)], [])
        assert await soon(attached.handler.lost) is sink
        sink.emit([Token(KEY, 0, 1)], [])
        assert sink._tokens == []


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

    def fail(tokens, ends) -> None:
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
    monkeypatch.setattr(server, "MAX_ITEMS_PER_MESSAGE", 10)
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
