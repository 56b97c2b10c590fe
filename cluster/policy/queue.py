"""Requests that wait, in the order of a policy, without ever sorting them all.

    level ── tenant ── group ── a list, sorted by place
                  └── heads: (place, group) of each list's first, sorted

A walk merges the lists lazily, so that looking at the first few of thousands costs as much as
these few. Requests of one group need the same: once one has no room the walk leaves out the rest.
"""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from cluster.policy.fairness import TenantCounters
from cluster.policy.order import Ordering, Place, Ticket, is_early

T = TypeVar("T")
Head = tuple[Place, int, Hashable]
"""(place of a group's first, always 0, group): places differ, so that groups are not compared."""
_Due = dict[int, list[tuple[Place, str]]]
"""By tier's level, a heap: the place of a tenant's first, where that has aged, and the tenant."""
T_contra = TypeVar("T_contra", contravariant=True)


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    name: Hashable
    item: T
    ticket: Ticket
    level: int
    place: Place
    has_gone: bool = False


@dataclass(slots=True, eq=False)
class _Lines(Generic[T]):
    """The lists of one tenant in one level."""

    groups: dict[Hashable, list[tuple[Place, _Entry[T]]]] = field(default_factory=dict)
    heads: list[Head] = field(default_factory=list)

    def add(self, entry: _Entry[T]) -> None:
        group, place = entry.ticket.group, entry.place
        line = self.groups.setdefault(group, [])
        if not line or place < line[0][0]:
            self._drop_head(line)
            bisect.insort(self.heads, (place, 0, group))
        bisect.insort(line, (place, entry))

    def remove(self, entry: _Entry[T]) -> None:
        group = entry.ticket.group
        line = self.groups[group]
        index = bisect.bisect_left(line, (entry.place,))
        if index == 0:
            self._drop_head(line)
        del line[index]
        if not line:
            del self.groups[group]
        elif index == 0:
            bisect.insort(self.heads, (line[0][0], 0, group))

    def _drop_head(self, line: list[tuple[Place, _Entry[T]]]) -> None:
        if line:
            del self.heads[bisect.bisect_left(self.heads, (line[0][0],))]


