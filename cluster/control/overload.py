"""Whether a request may wait: the bounds of the queue, its caller's share, and its own deadline.

Router and control plane ask the same question: the router before it tokenises, of what the last
view said and of what it has let in itself since; the control plane of the queue as it is. Who may
not wait is told when to come back: when half of those that wait will be gone, or when the wait
will fit its deadline.

A queue that is full of lower tiers is not full for the first of a higher one, who goes before them
all and perhaps at once, to where they find no room: whoever has nobody ahead may exceed the bounds,
by a small surplus of requests. The next of its tier is refused like everybody while it waits, and
so is the first while some of the lower ones have aged: these go before it.

Whose fault it is decides what a client is told. A caller with more than an even share of what
waits, while others wait too, has had its share (429); else the cluster is full (503).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.errors import ClusterFull, QueueFull

_RETRY_RANGE_S = (1.0, 60.0)
_SURPLUS = 0.1
"""Part of ``max_requests`` by which those may exceed it who have nobody ahead; at least one."""
MAX_TENANTS_SHOWN = 64
"""Tenants whose share of the queue a view tells, those with most requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBounds:
    """How much may wait."""

    max_requests: int
    max_tokens: int
    tenant_share: float
    """Part of ``max_requests`` that one named tenant may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLoad:
    """What waits."""

    num_requests: int
    num_tokens: int
    request_s: float
    """Seconds in which one of them is placed while others wait; 0: unknown."""
    is_fair: bool = False
    """Whether tenants take turns."""
    room: int = 0
    """Requests that would not have to wait."""
    tenants: Mapping[str, int] = field(default_factory=dict)
    """Requests by tenant; of many tenants the largest."""
    standings: Mapping[int, int] = field(default_factory=dict)
    """Requests by ``Ordering.standing``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """Who asks to wait."""

    tenant: str
    standing: int
    least_standing: int | None = None
    """The lowest that it may turn out to have, where that is not known yet: a long wait is no
    reason to refuse it then. None: ``standing``."""
    num_requests: int = 1
    num_tokens: int
    remaining_s: float
    """Of its deadline."""


def refusal(load: QueueLoad, who: Newcomer, bounds: QueueBounds) -> QueueFull | None:
    """Return why a request may not wait, and when to come back; None where it may."""
    own = load.tenants.get(who.tenant, 0)
    share = max(1, int(bounds.tenant_share * bounds.max_requests))
    if who.tenant and own and own + who.num_requests > share:
        return QueueFull(
            f"{own} requests of this caller wait, of {share} at most",
            stage="queue",
            retry_after_s=_retry_s(load, own / 2),
        )
    # More than the queue holds at all is refused by the number of choices, and not here.
    num_requests = min(who.num_requests, bounds.max_requests)
    is_first = bool(load.standings) and not _num_ahead(load, who.standing)
    surplus = max(1, int(_SURPLUS * bounds.max_requests)) if is_first else 0
    if load.num_requests + num_requests > bounds.max_requests + load.room + surplus:
        text = f"{load.num_requests} requests wait, of {bounds.max_requests} at most"
        return _error(load, who, text, _retry_s(load, load.num_requests / 2))
    exceeds_tokens = load.num_tokens + who.num_tokens > bounds.max_tokens
    if load.num_tokens and exceeds_tokens and not is_first:
        text = f"{load.num_tokens} prompt tokens wait, of {bounds.max_tokens} at most"
        return _error(load, who, text, _retry_s(load, load.num_requests / 2))
    wait_s = expected_wait_s(load, who)
    if wait_s <= who.remaining_s:
        return None
    text = f"about {wait_s:.1f} s to wait, and {who.remaining_s:.1f} s to the deadline"
    return _error(load, who, text, _bounded(wait_s - who.remaining_s))


def expected_wait_s(load: QueueLoad, who: Newcomer) -> float:
    """Estimate for how long a newcomer would wait for its placement."""
    standing = who.standing if who.least_standing is None else who.least_standing
    num_ahead = max(0, min(_num_ahead(load, standing), load.num_requests) - load.room)
    if load.is_fair and load.tenants:
        # Each round serves one of every tenant.
        num_tenants = len(load.tenants) + (who.tenant not in load.tenants)
        num_ahead = min(num_ahead, load.tenants.get(who.tenant, 0) * num_tenants)
    return num_ahead * load.request_s


def retry_after_s(load: QueueLoad) -> float:
    """Estimate when half of the queue will be gone."""
    return _retry_s(load, load.num_requests / 2)


def _num_ahead(load: QueueLoad, standing: int) -> int:
    """Count those whose own standing lets them go before one of that."""
    return sum(n for other, n in load.standings.items() if other <= standing)


def _error(load: QueueLoad, who: Newcomer, text: str, retry_s: float) -> QueueFull:
    own, num_tenants = load.tenants.get(who.tenant, 0), len(load.tenants)
    has_had_its_share = num_tenants > 1 and own * num_tenants > load.num_requests
    kind = QueueFull if has_had_its_share else ClusterFull
    return kind(text, stage="queue", retry_after_s=retry_s)


def _retry_s(load: QueueLoad, num_to_go: float) -> float:
    return _bounded(num_to_go * load.request_s)


def _bounded(seconds: float) -> float:
    low, high = _RETRY_RANGE_S
    return min(high, max(low, seconds))
