"""Faults on the signalling side: order, loss and repetition of what a half hears."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from cluster.handoff import AbortCause, AbortHandoff, Commit, Credit, Offer
from cluster.request import Peer, Redirect
from cluster.rpc.fault_seam import FaultService, FaultyTap
from cluster.rpc.faults import FaultyLegs, FaultyLinkEvents
from cluster.transport.faults import Fault, FaultSwitch, Point, Verb
from cluster.wire import faults_pb2 as wire
from cluster.wire import faults_pb2_grpc as wire_grpc
from tests.factories import make_key

OFFERS = [Offer(handoff_id=name, key=make_key(name), num_blocks=1, num_tokens=1) for name in "abc"]


class Half:
    def __init__(self) -> None:
        self.heard: list[object] = []
        self.lost: list[str] = []
        self.changed = asyncio.Event()

    def on_signal(self, link, message) -> None:
        self.heard.append(message)
        self.changed.set()

    def on_link_lost(self, link, reason: str) -> None:
        self.lost.append(reason)


class FakeLink:
    peer = Peer(worker_id="d-0", incarnation="1", address="")

    def __init__(self) -> None:
        self.closed: list[str] = []

    def close(self, reason: str) -> None:
        self.closed.append(reason)


class Lane:
    def __init__(self, *faults: Fault) -> None:
        self.switch = FaultSwitch()
        self.half = Half()
        self.link = FakeLink()
        self.events = FaultyLinkEvents(self.half, self.switch)
        self.switch.set(faults)

    def say(self, *messages: object) -> list[object]:
        for message in messages:
            self.events.on_signal(self.link, message)
        return self.half.heard


def offer_fault(verb: Verb, **options) -> Fault:
    return Fault(verb=verb, point=Point.OFFER, **options)


async def test_no_plan_no_difference():
    assert Lane().say(*OFFERS) == OFFERS


@pytest.mark.parametrize(
    ("verb", "expected"),
    [(Verb.DROP, "ac"), (Verb.DUPLICATE, "abbc"), (Verb.REORDER, "acb")],
)
async def test_the_second_is_lost_repeated_or_overtaken(verb, expected):
    lane = Lane(offer_fault(verb, nth=2))
    assert "".join(offer.handoff_id for offer in lane.say(*OFFERS)) == expected
    assert lane.switch.fired() == (1,)


async def test_what_nothing_comes_behind_is_late_and_was_not_overtaken(caplog):
    lane = Lane(offer_fault(Verb.REORDER))
    assert lane.say(OFFERS[0]) == []
    lane.switch.set([offer_fault(Verb.REORDER)])
    assert lane.half.heard == OFFERS[:1]
    assert "overtaken" not in caplog.text
    assert lane.say(*OFFERS[1:]) == [OFFERS[0], OFFERS[2], OFFERS[1]]
    assert "overtaken by=signal.offer" in caplog.text


async def test_what_is_held_keeps_its_order_and_all_behind_it():
    lane = Lane(offer_fault(Verb.HOLD, nth=2))
    late = AbortHandoff(handoff_id="b", cause=AbortCause.CANCELLED)
    assert lane.say(*OFFERS, late) == OFFERS[:1]
    lane.switch.set(())
    assert lane.half.heard == [*OFFERS, late]
    assert lane.say(OFFERS[0])[-1] == OFFERS[0]


async def test_what_is_late_comes_and_all_behind_it():
    lane = Lane(offer_fault(Verb.DELAY, seconds=0.01))
    assert lane.say(*OFFERS) == []
    async with asyncio.timeout(5):
        await lane.half.changed.wait()
    assert lane.half.heard == OFFERS


async def test_done_is_said_before_the_data():
    lane = Lane(Fault(verb=Verb.EARLY, point=Point.CREDIT))
    assert lane.say(Credit(handoff_id="a")) == [Commit(handoff_id="a"), Credit(handoff_id="a")]


async def test_a_broken_link_is_closed_and_forgets_what_was_held():
    lane = Lane(offer_fault(Verb.HOLD), offer_fault(Verb.FAIL, nth=2))
    assert lane.say(*OFFERS[:2]) == []
    assert lane.link.closed == ["broken on purpose"]
    lane.events.on_link_lost(lane.link, "gone")
    lane.switch.set(())
    assert (lane.half.heard, lane.half.lost) == ([], ["gone"])


async def test_a_link_breaks_when_the_plan_is_set_and_each_new_one_at_its_first_word():
    lane = Lane()
    lane.say(OFFERS[0])
    lane.switch.set([Fault(verb=Verb.FAIL, point=Point.LINK, times=0, peer="d-0")])
    assert lane.link.closed == ["broken on purpose"]
    lane.events.on_link_lost(lane.link, "gone")
    lane.link = FakeLink()
    assert lane.say(OFFERS[1]) == OFFERS[:1]
    assert lane.link.closed == ["broken on purpose"]
    assert lane.switch.fired() == (2,)
    lane.switch.set(())
    lane.link = FakeLink()
    assert lane.say(OFFERS[2]) == [OFFERS[0], OFFERS[2]]


async def test_only_the_links_to_its_peer_break():
    lane = Lane(Fault(verb=Verb.FAIL, point=Point.LINK, times=0, peer="d-1"))
    assert lane.say(*OFFERS) == OFFERS
    assert (lane.link.closed, lane.switch.fired()) == ([], (0,))


async def test_legs_and_redirects_pass_too():
    class Legs:
        heard: list[object] = []  # noqa: RUF012

        def redirect_leg(self, redirect) -> None:
            self.heard.append(redirect)

        def abort_leg(self, key, cause, grant_id, sink) -> None:
            self.heard.append(key)

    legs, switch = Legs(), FaultSwitch()
    faulty = FaultyLegs(legs, switch)
    switch.set([Fault(verb=Verb.HOLD, point=Point.REDIRECT)])
    redirect = Redirect(key=make_key("a"), handoff_id="h", peer=FakeLink.peer)
    faulty.redirect_leg(redirect)
    faulty.abort_leg(redirect.key, AbortCause.CANCELLED, "grant", None)
    assert legs.heard == []
    switch.set(())
    assert legs.heard == [redirect, redirect.key]


async def test_the_stream_to_the_control_plane_has_a_lane_each_way():
    switch, heard = FaultSwitch(), []
    tap = FaultyTap(switch)
    switch.set([Fault(verb=Verb.DROP, point=Point.CONTROL_IN, peer="grant")])
    tap.outgoing("want", lambda: heard.append("want"))
    for kind in ("view", "grant", "grant"):
        tap.incoming(kind, lambda kind=kind: heard.append(kind))
    assert (heard, switch.fired()) == (["want", "view", "grant"], (1,))


@pytest.fixture
async def served():
    switch = FaultSwitch()
    server = grpc.aio.server()
    FaultService(switch).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield switch, wire_grpc.FaultsStub(channel)
    await server.stop(0)


async def test_a_plan_is_set_asked_and_cleared_from_outside(served):
    switch, stub = served
    plan = wire.FaultPlan(
        faults=[wire.Fault(verb="drop", point="signal.commit", times=1, peer="d-0")]
    )
    assert (await stub.Set(plan)).fired == [0]
    assert switch.at(Point.COMMIT, "d-1") is None
    assert switch.at(Point.COMMIT, "d-0") is not None
    state = await stub.Fired(wire.GetFired())
    assert (list(state.fired), dict(state.passed)) == ([1], {"signal.commit": 2})
    assert (await stub.Clear(wire.ClearFaults())).fired == [1]
    assert switch.fired() == ()


@pytest.mark.parametrize("bad", [{"verb": "drop"}, {"verb": "early", "point": "signal.offer"}])
async def test_a_plan_that_makes_no_sense_is_refused(served, bad):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await served[1].Set(wire.FaultPlan(faults=[wire.Fault(**bad)]))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
