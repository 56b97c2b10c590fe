"""Faults on purpose on the signalling side: what a worker hears of its links and its routers.

Each link, and each router, is one lane: messages keep their order, but for the fault that is
there to break it. The service through which a plan is set from outside is here too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from cluster.errors import InvalidRequest
from cluster.handoff import AbortHandoff, Commit, Credit, ManifestBytes, Offer
from cluster.transport.faults import Fault, FaultSwitch, Firing, Point, Verb
from cluster.wire import faults_pb2 as wire
from cluster.wire import faults_pb2_grpc as wire_grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.handoff import AbortCause, LinkSignal
    from cluster.request import Leg, LegKey, Redirect
    from cluster.rpc.legs import LegHandler, LegSink
    from cluster.rpc.link import Link, LinkEvents

    Deliver = Callable[[], None]

_BROKEN = "broken on purpose"
_POINTS: dict[type, Point] = {
    Offer: Point.OFFER,
    Credit: Point.CREDIT,
    ManifestBytes: Point.MANIFEST,
    Commit: Point.COMMIT,
    AbortHandoff: Point.ABORT,
}


class FaultyLane:
    """One ordered stream of messages with the switch in its way; event loop only."""

    def __init__(self, switch: FaultSwitch) -> None:
        self._switch = switch
        self._behind: deque[Deliver] = deque()
        """What waits behind a message that is held or late, that one first."""
        self._held: Firing | None = None
        self._swapped: Deliver | None = None
        self._is_closed = False
        switch.subscribe(self._plan_changed)

    def take(
        self,
        point: Point,
        peer: str,
        deliver: Deliver,
        *,
        broken: Deliver | None = None,
        early: Deliver | None = None,
    ) -> None:
        """Deliver a message, or do to it what the plan says.

        ``broken`` breaks the lane; ``early`` says done before the data is there.
        """
        firing = self._switch.at(point, peer)
        verb = firing.fault.verb if firing is not None else None
        if firing is None:
            self._pass(deliver)
        elif verb in (Verb.DELAY, Verb.HOLD):
            self._stop(firing, deliver)
        elif verb is Verb.DUPLICATE:
            self._pass(deliver)
            self._pass(deliver)
        elif verb is Verb.REORDER:
            self._swapped = deliver
        elif verb is Verb.EARLY and early is not None:
            self._pass(early)
            self._pass(deliver)
        elif verb is Verb.FAIL and broken is not None:
            broken()

    def close(self) -> None:
        """Deliver nothing any more."""
        self._is_closed = True
        self._behind.clear()
        self._switch.unsubscribe(self._plan_changed)

    def _pass(self, deliver: Deliver) -> None:
        swapped, self._swapped = self._swapped, None
        for each in (deliver, swapped):
            if each is None:
                continue
            if self._behind:
                self._behind.append(each)
            else:
                each()

    def _stop(self, firing: Firing, deliver: Deliver) -> None:
        self._behind.append(deliver)
        if self._held is not None:
            return
        self._held = firing
        if firing.fault.verb is Verb.DELAY:
            loop = asyncio.get_running_loop()
            loop.call_later(firing.fault.seconds, self._let_go, firing)

    def _plan_changed(self) -> None:
        # On the event loop too: that is where the service below changes the plan.
        if self._held is not None:
            self._let_go(self._held)
        swapped, self._swapped = self._swapped, None
        if swapped is not None:
            swapped()

    def _let_go(self, firing: Firing) -> None:
        if self._is_closed or self._held is not firing:
            return
        self._held = None
        behind, self._behind = self._behind, deque()
        for deliver in behind:
            deliver()


class FaultyLinkEvents:
    """Stands between a worker's links and the half that hears of them."""

    def __init__(self, events: LinkEvents, switch: FaultSwitch) -> None:
        self._events = events
        self._switch = switch
        self._lanes: dict[Link, FaultyLane] = {}
        switch.subscribe(self._plan_changed)

    def on_signal(self, link: Link, message: LinkSignal) -> None:
        """Take one message of the peer's."""
        lane = self._lanes.get(link)
        if lane is None:
            lane = self._lanes[link] = FaultyLane(self._switch)
            if self._breaks(link):
                return
        tell = partial(self._events.on_signal, link)
        early = None
        if isinstance(message, Credit):
            early = partial(tell, Commit(handoff_id=message.handoff_id))
        lane.take(
            _POINTS[type(message)],
            link.peer.worker_id,
            partial(tell, message),
            broken=partial(link.close, _BROKEN),
            early=early,
        )

    def on_link_lost(self, link: Link, reason: str) -> None:
        """Pass it on; what was held on this link is lost with it."""
        lane = self._lanes.pop(link, None)
        if lane is not None:
            lane.close()
        self._events.on_link_lost(link, reason)

    def _plan_changed(self) -> None:
        for link in self._lanes:
            self._breaks(link)

    def _breaks(self, link: Link) -> bool:
        if self._switch.at(Point.LINK, link.peer.worker_id) is None:
            return False
        link.close(_BROKEN)
        return True


