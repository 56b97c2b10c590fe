"""An Attach whose connection is cut: gone on with within a second, or given up by both sides."""

import asyncio

import grpc
import pytest

from cluster.errors import WorkerLost
from cluster.handoff import AbortCause
from cluster.request import Beat, FinishReason, LegEnd, LegKey, Token
from cluster.rpc import attach, convert, session
from cluster.rpc.options import INCARNATION_METADATA
from cluster.wire import worker_pb2 as wire
from cluster.wire import worker_pb2_grpc as wire_grpc
from tests.factories_attach import KEY, Handler, make_leg, soon


async def tokens_of(events, count):
    """Hear ``count`` tokens, and the ends beside them."""
    tokens, ends = [], []
    while len(tokens) < count:
        more, over = await soon(events.batches)
        tokens += more
        ends += over
    return tokens, ends


def numbered(start, stop):
    return [Token(KEY, index, index) for index in range(start, stop)]


async def test_legs_go_on_over_a_new_stream_and_no_token_is_lost_or_repeated(attached):
    cable = await attached.wire()
    client, events = attached.client(wire=cable)
    await client.start_leg(make_leg())
    _, sink = await soon(attached.handler.legs)
    for index in range(50):
        sink.emit(numbered(index, index + 1), [])
    heard, _ = await tokens_of(events, 50)

    # STEP 1: tokens that are on their way when the wire breaks never arrive by it.
    cable.is_deaf = True
    for index in range(50, 60):
        sink.emit(numbered(index, index + 1), [])
        await asyncio.sleep(0)
    cable.cut()
    cable.is_deaf = False

    # STEP 2: what is emitted meanwhile waits with them.
    sink.emit(numbered(60, 70), [LegEnd(key=KEY, finish_reason=FinishReason.LENGTH)])
    more, ends = await tokens_of(events, 20)
    assert heard + more == numbered(0, 70)
    assert ends == [LegEnd(key=KEY, finish_reason=FinishReason.LENGTH)]
    assert cable.num_connections == 2
    assert events.lost.empty()
    assert attached.handler.lost.empty()


async def test_it_may_be_cut_again_and_again(attached):
    cable = await attached.wire()
    client, events = attached.client(wire=cable)
    await client.start_leg(make_leg())
    _, sink = await soon(attached.handler.legs)
    heard = []
    for number in range(4):
        sink.emit(numbered(3 * number, 3 * number + 3), [])
        tokens, _ = await tokens_of(events, 3)
        heard += tokens
        cable.cut()
    sink.emit(numbered(12, 13), [])
    tokens, _ = await tokens_of(events, 1)
    assert heard + tokens == numbered(0, 13)
    assert cable.num_connections == 5


async def test_legs_and_aborts_that_were_lost_on_the_way_are_sent_again_once(attached):
    cable = await attached.wire()
    client, events = attached.client(wire=cable)
    await client.start_leg(make_leg())
    await soon(attached.handler.legs)
    await soon(events.beats)
    cable.cut()
    others = [LegKey(f"req-{number}", 0, 0) for number in range(20)]
    for key in others:
        await client.start_leg(make_leg(key=key))
        await client.abort_leg(key, AbortCause.STOPPED)
    started = [(await soon(attached.handler.legs))[0].key for _ in others]
    aborted = [(await soon(attached.handler.aborts))[0] for _ in others]
    assert started == aborted == others
    await soon(events.beats)
    assert attached.handler.legs.empty()
    assert attached.handler.aborts.empty()


class Call:
    """A stream without gRPC: what came of the router, and what was written to it."""

    def __init__(self, *messages):
        self.messages: asyncio.Queue = asyncio.Queue()
        self.written: asyncio.Queue = asyncio.Queue()
        self.say(*messages)

    def say(self, *messages):
        for message in messages:
            self.messages.put_nowait(message)

    def __aiter__(self):
        return self

    async def __anext__(self):
        return await self.messages.get()

    async def write(self, batch):
        self.written.put_nowait(batch)


def hello_from(next_batch):
    router = wire.RouterHello(router_id="r", incarnation="i", next_batch=next_batch)
    return wire.RouterMessage(hello=router)


def stop_of(name):
    cause = convert.cause_to_wire(AbortCause.STOPPED)
    order = wire.AbortLeg(key=convert.key_to_wire(LegKey(name, 0, 0)), cause=cause)
    return wire.RouterMessage(abort=order)


