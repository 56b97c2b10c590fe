"""What a waiting request's place depends on, and the places that the policies give.

    level:  ahead of all | highest tier | ... | lowest tier; before each those who are ahead of it
    inside: the tenant with the lowest counter of its tier (where shares are fair)
    inside: aged, oldest first | ahead in its tier | by expected work (sjf), or oldest first

``fcfs`` and ``sjf`` have one tier, and in the highest one those who are ahead go before the aged. A
request ages when it has waited ``aging_s``: the turn of its tier comes then before those of all
others, the oldest one's first. So nobody who is younger by more than that overtakes it; where
tenants have fair shares nobody of its tenant and tier: others of its tier go in their turns, and
its tenant's other tiers in theirs. It could not hold across tiers beside fair shares of each: where
one asks ever more of a low tier and another of a high one, the order in which each of them asks
fixes what it gets of both. Whoever takes such a turn goes after those who aged in higher tiers and
are older than itself.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cluster.config import Policy

if TYPE_CHECKING:
    from collections.abc import Hashable

    from cluster.config import SchedulingConfig

Place = tuple[int, float, float, int]
"""Where in its line: (rank, below; work; arrival; order)."""
_AHEAD_AND_EARLY, _EARLY, _AHEAD, _OTHERS = range(4)


class Ahead(enum.Enum):
    """Who goes before others of its kind."""

    NO = "no"
    IN_TIER = "in tier"
    """It ran before, and its client waits in mid-stream."""
    OF_TIER = "of its tier"
    """It holds what others need, but higher tiers take what they need from lower ones."""
    OF_ALL = "of all"
    """It holds what others need."""


class Ticket(NamedTuple):
    """What a request's place among those that wait depends on."""

    arrived: float
    """Instant; less what it had waited elsewhere."""
    order: int
    """Breaks ties of ``arrived``; unique."""
    tier: int = 0
    """How high, from 0."""
    tenant: str = ""
    work: float = 0.0
    """Tokens that it is expected to take."""
    group: Hashable = None
    """Equal for requests that need the same: none of them has room where one has none."""
    ahead: Ahead = Ahead.NO


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordering:
    """The rule of one queue."""

    policy: Policy = Policy.FCFS
    num_tiers: int = 1
    aging_s: float = 5.0
    is_fair: bool = False
    """Whether tenants get fair shares within a tier."""

    @classmethod
    def of(cls, scheduling: SchedulingConfig) -> Ordering:
        """Return the order of a cluster's queues."""
        return cls(
            policy=scheduling.policy,
            num_tiers=len(scheduling.tiers),
            aging_s=scheduling.aging_s,
            is_fair=scheduling.fair_tenants,
        )

    @property
    def has_aging(self) -> bool:
        """Whether anybody's place changes with time; first come, first served needs none."""
        return self.policy is not Policy.FCFS

    def has_aged(self, arrived: float, now: float) -> bool:
        """Whether one that arrived then has waited so long that nobody who comes goes before it."""
        return now >= arrived + self.aging_s

    def level(self, ticket: Ticket, *, is_aged: bool) -> int:
        """Return which level a request waits in; the lowest number is served first.

        Even ones are the tiers', and each odd one is of those who are ahead of the next tier.
        """
        if ticket.ahead is Ahead.OF_ALL or (ticket.ahead is Ahead.OF_TIER and is_aged):
            return -1
        return self.level_of(ticket.tier) - (ticket.ahead is Ahead.OF_TIER)

    def level_of(self, tier: int) -> int:
        """Return the level of a tier."""
        return 2 * (self.num_tiers - 1 - tier) if self.policy is Policy.PRIORITY else 0

    def place(self, ticket: Ticket, *, is_aged: bool) -> Place:
        """Return its place in its line."""
        if ticket.ahead is not Ahead.NO:
            is_early = is_aged or self.level_of(ticket.tier) == 0
            rank = _AHEAD_AND_EARLY if is_early else _AHEAD
            return (rank, 0.0, ticket.arrived, ticket.order)
        if is_aged:
            return (_EARLY, 0.0, ticket.arrived, ticket.order)
        work = ticket.work if self.policy is Policy.SJF else 0.0
        return (_OTHERS, work, ticket.arrived, ticket.order)

    def standing(self, *, tier: int, work: float, is_aged: bool = False) -> int:
        """Return a rough place: who has a lower one goes first, who has the same may."""
        if is_aged:
            return 0
        if self.policy is Policy.PRIORITY:
            return self.num_tiers - 1 - tier
        return int(work).bit_length() if self.policy is Policy.SJF else 0

    def line(self, ticket: Ticket) -> str:
        """Return whose line it waits in; without fair shares there is one for all."""
        holds = ticket.ahead in (Ahead.OF_TIER, Ahead.OF_ALL)
        return ticket.tenant if self.is_fair and not holds else ""

    def passable_until(self, ticket: Ticket, *, from_above: bool = False) -> float:
        """Return up to which arrival others may take what it waits for, while it does not fit.

        ``from_above``: others of a higher tier.
        """
        may_pass = ticket.ahead is Ahead.NO or (from_above and ticket.ahead is Ahead.OF_TIER)
        if not may_pass:
            return float("-inf")
        return ticket.arrived + self.aging_s


def is_early(place: Place) -> bool:
    """Whether the turn of its tier comes before those of all tiers."""
    return place[0] <= _EARLY
