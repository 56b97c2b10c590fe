"""One look at those who wait, in their order, as far as it goes.

A walk merges the lists lazily, so that looking at the first few of thousands costs as much as
these few. Requests of one group need the same: once one has no room the walk leaves out the rest.

One that goes before all tiers, for it has aged, brings the turn of its own before theirs, and waits
for it. Whose turn it is the counters say, aged or not: else whoever floods a tier, and therefore
waits for long, would pass all that are served so soon that theirs never age. But who has aged in a
higher tier waits for nobody who is younger: else those whose turn a flood brings would keep it out,
one after the other.
"""

from __future__ import annotations

import bisect
import heapq
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from cluster.policy.fairness import TenantCounters
from cluster.policy.lines import Level, Line
from cluster.policy.order import is_early

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Collection,
        Hashable,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from cluster.policy.lines import Due, Entry, Head
    from cluster.policy.order import Place

_FEW = 32
"""Groups, most of the time, that a walk looks at."""

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Sieve(Protocol[T_contra]):
    """Says which groups a walk is about."""

    def sift(
        self, heads: Iterable[Head], first_of: Callable[[Hashable], T_contra]
    ) -> Iterator[Head]:
        """Iterate over the heads of the groups that the walk visits, in their order.

        Each is asked for when those before it were visited; ``first_of`` tells the first member of
        a group that was not.
        """
        ...


class Walk(Generic[T]):
    """Goes from one to the next; whoever is served meanwhile loses his turn to others."""

    def __init__(
        self,
        levels: Mapping[int, Level[T]],
        sieve: Sieve[T] | None = None,
        *,
        has_early: bool = True,
    ) -> None:
        """Without ``has_early`` nobody goes before all tiers."""
        self._levels = levels
        self._sieve = sieve
        self._has_early = has_early
        self._closed: set[Hashable] = set()
        self._turns: dict[int, _Turns[T]] = {}
        self._steps = self._go()

    def __iter__(self) -> Walk[T]:
        """Return the walk itself."""
        return self

    def __next__(self) -> T:
        """Return the next one."""
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
            yield from self._early([number for number in numbers if _is_of_tier(number)])
        for number in numbers:
            if number >= 0:
                yield from self._all_of(number)

    def _all_of(self, number: int) -> Iterator[T]:
        turns = self._of_level(number)
        while (name := turns.whose()) is not None:
            if turns.look(name) is not None:
                yield turns.take(name).item

    def _early(self, numbers: Sequence[int]) -> Iterator[T]:
        """Iterate over the turns of the tiers in which somebody goes before all of them."""
        tiers = {number: self._of_level(number) for number in numbers}
        while (number := _next_due(tiers)) is not None:
            turns = tiers[number]
            oldest, name = turns.due(), turns.whose()
            assert oldest is not None, "it is due"
            assert name is not None, "the oldest one's, if nobody else's"
            # Whoever finds no room brings no turn, and takes none.
            if turns.has_first(oldest[1]) and turns.has_first(name):
                entry = turns.take(name)
                if not is_early(entry.place):
                    yield from self._ahead_of(number)
                yield entry.item

    def _ahead_of(self, level: int) -> Iterator[T]:
        """Iterate over those that hold what others need, of this tier and of those above it."""
        for number in range(1, level, 2):
            yield from self._all_of(number)

    def _of_level(self, number: int) -> _Turns[T]:
        turns = self._turns.get(number)
        if turns is None:
            level = self._levels.get(number) or Level(TenantCounters())
            turns = self._turns[number] = _Turns(level, self._sieve, self._closed)
        return turns


def _is_of_tier(level: int) -> bool:
    """Whether a level is a tier's, and not one of those who are ahead."""
    return level >= 0 and level % 2 == 0


def _next_due(tiers: Mapping[int, _Turns[T]]) -> int | None:
    """Return whose turn is next: the tier's of the oldest; None where nobody is due.

    But a higher one's, if somebody who has aged there is older than whoever would take it.
    """
    due = {number: first[0] for number, turns in tiers.items() if (first := turns.due())}
    older = list(due)
    number = None
    while older:
        number = min(older, key=due.__getitem__)
        place = tiers[number].next_place()
        older = [each for each in due if each < number and place and due[each] < place]
    return number


