"""What a waiting request's place depends on, and the places that the policies give.

    level:  ahead of all | highest tier, and all who have aged | ... | lowest tier,
            before each tier those who are ahead of it
    inside: the tenant with the lowest counter (where shares are fair)
    inside: ahead in its tier | aged, oldest first | by expected work (sjf), or oldest first

``fcfs`` and ``sjf`` have one tier. A request ages when it has waited ``aging_s``: so nobody who is
younger by more than that overtakes it; between tenants with fair shares, nobody but in his turn.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.config import Policy

if TYPE_CHECKING:
    from cluster.config import SchedulingConfig

Place = tuple[int, float, float, int]
"""Where in its line: (ahead, aged or neither; work; arrival; order)."""


class Ahead(enum.Enum):
    """Who goes before others of its kind."""

    NO = "no"
    IN_TIER = "in tier"
    """It ran before, and its client waits in mid-stream."""
    OF_TIER = "of its tier"
    """It holds what others need, but higher tiers take what they need from lower ones."""
    OF_ALL = "of all"
    """It holds what others need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
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
        if ticket.ahead is Ahead.OF_ALL:
            return -1
        has_tier = self.policy is Policy.PRIORITY and not is_aged
        num_above = self.num_tiers - 1 - ticket.tier if has_tier else 0
        return 2 * num_above - (ticket.ahead is Ahead.OF_TIER)

    def place(self, ticket: Ticket, *, is_aged: bool) -> Place:
        """Return its place in its line."""
        if ticket.ahead is not Ahead.NO:
            return (0, 0.0, ticket.arrived, ticket.order)
        if is_aged:
            return (1, 0.0, ticket.arrived, ticket.order)
        work = ticket.work if self.policy is Policy.SJF else 0.0
        return (2, work, ticket.arrived, ticket.order)

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
