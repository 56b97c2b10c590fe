"""One stream that comes back: what it takes along, and what it survives."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from cluster.clock import SystemClock
from cluster.control.connection import Backoff, Connection
from cluster.control.route_client import RouteClient, RouteTiming
from cluster.wire import control_pb2 as pb
from cluster.wire import control_pb2_grpc as pb_grpc
from tests.cluster.control.conftest import BACKOFF, Router, until
from tests.cluster.control.factory import FakeClock, make_want


class Owner:
    """Counts what it is told, and fails where a test wants it to."""

    def __init__(self, *, failing=()):
        self.failing = set(failing)
        self.told = []

    def on_dialled(self, send):
        self._told("on_dialled")
        send(pb.RouterFact(hello=pb.RouterHello(router_id="a", incarnation="a-1")))

    def on_message(self, message):
        self._told("on_message")

    def on_lost(self, num_failures):
        self._told("on_lost")

    def _told(self, what):
        self.told.append(what)
        if what in self.failing and self.told.count(what) == 1:
            raise RuntimeError(f"{what} fails")


def connect(address, owner):
    return Connection(address, lambda stub: stub.Route, events=owner, name="t", backoff=BACKOFF)


class Silent(pb_grpc.ControlServicer):
    """Accepts streams and ends them without a word, until it is told to speak."""

    def __init__(self):
        self.is_speaking = False
        self.is_hanging_up = False
        """On whoever wants something."""
        self.num_dials = 0
        self.may_refuse = asyncio.Event()
        self.may_refuse.set()
        self.facts = []

    def wants(self):
        return [fact.want for fact in self.facts if fact.HasField("want")]

    async def Route(self, request_iterator, context):
        if not self.is_speaking:
            await anext(aiter(request_iterator))
            self.num_dials += 1
            await self.may_refuse.wait()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        await context.write(pb.RouteDecision(welcome=pb.RouterWelcome(term=1)))
        async for fact in request_iterator:
            self.facts.append(fact)
            if self.is_hanging_up and fact.HasField("want"):
                return


@pytest.fixture
async def silent():
    servicer = Silent()
    server = grpc.aio.server()
    pb_grpc.add_ControlServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(0)


@pytest.mark.parametrize("failing", ["on_dialled", "on_message", "on_lost"])
async def test_an_owner_that_fails_does_not_end_the_dialling(silent, failing, caplog):
    owner = Owner(failing=[failing])
    stream = connect(silent.address, owner)
    silent.is_speaking = failing == "on_message"
    stream.start()
    await until(lambda: failing in owner.told)
    silent.is_speaking = True
    await until(lambda: owner.told[-1] == "on_message" and owner.told.count("on_dialled") >= 2)
    assert "fails" in caplog.text
    await stream.stop()


async def test_nothing_is_taken_before_the_other_end_has_spoken(silent):
    owner = Owner()
    stream = connect(silent.address, owner)
    silent.may_refuse.clear()
    stream.start()
    await until(lambda: silent.num_dials == 1)
    assert stream.send(pb.RouterFact(done=pb.Done(grant_id="g"))) is False
    silent.is_speaking = True
    silent.may_refuse.set()
    await until(lambda: "on_message" in owner.told)
    assert stream.send(pb.RouterFact(done=pb.Done(grant_id="g"))) is True
    await stream.stop()
    assert stream.send(pb.RouterFact()) is False


def make_client(silent, clock=None) -> RouteClient:
    return RouteClient(
        silent.address,
        router_id="a",
        incarnation="a-1",
        clock=clock or SystemClock(),
        events=Router(silent.address, "unused"),
        timing=RouteTiming(backoff=Backoff(first_s=0.01, last_s=0.02)),
    )


async def test_a_done_during_a_failing_dial_is_sent_when_welcomed(silent):
    client = make_client(silent)
    client._held.add("g")
    silent.may_refuse.clear()
    await client.start()
    await until(lambda: silent.num_dials == 1)
    client.done("g", 3)
    want = asyncio.create_task(client.want(make_want("r")))
    await asyncio.sleep(0)
    silent.is_speaking = True
    silent.may_refuse.set()
    await until(lambda: len(silent.facts) >= 2)
    assert [fact.done.grant_id for fact in silent.facts if fact.HasField("done")] == ["g"]
    want.cancel()
    await client.stop()


async def test_only_what_a_stream_has_had_is_sent_again(silent):
    """What none has had may still be refused: it was not let into any queue."""
    client = make_client(silent)
    await client.start()
    want = asyncio.create_task(client.want(make_want("r")))
    await until(lambda: silent.num_dials > 0)
    silent.is_hanging_up = silent.is_speaking = True
    await until(lambda: len(silent.wants()) >= 3)
    assert [want.is_resent for want in silent.wants()[:3]] == [False, True, True]
    want.cancel()
    await client.stop()


async def test_a_router_that_was_stopped_finds_no_view_old_that_it_could_not_hear(
    silent, monkeypatch
):
    """CASES P-26: it does not say "not ready" when it wakes; of silence while it runs it does."""
    monkeypatch.setattr("cluster.control.route_client._LOOK_S", 0.0)
    clock = FakeClock()
    client = make_client(silent, clock)
    assert client.view_age_s(clock.now()) == float("inf")
    await client.start()
    client.on_message(pb.RouteDecision(view=pb.ClusterView()))

    async def look_after(seconds):
        clock.instant += seconds
        await asyncio.sleep(0.01)

    await look_after(0.5)
    clock.instant += 60.0
    assert client.view_age_s(clock.now()) == pytest.approx(0.5), "before it looks"
    await look_after(0.0)
    assert client.view_age_s(clock.now()) == pytest.approx(0.5), "and after"
    for _ in range(14):
        await look_after(0.5)
    assert client.view_age_s(clock.now()) == pytest.approx(7.5)
    clock.instant += 60.0
    client.on_message(pb.RouteDecision(view=pb.ClusterView()))
    await look_after(0.0)
    await look_after(0.5)
    assert client.view_age_s(clock.now()) == pytest.approx(0.5)
    await client.stop()
