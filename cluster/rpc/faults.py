"""Faults on purpose in what a worker hears of its links and its routers.

Each link is one lane (``fault_seam``), and all routers together are one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from cluster.handoff import AbortHandoff, Commit, Credit, ManifestBytes, Offer
from cluster.rpc.fault_seam import FaultyLane
from cluster.transport.faults import FaultSwitch, Point

if TYPE_CHECKING:
    from cluster.handoff import AbortCause, LinkSignal
    from cluster.request import Leg, LegKey, Redirect
    from cluster.rpc.fault_seam import Deliver
    from cluster.rpc.legs import LegHandler, LegSink
    from cluster.rpc.link import Link, LinkEvents

_BROKEN = "broken on purpose"
_POINTS: dict[type, Point] = {
    Offer: Point.OFFER,
    Credit: Point.CREDIT,
    ManifestBytes: Point.MANIFEST,
    Commit: Point.COMMIT,
    AbortHandoff: Point.ABORT,
}


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

    def abort_leg(self, key: LegKey, cause: AbortCause, grant_id: str, sink: LegSink) -> None:
        """Give a leg up."""
        abort = partial(self._legs.abort_leg, key, cause, grant_id, sink)
        self._take(Point.LEG_ABORT, abort)

    def redirect_leg(self, redirect: Redirect) -> None:
        """Pass an export on."""
        self._take(Point.REDIRECT, partial(self._legs.redirect_leg, redirect))

    def router_lost(self, sink: LegSink) -> None:
        """Give up all legs of one router; no message, so no fault meets it."""
        self._legs.router_lost(sink)

    def _take(self, point: Point, deliver: Deliver) -> None:
        self._lane.take(point, "", deliver)
