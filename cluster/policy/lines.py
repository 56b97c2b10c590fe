"""Those who wait, sorted: levels, in each the lines of tenants, in each line a list for each group.

    level ── line ── group ── a list, sorted by place
         │       └── heads: (place, group) of each list's first, sorted
         ├── due: (place, tenant) of each line's first that is early, sorted
         └── turns: (counter, tenant) of each line, sorted

All is kept as they come and go, so that a walk begins with copies; a sorted list is a heap.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cluster.policy.fairness import TenantCounters
from cluster.policy.order import Place, Ticket, is_early

T = TypeVar("T")
Head = tuple[Place, int, Hashable]
"""(place of a group's first, always 0, group): places differ, so that groups are not compared."""
Due = tuple[Place, str]
"""The place of the first of a line, and whose line it is."""
Turn = tuple[float, str]
"""A tenant's counter, and the tenant."""


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One that waits, and where."""

    name: Hashable
    item: T
    ticket: Ticket
    level: int
    place: Place
    has_gone: bool = False


@dataclass(slots=True, eq=False)
class Line(Generic[T]):
    """The lists of one tenant in one level."""

    groups: dict[Hashable, list[tuple[Place, Entry[T]]]] = field(default_factory=dict)
    heads: list[Head] = field(default_factory=list)

    @property
    def front(self) -> Place | None:
        """The place of the first."""
        return self.heads[0][0] if self.heads else None

    def add(self, entry: Entry[T]) -> None:
        """Put one in its place."""
        group, place = entry.ticket.group, entry.place
        line = self.groups.setdefault(group, [])
        if not line or place < line[0][0]:
            self._drop_head(line)
            bisect.insort(self.heads, (place, 0, group))
        bisect.insort(line, (place, entry))

    def remove(self, entry: Entry[T]) -> None:
        """Take one out."""
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

    def _drop_head(self, line: list[tuple[Place, Entry[T]]]) -> None:
        if line:
            del self.heads[bisect.bisect_left(self.heads, (line[0][0],))]


@dataclass(slots=True, eq=False)
class Level(Generic[T]):
    """The lines of one level; a tenant of whom nobody waits there has none."""

    tenants: TenantCounters
    lines: dict[str, Line[T]] = field(default_factory=dict)
    due: list[Due] = field(default_factory=list)
    _turns: list[Turn] = field(default_factory=list)
    _counters: dict[str, float] = field(default_factory=dict)
    """What each of them was entered with there."""

    def add(self, name: str, entry: Entry[T]) -> None:
        """Put one in the line of a tenant."""
        if name not in self.lines:
            self.lines[name] = Line()
            self.tenants.moved.add(name)
        self._drop_due(name)
        self.lines[name].add(entry)
        self._note_due(name)

    def remove(self, name: str, entry: Entry[T]) -> None:
        """Take one out of the line of a tenant."""
        line = self.lines[name]
        self._drop_due(name)
        line.remove(entry)
        self._note_due(name)
        if not line.heads:
            del self.lines[name]
            self.tenants.moved.add(name)

    def in_turn(self) -> list[Turn]:
        """Return those who take turns, the lowest counter first."""
        turns, counters = self._turns, self._counters
        for name in self.tenants.moved:
            if name in counters:
                del turns[bisect.bisect_left(turns, (counters.pop(name), name))]
            if name in self.lines:
                counters[name] = self.tenants.counter(name)
                bisect.insort(turns, (counters[name], name))
        self.tenants.moved.clear()
        return turns.copy()

    def front(self, name: str) -> Place | None:
        """Return the place of a tenant's first."""
        line = self.lines.get(name)
        return None if line is None else line.front

    def _drop_due(self, name: str) -> None:
        front = self.front(name)
        if front is not None and is_early(front):
            del self.due[bisect.bisect_left(self.due, (front, name))]

    def _note_due(self, name: str) -> None:
        front = self.front(name)
        if front is not None and is_early(front):
            bisect.insort(self.due, (front, name))
