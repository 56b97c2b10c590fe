"""Requests that wait, in the order of a policy, without ever sorting them all.

Keeps who waits where (``lines``) as they come, age and go; each look at them is a ``Walk``.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import TYPE_CHECKING, Generic, TypeVar

from cluster.policy.fairness import TenantCounters
from cluster.policy.lines import Entry, Level
from cluster.policy.order import is_early
from cluster.policy.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from cluster.policy.order import Ordering, Ticket
    from cluster.policy.walk import Sieve

T = TypeVar("T")


class PolicyQueue(Generic[T]):
    """The waiting requests of one place, each under a name of its own."""

    def __init__(self, ordering: Ordering, on_aged: Callable[[T], None] = lambda _: None) -> None:
        """``on_aged`` is called with whoever goes before all younger ones from now on."""
        self.ordering = ordering
        self._on_aged = on_aged
        self._tenants: defaultdict[int, TenantCounters] = defaultdict(TenantCounters)
        """By level."""
        self._entries: dict[Hashable, Entry[T]] = {}
        self._levels: dict[int, Level[T]] = {}
        self._aging: list[tuple[float, int, Hashable]] = []
        self._num_early = 0

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._entries)

    def __contains__(self, name: Hashable) -> bool:
        """Tell whether it waits."""
        return name in self._entries

    def __iter__(self) -> Iterator[T]:
        """Iterate over all of them, in no order; nothing may come or go meanwhile."""
        return (entry.item for entry in self._entries.values())

    def get(self, name: Hashable) -> T | None:
        """Return what waits under that name."""
        entry = self._entries.get(name)
        return None if entry is None else entry.item

    def ticket(self, name: Hashable) -> Ticket:
        """Return its ticket; raises KeyError where it does not wait."""
        return self._entries[name].ticket

    def add(self, name: Hashable, item: T, ticket: Ticket) -> None:
        """Queue it; raises ValueError where the name waits already."""
        if name in self._entries:
            raise ValueError(f"{name} waits already")
        ordering = self.ordering
        entry = Entry(
            name,
            item,
            ticket,
            ordering.level(ticket, is_aged=False),
            ordering.place(ticket, is_aged=False),
        )
        self._entries[name] = entry
        self._put_in(entry)
        if ordering.is_fair:
            self.tenants(ticket.tier).enters(ticket.tenant)
        if ordering.has_aging:
            heapq.heappush(self._aging, (ticket.arrived + ordering.aging_s, ticket.order, name))

    def remove(self, name: Hashable) -> T | None:
        """Take it out; None where it does not wait."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return None
        self._take_out(entry)
        entry.has_gone = True
        if self.ordering.is_fair:
            self.tenants(entry.ticket.tier).leaves(entry.ticket.tenant)
        if len(self._aging) > 64 + 2 * len(self._entries):
            self._aging = [due for due in self._aging if due[2] in self._entries]
            heapq.heapify(self._aging)
        return entry.item

    def tenants(self, tier: int) -> TenantCounters:
        """Return what tenants were served in a tier."""
        return self._tenants[self.ordering.level_of(tier)]

    def walk(self, now: float, sieve: Sieve[T] | None = None) -> Walk[T]:
        """Begin a walk in order; only what it returned last may be taken out meanwhile.

        With a ``sieve`` it leaves out groups, and tells of them.
        """
        self.age(now)
        has_early = self._num_early > 0
        return Walk(self._levels, sieve, has_early=has_early)

    def in_order(self, now: float) -> list[T]:
        """Return all of them in order."""
        return list(self.walk(now))

    def age(self, now: float) -> None:
        """Move those who have aged by now; each walk begins with it."""
        while self._aging and self._aging[0][0] <= now:
            _, order, name = heapq.heappop(self._aging)
            entry = self._entries.get(name)
            # Under its name there may be another by now.
            if entry is not None and entry.ticket.order == order:
                self._take_out(entry)
                entry.level = self.ordering.level(entry.ticket, is_aged=True)
                entry.place = self.ordering.place(entry.ticket, is_aged=True)
                self._put_in(entry)
                self._on_aged(entry.item)

    def _put_in(self, entry: Entry[T]) -> None:
        self._num_early += is_early(entry.place)
        level = self._levels.get(entry.level)
        if level is None:
            level = self._levels[entry.level] = Level(self._tenants[entry.level])
        name = self.ordering.line(entry.ticket)
        level.add(name, entry)

    def _take_out(self, entry: Entry[T]) -> None:
        self._num_early -= is_early(entry.place)
        name, level = self.ordering.line(entry.ticket), self._levels[entry.level]
        level.remove(name, entry)
        if not level.lines:
            del self._levels[entry.level]