class FaultyLegs:
    """Stands between a worker's server and its legs."""

    def __init__(self, legs: LegHandler, switch: FaultSwitch) -> None:
        self._legs = legs
        self._lane = FaultyLane(switch)

    def start_leg(self, leg: Leg, sink: LegSink) -> None:
        """Take a leg."""
        self._take(Point.LEG, partial(self._legs.start_leg, leg, sink))

    def abort_leg(self, key: LegKey, cause: AbortCause) -> None:
        """Give a leg up."""
        self._take(Point.LEG_ABORT, partial(self._legs.abort_leg, key, cause))

    def redirect_leg(self, redirect: Redirect) -> None:
        """Pass an export on."""
        self._take(Point.REDIRECT, partial(self._legs.redirect_leg, redirect))

    def router_lost(self, sink: LegSink) -> None:
        """Give up all legs of one router; no message, so no fault meets it."""
        self._legs.router_lost(sink)

    def _take(self, point: Point, deliver: Deliver) -> None:
        self._lane.take(point, "", deliver)


class FaultyTap:
    """Stands in a client's stream to the control plane; each direction is a lane."""

    def __init__(self, switch: FaultSwitch) -> None:
        self._out = FaultyLane(switch)
        self._in = FaultyLane(switch)

    def outgoing(self, kind: str, pass_on: Deliver) -> None:
        """A fact is about to be sent."""
        self._out.take(Point.CONTROL_OUT, kind, pass_on)

    def incoming(self, kind: str, pass_on: Deliver) -> None:
        """A decision has come."""
        self._in.take(Point.CONTROL_IN, kind, pass_on)


class FaultService(wire_grpc.FaultsServicer):
    """Lets whoever reaches this server set the plan: so it is only there where it is asked for."""

    def __init__(self, switch: FaultSwitch) -> None:
        self._switch = switch

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve it on ``server``."""
        wire_grpc.add_FaultsServicer_to_server(self, server)

    async def Set(self, request: wire.FaultPlan, context: Any) -> wire.FaultState:
        """Replace the plan; INVALID_ARGUMENT where it makes no sense."""
        try:
            self._switch.set([_fault_from_wire(fault) for fault in request.faults])
        except (InvalidRequest, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return self._state()

    async def Clear(self, request: wire.ClearFaults, context: Any) -> wire.FaultState:
        """End the plan, and return what had come of it."""
        state = self._state()
        self._switch.set(())
        return state

    async def Fired(self, request: wire.GetFired, context: Any) -> wire.FaultState:
        """Return what has come of the plan."""
        return self._state()

    def _state(self) -> wire.FaultState:
        passed = {point.value: count for point, count in self._switch.passed().items()}
        return wire.FaultState(fired=self._switch.fired(), passed=passed)


def _fault_from_wire(fault: wire.Fault) -> Fault:
    return Fault(
        verb=Verb(fault.verb),
        point=Point(fault.point),
        nth=fault.nth or 1,
        times=fault.times,
        seconds=fault.seconds,
        offset=fault.offset,
        peer=fault.peer,
        seconds_per_byte=fault.seconds_per_byte,
    )
