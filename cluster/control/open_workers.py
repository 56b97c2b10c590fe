"""The workers with room for a part of some request: by what they cost, by room, and by tier.

Where higher tiers take from lower ones, each higher tier has a list of its own, of the workers that
have more room for it than for those below.
"""

from __future__ import annotations

import bisect
import enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.control.needs import Needs
    from cluster.control.worker_entry import WorkerEntry

_FEW = 32
"""So many with room are sorted anew; among more, going by cost soon finds one."""


class Most(NamedTuple):
    """Room in tokens."""

    prefill: int
    decode: int

    def holds(self, needs: Needs) -> bool:
        """Whether a want with these needs has room."""
        return needs.prefill_tokens <= self.prefill and needs.decode_tokens <= self.decode

    def exceeds(self, other: Most) -> bool:
        """Whether there is anything for which ``other`` is too little."""
        return self.prefill > other.prefill or self.decode > other.decode


NOTHING = Most(-1, -1)
NO_BOUND = 1 << 62
"""Room that is not asked for."""


class Part(enum.Enum):
    """What a worker does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    LOCAL = "local"
    """Both."""

    __hash__ = object.__hash__

    def of(self, most: Most) -> Most:
        """Return what a worker has room for as far as this part asks for it."""
        if self is Part.LOCAL:
            return most
        if self is Part.PREFILL:
            return Most(most.prefill, NO_BOUND)
        return Most(NO_BOUND, most.decode)


class Room(NamedTuple):
    """What an open worker has room for; they compare by cost, and each worker is listed once."""

    cost_s: float
    last_granted: int
    worker_id: str
    tier: int
    most: Most
    """Rounded as ``Needs`` are."""
    below: Most
    """What it has room for in the list of a lower tier."""
    entry: WorkerEntry


class _Open:
    """The open workers of one role for one part and tier, by cost and by room."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._by_cost: list[Room] = []
        self._by_room: list[tuple[int, str, Room]] = []
        self._prefills: list[int] = []
        """Sorted: of those who do both parts, for whom ``_by_room`` says nothing of it."""

    def __len__(self) -> int:
        return len(self._by_cost)

    def add(self, room: Room) -> None:
        bisect.insort(self._by_cost, room)
        bisect.insort(self._by_room, (self._size(room.most), room.worker_id, room))
        if self._part is Part.LOCAL:
            bisect.insort(self._prefills, room.most.prefill)

    def remove(self, room: Room) -> None:
        del self._by_cost[bisect.bisect_left(self._by_cost, room)]
        place = (self._size(room.most), room.worker_id)
        del self._by_room[bisect.bisect_left(self._by_room, place)]
        if self._part is Part.LOCAL:
            del self._prefills[bisect.bisect_left(self._prefills, room.most.prefill)]

    def with_room(self, needs: Needs) -> Iterator[WorkerEntry]:
        """Iterate over those that hold the needs, if not in the list of a lower tier; the cheapest
        first."""
        need = needs.prefill_tokens if self._part is Part.PREFILL else needs.decode_tokens
        first = bisect.bisect_left(self._by_room, (need,))
        rooms = self._by_cost
        if len(rooms) - first <= _FEW:
            rooms = sorted([room for _, _, room in self._by_room[first:]])
        for room in rooms:
            below = room.below
            if room.most.holds(needs) and (below is NOTHING or not below.holds(needs)):
                yield room.entry

    def most(self) -> Most:
        if not self._by_room:
            return NOTHING
        most = self._by_room[-1][2].most
        # The two need not be the same worker's.
        return Most(self._prefills[-1], most.decode) if self._part is Part.LOCAL else most

    def _size(self, most: Most) -> int:
        return most.prefill if self._part is Part.PREFILL else most.decode


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

    def most(self, tier: int) -> Most:
        """Return the most room of any for a tier, which has no less than those below it."""
        mosts = self._mosts
        if mosts is None:
            mosts = self._mosts = self._find_mosts()
        return mosts[tier]

    def _find_mosts(self) -> list[Most]:
        most, mosts = NOTHING, []
        for listed in self._by_tier:
            if len(listed):
                own = listed.most()
                most = Most(max(most.prefill, own.prefill), max(most.decode, own.decode))
            mosts.append(most)
        return mosts

    def with_room(self, needs: Needs) -> Iterator[WorkerEntry]:
        """Iterate over those with room: for everybody, then for the higher tiers; each once."""
        for listed in self._by_tier[: needs.tier + 1]:
            if len(listed):
                yield from listed.with_room(needs)


class Openings(NamedTuple):
    """The lists of those who may serve a kind of wants, as they are at each look."""

    prefill: OpenWorkers | None
    """Of those that prefill in pairs, or alone; None: nobody does."""
    decode: OpenWorkers | None
    """None: none is needed."""
    local: tuple[OpenWorkers, ...]
    """Of those that do both."""

    def admit(self, tier: int, prefill_tokens: int, decode_tokens: int) -> bool:
        """Whether wants of a tier that need so much may have room somewhere.

        The most room of a list need not be one worker's.
        """
        # Under load it is decode workers that are full.
        if (
            (self.decode is None or decode_tokens <= self.decode.most(tier).decode)
            and self.prefill is not None
            and prefill_tokens <= self.prefill.most(tier).prefill
        ):
            return True
        for listed in self.local:
            most = listed.most(tier)
            if prefill_tokens <= most.prefill and decode_tokens <= most.decode:
                return True
        return False

    def admit_any(self) -> bool:
        """Whether anybody may have room for the least of wants, in whatever tier."""
        return self.admit(-1, 1, 1)