class _Turns(Generic[T]):
    """Whose turn it is in one level: the tenant's with the lowest counter who has one left."""

    def __init__(
        self, level: Level[T], sieve: Sieve[T] | None, closed: Collection[Hashable]
    ) -> None:
        self._tenants = level.tenants
        self._lines = level.lines
        self._sieve = sieve
        self._closed = closed
        self._cursors: dict[str, _Cursor[T]] = {}
        """Of those who were asked for."""
        self._turns = level.in_turn()
        self._due = level.due.copy()

    def due(self) -> Due | None:
        """Return the oldest one that brings a turn, as far as it is known without looking for
        room."""
        heap = self._due
        while heap:
            place, name = heap[0]
            front = self.front(name)
            if front is None or not is_early(front):
                heapq.heappop(heap)
            elif front == place:
                return heap[0]
            else:
                heapq.heapreplace(heap, (front, name))
        return None

    def whose(self) -> str | None:
        """Return whose turn it is, as far as it is known without looking for room."""
        heap = self._turns
        while heap:
            known, name = heap[0]
            if self.front(name) is None:
                heapq.heappop(heap)
            elif (current := self._tenants.counter(name)) > known:
                heapq.heapreplace(heap, (current, name))
            else:
                return name
        return None

    def next_place(self) -> Place | None:
        """Return the place of whoever's turn it is."""
        name = self.whose()
        return None if name is None else self.front(name)

    def front(self, name: str) -> Place | None:
        """Return the place of a tenant's next one, as far as it is known without looking for
        room; None where it has none left."""
        cursor = self._cursors.get(name)
        if cursor is not None:
            return cursor.front()
        line = self._lines.get(name)
        return None if line is None else line.front

    def has_first(self, name: str) -> bool:
        """Look for room for a tenant's next one; False where that is another one, or none, now."""
        front, entry = self.front(name), self.look(name)
        return entry is not None and entry.place == front

    def look(self, name: str) -> Entry[T] | None:
        """Return a tenant's next one, which stays the next; None where it has none left."""
        cursor = self._cursors.get(name)
        if cursor is None:
            line = self._lines.get(name, Line())
            cursor = self._cursors[name] = _Cursor(line, self._sieve, self._closed)
        return cursor.look()

    def take(self, name: str) -> Entry[T]:
        """Return a tenant's next one, once; it was looked for."""
        return self._cursors[name].take()


class _Heads(Generic[T]):
    """The heads of a line as they were when a walk began: a few are copied, and all if need be.

    Those of groups that were visited change meanwhile; each is told once.
    """

    def __init__(self, line: Line[T]) -> None:
        self._line = line
        self._copied = line.heads[:_FEW]
        self._index = 0

    def __iter__(self) -> Iterator[Head]:
        return self

    def __next__(self) -> Head:
        head = self.front()
        if head is None:
            raise StopIteration
        self._index += 1
        return head

    def front(self) -> Head | None:
        """Return the next one, which stays the next; None where none is left."""
        if self._index == len(self._copied) == _FEW:
            told = {group for _, _, group in self._copied}
            behind = (self._copied[-1][0], 1)
            others = self._line.heads[bisect.bisect_left(self._line.heads, behind) :]
            self._copied += [head for head in others if head[2] not in told]
        return self._copied[self._index] if self._index < len(self._copied) else None


class _Cursor(Generic[T]):
    """How far a walk has come in one line: merges its groups, but for those that are left out."""

    def __init__(self, line: Line[T], sieve: Sieve[T] | None, closed: Collection[Hashable]) -> None:
        self._line = line
        self._closed = closed
        self._heads = heads = _Heads(line)
        self._firsts: Iterator[Head] = (
            heads
            if sieve is None
            else sieve.sift(heads, lambda group: line.groups[group][0][1].item)
        )
        self._first: Head | None = None
        """The next group's, once that was asked for."""
        self._others: list[Head] = []
        """Of groups whose first was visited: a heap."""
        self._entry: Entry[T] | None = None

    def front(self) -> Place | None:
        """Return the next place, as far as it is known without looking for room."""
        if self._entry is not None:
            return self._entry.place
        first, others = self._first, self._others
        if first is None:
            first = self._heads.front()
        if first is None or (others and others[0] < first):
            return others[0][0] if others else None
        return first[0]

    def look(self) -> Entry[T] | None:
        """Return the next one, which stays the next; None where none is left."""
        entry = self._entry
        while entry is None or entry.has_gone or entry.ticket.group in self._closed:
            head = self._next_head()
            if head is None:
                self._entry = None
                return None
            self._entry = entry = self._entry_at(head)
        return entry

    def take(self) -> Entry[T]:
        """Return the next one, once; it was looked for."""
        entry, self._entry = self._entry, None
        assert entry is not None, "it was looked for"
        return entry

    def _next_head(self) -> Head | None:
        if self._first is None:
            self._first = next(self._firsts, None)
        first, others = self._first, self._others
        if first is not None and (not others or first < others[0]):
            self._first = None
            return first
        return heapq.heappop(others) if others else None

    def _entry_at(self, head: Head) -> Entry[T] | None:
        place, _, group = head
        line = self._line.groups.get(group)
        if line is None or group in self._closed:
            return None
        index = bisect.bisect_left(line, (place,))
        if index + 1 < len(line):
            heapq.heappush(self._others, (line[index + 1][0], 0, group))
        return line[index][1] if index < len(line) else None
