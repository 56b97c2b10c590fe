"""Faults on purpose that any process can have: a stream with the switch in its way, its service.

A stream is one lane: messages keep their order, but for the fault that is there to break it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc

from cluster.errors import InvalidRequest
from cluster.transport.faults import Fault, FaultSwitch, Firing, Point, Verb
from cluster.wire import faults_pb2 as wire
from cluster.wire import faults_pb2_grpc as wire_grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    Deliver = Callable[[], None]

logger = logging.getLogger(__name__)


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
            self._pass(deliver, point.value)
        elif verb in (Verb.DELAY, Verb.HOLD):
            self._stop(firing, deliver)
        elif verb is Verb.DUPLICATE:
            self._pass(deliver, point.value)
            self._pass(deliver, point.value)
        elif verb is Verb.REORDER:
            self._swapped = deliver
        elif verb is Verb.EARLY and early is not None:
            self._pass(early, point.value)
            self._pass(deliver, point.value)
        elif verb is Verb.FAIL and broken is not None:
            broken()

    def close(self) -> None:
        """Deliver nothing any more."""
        self._is_closed = True
        self._behind.clear()
        self._switch.unsubscribe(self._plan_changed)

    def _pass(self, deliver: Deliver, name: str) -> None:
        swapped, self._swapped = self._swapped, None
        if swapped is not None:
            logger.warning("fault=reorder overtaken by=%s", name)
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
        seconds_per_token=fault.seconds_per_token,
    )
