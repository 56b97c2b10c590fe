"""What the planner decides; the server carries it out, in order."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.control.facts import Grant, Reject


@dataclass(frozen=True, slots=True, kw_only=True)
class SendGrant:
    """Tell a router where its request runs."""

    router_id: str
    grant: Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReject:
    """Tell a router that its request does not run."""

    router_id: str
    reject: Reject


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDied:
    """Tell every router that this incarnation is lost, and hang up on it."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortLegs:
    """Tell a worker to end the legs of a grant that its router is through with."""

    worker_id: str
    grant_id: str


Decision = SendGrant | SendReject | WorkerDied | AbortLegs
