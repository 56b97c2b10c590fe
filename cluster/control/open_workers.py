"""The workers with room for a part of some request: by what they cost, by room, and by tier.

Where higher tiers take from lower ones, each higher tier has a list of its own, of the workers that
have more room for it than for those below.
"""

from __future__ import annotations

import bisect
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.control.unplaced import Most
from cluster.control.worker_entry import WorkerEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cluster.control.needs import Needs

_FEW = 32
"""So many with room are sorted anew; among more, going by cost soon finds one."""

Key = tuple[float, int, str]


class Part(enum.Enum):
    """What a worker does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    LOCAL = "local"
    """Both."""

    __hash__ = object.__hash__


NOTHING = Most(-1, -1)
UNBOUNDED = Most(1 << 62, 1 << 62)


@dataclass(slots=True, eq=False)
class Room:
    """What an open worker has room for; rounded as ``Needs`` are."""

    entry: WorkerEntry
    part: Part
    most: Most
    cost: Key
    tier: int
    below: Most | None
    """What it has room for in the list of a lower tier."""


class _Open:
    """The open workers of one role for one part and tier, by cost and by room."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._by_cost: list[tuple[Key, Room]] = []
        self._by_room: list[tuple[int, str, Room]] = []
        self._most: Most | None = None

    def __len__(self) -> int:
        return len(self._by_cost)

    def add(self, room: Room) -> None:
        self._most = None
        bisect.insort(self._by_cost, (room.cost, room))
        bisect.insort(self._by_room, (self._size(room), room.entry.worker_id, room))

    def remove(self, room: Room) -> None:
        self._most = None
        del self._by_cost[bisect.bisect_left(self._by_cost, (room.cost,))]
        place = (self._size(room), room.entry.worker_id)
        del self._by_room[bisect.bisect_left(self._by_room, place)]

    def with_room(self, needs: Needs) -> Iterator[WorkerEntry]:
        """Iterate over those that hold the needs, if not in the list of a lower tier; the cheapest
        first."""
        first = bisect.bisect_left(self._by_room, (self._need(needs),))
        if len(self._by_room) - first > _FEW:
            for _, room in self._by_cost:
                if self._holds(room, needs):
                    yield room.entry
            return
        few = [room for _, _, room in self._by_room[first:] if self._holds(room, needs)]
        for room in sorted(few, key=_cost):
            yield room.entry

    def most(self) -> Most:
        if not self._by_room:
            return NOTHING
        if self._most is None:
            last = self._by_room[-1][2].most
            prefill = last.prefill
            if self._part is Part.LOCAL:
                # The two need not be the same worker's.
                prefill = max(room.most.prefill for _, _, room in self._by_room)
            self._most = Most(prefill, last.decode)
        return self._most

    def _holds(self, room: Room, needs: Needs) -> bool:
        below = room.below is not None and holds(room.below, self._part, needs)
        return not below and holds(room.most, self._part, needs)

    def _need(self, needs: Needs) -> int:
        return needs.prefill_tokens if self._part is Part.PREFILL else needs.decode_tokens

    def _size(self, room: Room) -> int:
        return room.most.prefill if self._part is Part.PREFILL else room.most.decode


def most_of(rooms: Iterable[Most]) -> Most:
    """Return the most prefill and the most decode room, which need not be the same one's."""
    prefills, decodes = zip(*rooms, strict=True)
    return Most(max(prefills), max(decodes))


class OpenWorkers:
    """The open workers of one role for one part, by tier; those of tier 0 are for everybody."""

    def __init__(self, part: Part, num_tiers: int) -> None:
        self._by_tier = [_Open(part) for _ in range(num_tiers)]
        self._mosts: list[Most] | None = None

    def add(self, room: Room) -> None:
        """Enter a worker's room for a tier."""
        self._mosts = None
        self._by_tier[room.tier].add(room)

    def remove(self, room: Room) -> None:
        """Take out what was entered."""
        self._mosts = None
        self._by_tier[room.tier].remove(room)

    def with_room(self, needs: Needs) -> Iterator[WorkerEntry]:
        """Iterate over those with room: for everybody, then for the higher tiers; each once."""
        for listed in self._by_tier[: needs.tier + 1]:
            if len(listed):
                yield from listed.with_room(needs)

    def mosts(self) -> list[Most]:
        """Return the most room of any, by tier; no tier has less than those below it."""
        if self._mosts is None:
            most, self._mosts = NOTHING, []
            for own in [listed.most() for listed in self._by_tier]:
                if most is NOTHING:
                    most = own
                elif own is not NOTHING:
                    most = most_of((most, own))
                self._mosts.append(most)
        return self._mosts


def holds(most: Most, part: Part, needs: Needs) -> bool:
    """Whether there is room for a part of a request with these needs."""
    if part is Part.PREFILL:
        return needs.prefill_tokens <= most.prefill
    is_computable = part is Part.DECODE or needs.prefill_tokens <= most.prefill
    return is_computable and needs.decode_tokens <= most.decode


def exceeds(most: Most, other: Most | None) -> bool:
    """Whether there is anything for which ``other`` is too little; None is nothing."""
    return other is None or most.prefill > other.prefill or most.decode > other.decode


def _cost(room: Room) -> Key:
    return room.cost
