"""What all requests of one router share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.clock import Clock
from router.legs import Workers
from router.metrics import RouterMetrics
from router.prefix import PrefixNames
from router.route import Route

if TYPE_CHECKING:
    from cluster.request import Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The ways out of a router, its clock and its counters."""

    route: Route
    workers: Workers
    clock: Clock
    metrics: RouterMetrics
    prefixes: PrefixNames
    resumes: bool
    """Whether a choice goes on with other workers after its first token."""

    def holds(self, peer: Peer, grant_id: str) -> bool:
        """Whether a worker has a leg of a grant, by the last view."""
        view = self.route.view
        return view is not None and any(
            grant_id in each.report.held_grants
            for each in view.workers
            if each.worker.incarnation == peer.incarnation
        )