class PolicyQueue(Generic[T]):
    """The waiting requests of one place, each under a name of its own."""

    def __init__(self, ordering: Ordering, on_aged: Callable[[T], None] = lambda _: None) -> None:
        """``on_aged`` is called with whoever goes before all younger ones from now on."""
        self.ordering = ordering
        self._on_aged = on_aged
        self._tenants: defaultdict[int, TenantCounters] = defaultdict(TenantCounters)
        """By level."""
        self._entries: dict[Hashable, _Entry[T]] = {}
        self._levels: dict[int, dict[str, _Lines[T]]] = {}
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
        entry = _Entry(
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
        return Walk(self._levels, self._tenants, sieve, has_early=self._num_early > 0)

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

    def _put_in(self, entry: _Entry[T]) -> None:
        self._num_early += is_early(entry.place)
        level = self._levels.setdefault(entry.level, {})
        level.setdefault(self.ordering.line(entry.ticket), _Lines()).add(entry)

    def _take_out(self, entry: _Entry[T]) -> None:
        self._num_early -= is_early(entry.place)
        line = self.ordering.line(entry.ticket)
        level = self._levels[entry.level]
        level[line].remove(entry)
        if not level[line].groups:
            del level[line]
            if not level:
                del self._levels[entry.level]


class Sieve(Protocol[T_contra]):
    """Says which groups a walk is about."""

    def sift(
        self, heads: Sequence[Head], first_of: Callable[[Hashable], T_contra]
    ) -> Iterator[Head]:
        """Iterate over the heads of the groups that the walk visits, in their order.

        Each is asked for when those before it were visited; ``first_of`` tells the first member of
        a group that was not.
        """
        ...


class Walk(Generic[T]):
    """One look at a queue, in its order.

    One that goes before all tiers, for it has aged, brings the turn of its own before theirs, and
    waits for it. Whose turn it is the counters say, aged or not: else whoever floods a tier, and
    therefore waits for long, would pass all that are served so soon that theirs never age. But who
    has aged in a higher tier waits for nobody who is younger: else those whose turn a flood brings
    would keep it out, one after the other.
    """

    def __init__(
        self,
        levels: dict[int, dict[str, _Lines[T]]],
        tenants: defaultdict[int, TenantCounters],
        sieve: Sieve[T] | None = None,
        *,
        has_early: bool = True,
    ) -> None:
        """Without ``has_early`` nobody goes before all tiers."""
        self._levels = levels
        self._tenants = tenants
        self._sieve = sieve
        self._has_early = has_early
        self._closed: set[Hashable] = set()
        self._turns: dict[int, _Turns[T]] = {}
        self._steps = self._go()

    def __iter__(self) -> Walk[T]:
        """Return the walk itself."""
        return self

    def __next__(self) -> T:
        """Return the next one; whoever is served meanwhile loses his turn to others."""
        return next(self._steps)

    def close_if(self, group: Hashable, is_over: bool) -> None:
        """Leave out all that are left of a group, if it is over with it."""
        if is_over:
            self._closed.add(group)

    def _go(self) -> Iterator[T]:
        numbers = sorted(self._levels)
        for number in numbers:
            if number < 0:
                yield from self._all_of(number)
        if self._has_early:
            yield from self._early()
        for number in numbers:
            if number >= 0:
                yield from self._all_of(number)

    def _all_of(self, number: int) -> Iterator[T]:
        turns = self._of_level(number)
        while (entry := turns.take()) is not None:
            yield entry.item

    def _early(self) -> Iterator[T]:
        """Iterate over the turns of the tiers in which somebody goes before all of them."""
        due = self._due()
        while due:
            number = self._next_due(due)
            firsts, turns = due[number], self._of_level(number)
            place, name = firsts[0]
            entry = turns.next_of(name)
            if entry is None or not is_early(entry.place):
                heapq.heappop(firsts)
                if not firsts:
                    del due[number]
            elif entry.place > place:
                heapq.heapreplace(firsts, (entry.place, name))
            elif (other := turns.take()) is not None:
                if not is_early(other.place):
                    yield from self._ahead_of(number)
                yield other.item

    def _due(self) -> _Due:
        # The first of each line, or where it was left out the next one: found out when it is due.
        due: _Due = {}
        for number, lines in self._levels.items():
            firsts = [(line.heads[0][0], name) for name, line in lines.items()]
            firsts = [first for first in firsts if is_early(first[0])] if number % 2 == 0 else []
            if firsts:
                heapq.heapify(firsts)
                due[number] = firsts
        return due

    def _next_due(self, due: _Due) -> int:
        """Return whose turn is next: the tier's of the oldest.

        But a higher one's, if somebody who has aged there is older than whoever would take it.
        """
        number = min(due, key=lambda each: due[each][0])
        while (place := self._of_level(number).next_place()) is not None:
            older = [each for each in due if each < number and due[each][0][0] < place]
            if not older:
                break
            number = min(older, key=lambda each: due[each][0])
        return number

    def _ahead_of(self, level: int) -> Iterator[T]:
        """Iterate over those that hold what others need, of this tier and of those above it."""
        for number in range(1, level, 2):
            yield from self._all_of(number)

    def _of_level(self, number: int) -> _Turns[T]:
        turns = self._turns.get(number)
        if turns is None:
            lines = self._levels.get(number, {})
            turns = _Turns(self._tenants[number], lines, self._merge, self._closed)
            self._turns[number] = turns
        return turns

    def _heads(self, lines: _Lines[T]) -> Iterator[Head]:
        heads, sieve = list(lines.heads), self._sieve
        if sieve is None:
            return iter(heads)
        return sieve.sift(heads, lambda group: lines.groups[group][0][1].item)

    def _merge(self, lines: _Lines[T]) -> Iterator[_Entry[T]]:
        firsts = self._heads(lines)
        first = next(firsts, None)
        others: list[Head] = []  # of groups whose first was visited: a heap
        while first is not None or others:
            if first is not None and (not others or first < others[0]):
                place, _, group = first
                first = None
            else:
                place, _, group = heapq.heappop(others)
            line = lines.groups.get(group)
            if line is not None and group not in self._closed:
                index = bisect.bisect_left(line, (place,))
                if index + 1 < len(line):
                    heapq.heappush(others, (line[index + 1][0], 0, group))
                if index < len(line):
                    yield line[index][1]
            if first is None:
                first = next(firsts, None)


class _Turns(Generic[T]):
    """Whose turn it is in one level: the tenant's with the lowest counter who has one left."""

    def __init__(
        self,
        tenants: TenantCounters,
        lines: dict[str, _Lines[T]],
        merge: Callable[[_Lines[T]], Iterator[_Entry[T]]],
        closed: Collection[Hashable],
    ) -> None:
        self._tenants = tenants
        self._lines = dict(lines)
        self._merge = merge
        self._closed = closed
        self._merged: dict[str, Iterator[_Entry[T]]] = {}
        """Of those who were asked for."""
        self._next: dict[str, _Entry[T] | None] = {}
        self._heap = tenants.counters(lines)
        heapq.heapify(self._heap)

    def next_of(self, name: str) -> _Entry[T] | None:
        """Return a tenant's next one, which stays the next; None where it has none left."""
        entry = self._next.get(name)
        if entry is not None and not (entry.has_gone or entry.ticket.group in self._closed):
            return entry
        if name not in self._merged:
            line = self._lines.get(name)
            self._merged[name] = iter(()) if line is None else self._merge(line)
        entry = self._next[name] = next(self._merged[name], None)
        return entry

    def take(self) -> _Entry[T] | None:
        """Return whose turn it is, once; None where nobody is left."""
        while (name := self._least()) is not None:
            entry = self.next_of(name)
            if entry is not None:
                self._next[name] = None
                return entry
            heapq.heappop(self._heap)
        return None

    def next_place(self) -> Place | None:
        """Return the place of whoever's turn it is, as far as that is known without looking for
        room; None where nobody is left."""
        while (name := self._least()) is not None:
            if name not in self._merged:
                return self._lines[name].heads[0][0]
            entry = self.next_of(name)
            if entry is not None:
                return entry.place
            heapq.heappop(self._heap)
        return None

    def _least(self) -> str | None:
        """Return the tenant with the lowest counter."""
        heap = self._heap
        while heap and (current := self._tenants.counter(heap[0][1])) > heap[0][0]:
            heapq.heapreplace(heap, (current, heap[0][1]))
        return heap[0][1] if heap else None
