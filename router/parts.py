"""What all requests of one router share."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.clock import Clock
from router.legs import Workers
from router.metrics import RouterMetrics
from router.prefix import PrefixNames
from router.route import Route


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