async def test_what_still_comes_by_the_old_stream_is_not_counted_twice():
    """The new stream has told what was taken before it: all that follows comes again by it."""
    handler = Handler()
    attachments = attach.Attachments(handler)
    old, new = Call(hello_from(0), stop_of("one")), Call()
    serving = [asyncio.ensure_future(attachments.serve(call, call)) for call in (old, new)]
    assert await soon(handler.aborts)
    new.say(hello_from(1))
    old.say(stop_of("two"))
    assert (await soon(new.written)).num_taken == 1
    new.say(stop_of("two"))
    assert (await soon(handler.aborts))[0] == LegKey("two", 0, 0)
    assert (await soon(new.written)).num_taken == 2
    assert handler.aborts.empty()
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)


@pytest.mark.parametrize("num_steps", range(4))
async def test_a_stream_that_ends_as_news_come_has_ended(num_steps):
    """P-11: its cancel is not lost in the wait for news, which stay for the next stream."""
    a_session = session.Session("r", Beat)
    seat = a_session.sit(0)
    await a_session.next_batch(seat)
    waiting = asyncio.ensure_future(a_session.next_batch(seat))
    await asyncio.sleep(0)
    a_session.emit(numbered(0, 1), [])
    for _ in range(num_steps):
        await asyncio.sleep(0)
    was_over = waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled() != was_over
    batch = await a_session.next_batch(a_session.sit(1))
    assert [convert.token_from_wire(token) for token in batch.tokens] == numbered(0, 1)


async def test_a_router_that_does_not_come_back_is_given_up_after_the_tail_was_kept(
    attached, monkeypatch
):
    """P-11, P-12: legs of a dead router hold blocks no longer than that."""
    monkeypatch.setattr(attach, "KEEP_S", 0.3)
    cable = await attached.wire()
    client, events = attached.client(wire=cable)
    await client.start_leg(make_leg())
    _, sink = await soon(attached.handler.legs)
    await soon(events.beats)
    loop = asyncio.get_running_loop()
    cut_at = loop.time()
    cable.is_refusing = True
    cable.cut()
    assert await soon(attached.handler.lost) is sink
    assert loop.time() - cut_at >= 0.25
    peer, _ = await soon(events.lost)
    assert peer == client.peer
    with pytest.raises(WorkerLost):
        await client.start_leg(make_leg())
    sink.emit(numbered(0, 1), [])  # nobody is there any more
    assert attached.handler.lost.empty()


async def test_a_router_that_comes_back_too_late_has_lost_the_worker(attached, monkeypatch):
    monkeypatch.setattr(attach, "KEEP_S", 0.0)
    cable = await attached.wire()
    client, events = attached.client(wire=cable)
    await client.start_leg(make_leg())
    await soon(attached.handler.legs)
    await soon(events.beats)
    await attached_is_lost(attached, cable)
    _, reason = await soon(events.lost)
    assert reason
    assert events.is_alive, "it said that it has nothing of this router"
    # The same router may attach anew.
    client, events = attached.client(wire=cable)
    await client.start_leg(make_leg())
    _, sink = await soon(attached.handler.legs)
    sink.emit(numbered(0, 1), [])
    assert await tokens_of(events, 1) == (numbered(0, 1), [])


async def attached_is_lost(attached, cable):
    cable.cut()
    await soon(attached.handler.lost)


async def test_a_worker_that_is_gone_is_lost_at_once(attached):
    """P-20: a refused connection is an answer; nobody waits for the second to pass."""
    client, events = attached.client()
    await client.start_leg(make_leg())
    await soon(attached.handler.legs)
    await soon(events.beats)
    loop = asyncio.get_running_loop()
    stopped_at = loop.time()
    await attached.server.stop(0)
    await soon(events.lost)
    assert not events.is_alive
    assert loop.time() - stopped_at < 0.9


async def test_a_goodbye_is_heard_at_once(attached, monkeypatch):
    monkeypatch.setattr(attach, "KEEP_S", 60.0)
    client, events = attached.client()
    await client.start_leg(make_leg())
    _, sink = await soon(attached.handler.legs)
    await soon(events.beats)
    await client.close()
    assert await soon(attached.handler.lost) is sink
    assert events.lost.empty()


async def test_routers_never_get_one_anothers_tails(attached):
    """S-13: the incarnation names the session, and only its router knows it."""
    cable = await attached.wire()
    client, events = attached.client(wire=cable)
    other, other_events = attached.client(router="r2", wire=cable)
    other_key = LegKey("other", 0, 0)
    await client.start_leg(make_leg())
    _, sink = await soon(attached.handler.legs)
    await other.start_leg(make_leg(key=other_key))
    _, other_sink = await soon(attached.handler.legs)
    await soon(events.beats)
    await soon(other_events.beats)
    cable.is_deaf = True
    sink.emit(numbered(0, 3), [])
    other_sink.emit([Token(other_key, 0, 7)], [])
    await asyncio.sleep(0)
    cable.cut()
    cable.is_deaf = False
    assert await tokens_of(events, 3) == (numbered(0, 3), [])
    assert await tokens_of(other_events, 1) == ([Token(other_key, 0, 7)], [])
    assert events.batches.empty()
    assert other_events.batches.empty()


def hello(incarnation, next_batch):
    router = wire.RouterHello(router_id="router", incarnation=incarnation, next_batch=next_batch)
    return wire.RouterMessage(hello=router)


@pytest.mark.parametrize(("incarnation", "next_batch"), [("stranger", 1), ("r1", 99)])
async def test_what_is_not_here_is_not_gone_on_with(attached, incarnation, next_batch):
    client, events = attached.client()
    await client.start_leg(make_leg())
    await soon(attached.handler.legs)
    async with grpc.aio.insecure_channel(attached.address) as channel:
        call = wire_grpc.WorkerStub(channel).Attach(metadata=((INCARNATION_METADATA, "w1"),))
        await call.write(hello(incarnation, next_batch))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 5)
    assert caught.value.code() in (
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    assert attached.handler.lost.empty()
    assert events.lost.empty()


async def test_a_router_that_attaches_anew_gives_its_old_legs_up(attached):
    client, _ = attached.client()
    await client.start_leg(make_leg())
    _, sink = await soon(attached.handler.legs)
    again, events = attached.client()
    await again.start_leg(make_leg())
    assert await soon(attached.handler.lost) is sink
    _, new_sink = await soon(attached.handler.legs)
    new_sink.emit(numbered(0, 1), [])
    assert await tokens_of(events, 1) == (numbered(0, 1), [])


async def test_what_the_router_has_is_not_kept(attached, monkeypatch):
    """P-28: the tail is bounded by what is under way, not by the length of the stream."""
    monkeypatch.setattr(session, "MAX_QUEUED_ITEMS", 64)
    client, events = attached.client()
    await client.start_leg(make_leg())
    _, sink = await soon(attached.handler.legs)
    for index in range(500):
        sink.emit(numbered(index, index + 1), [])
        await tokens_of(events, 1)
    assert not sink.is_overrun


async def test_a_worker_that_stops_while_a_router_is_away_ends_its_legs(attached):
    cable = await attached.wire()
    client, events = attached.client(wire=cable)
    await client.start_leg(make_leg())
    _, sink = await soon(attached.handler.legs)
    await soon(events.beats)
    cable.is_refusing = True
    cable.cut()
    await soon(events.lost)
    await attached.server.stop(0)
    assert await soon(attached.handler.lost) is sink


async def test_a_new_stream_takes_over_from_one_that_is_half_open(attached):
    """The router noticed that its stream broke, and the worker did not yet."""
    async with grpc.aio.insecure_channel(attached.address) as channel:
        stub = wire_grpc.WorkerStub(channel)
        old = stub.Attach(metadata=((INCARNATION_METADATA, "w1"),))
        await old.write(hello("r1", 0))
        await old.write(wire.RouterMessage(start=convert.leg_to_wire(make_leg())))
        _, sink = await soon(attached.handler.legs)
        sink.emit(numbered(0, 2), [])
        new = stub.Attach(metadata=((INCARNATION_METADATA, "w1"),))
        await new.write(hello("r1", 1))
        sink.emit(numbered(2, 3), [])
        heard = []
        while len(heard) < 3:
            batch = await asyncio.wait_for(new.read(), 5)
            assert batch.num_taken == 1
            heard += [token.output_index for token in batch.tokens]
        assert heard == [0, 1, 2]
        while await asyncio.wait_for(old.read(), 5) is not grpc.aio.EOF:
            pass
        assert await old.code() is grpc.StatusCode.OK
        assert attached.handler.lost.empty()
        await new.write(wire.RouterMessage(goodbye=wire.Goodbye()))
        assert await soon(attached.handler.lost) is sink
