"""The workers that could take something now, the cheapest first, kept up to date.

Placing looks at a few of each list, however many workers there are. A list's order is by what its
workers would cost a middling request: whoever is chosen among the first few is priced exactly.
"""

from __future__ import annotations

import bisect
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.config import Role
from cluster.control.facts import Health
from cluster.control.worker_entry import WorkerEntry
from cluster.policy.batching import is_closed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cluster.config import PoolConfig, SchedulingConfig
    from cluster.control.costs import CostModel
    from cluster.control.ledger import Ledger
    from cluster.control.needs import Needs

_MIDDLING_TOKENS = 256
"""Of prompt, for the order of the lists."""

_FEW = 32
"""So many with room are sorted anew; among more, going by cost soon finds one."""

_Key = tuple[float, int, str]


class Part(enum.Enum):
    """What a worker does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    LOCAL = "local"
    """Both."""


_PARTS = {
    Role.PREFILL: (Part.PREFILL,),
    Role.DECODE: (Part.DECODE, Part.LOCAL),
    Role.MIXED: (Part.PREFILL, Part.DECODE, Part.LOCAL),
}


@dataclass(frozen=True, slots=True)
class Most:
    """Room in tokens."""

    prefill: int
    decode: int


_NONE = Most(-1, -1)


@dataclass(frozen=True, slots=True)
class _Room:
    """What an open worker has room for, in tokens; rounded as ``Needs`` are."""

    entry: WorkerEntry
    prefill: int
    decode: int
    cost: _Key

    def holds(self, part: Part, needs: Needs) -> bool:
        if part is Part.PREFILL:
            return needs.prefill_tokens <= self.prefill
        is_computable = part is Part.DECODE or needs.prefill_tokens <= self.prefill
        return is_computable and needs.decode_tokens <= self.decode


class _Open:
    """The open workers of one role for one part, by cost and by room."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._by_cost: list[tuple[_Key, _Room]] = []
        self._by_room: list[tuple[int, str, _Room]] = []
        self._most: Most | None = None

    def add(self, room: _Room) -> None:
        self._most = None
        bisect.insort(self._by_cost, (room.cost, room))
        bisect.insort(self._by_room, (self._size(room), room.entry.worker_id, room))

    def remove(self, room: _Room) -> None:
        self._most = None
        del self._by_cost[bisect.bisect_left(self._by_cost, (room.cost,))]
        place = (self._size(room), room.entry.worker_id)
        del self._by_room[bisect.bisect_left(self._by_room, place)]

    def with_room(self, needs: Needs) -> Iterator[WorkerEntry]:
        """Iterate over those that hold the needs, the cheapest first."""
        first = bisect.bisect_left(self._by_room, (self._need(needs),))
        if len(self._by_room) - first > _FEW:
            for _, room in self._by_cost:
                if room.holds(self._part, needs):
                    yield room.entry
            return
        few = [room for _, _, room in self._by_room[first:] if room.holds(self._part, needs)]
        for room in sorted(few, key=_cost):
            yield room.entry

    def most(self) -> Most:
        if not self._by_room:
            return _NONE
        if self._most is None:
            last = self._by_room[-1][2]
            prefill = last.prefill
            if self._part is Part.LOCAL:
                # The two need not be the same worker's.
                prefill = max(room.prefill for _, _, room in self._by_room)
            self._most = Most(prefill, last.decode)
        return self._most

    def _need(self, needs: Needs) -> int:
        return needs.prefill_tokens if self._part is Part.PREFILL else needs.decode_tokens

    def _size(self, room: _Room) -> int:
        return room.prefill if self._part is Part.PREFILL else room.decode


class Fleet:
    """Lists of open workers, by role and part. An open one may have room for somebody."""

    def __init__(
        self,
        pools: Mapping[str, PoolConfig],
        scheduling: SchedulingConfig,
        ledger: Ledger,
        costs: CostModel,
    ) -> None:
        self._pools = pools
        self._run_ahead_tokens = scheduling.run_ahead_tokens
        self._ledger = ledger
        self._costs = costs
        self._open: dict[tuple[Role, Part], _Open] = {}
        self._rooms: dict[str, Sequence[tuple[_Open, _Room]]] = {}
        self._has_grown = False

    def refresh(self) -> None:
        """Take in what has changed in the ledger."""
        changed = self._ledger.changed
        while changed:
            worker_id = changed.pop()
            old = self._rooms.pop(worker_id, ())
            for listed, room in old:
                listed.remove(room)
            entry = self._ledger.workers.get(worker_id)
            self._costs.learn_speeds(worker_id, entry)
            if entry is not None:
                new = self._rooms[worker_id] = self._enter(entry)
                self._has_grown |= _has_grown(old, new)

    def take_growth(self) -> bool:
        """Whether somebody has had more room since the last call."""
        has_grown, self._has_grown = self._has_grown, False
        return has_grown

    def with_room(self, role: Role, part: Part, needs: Needs) -> Iterator[WorkerEntry]:
        """Iterate over the workers of a role that have room for these needs, cheapest first."""
        listed = self._open.get((role, part))
        return iter(()) if listed is None else listed.with_room(needs)

    def most(self, role: Role, part: Part) -> Most:
        """Return the most room that any worker of a role has for a part; less than 1: none."""
        listed = self._open.get((role, part))
        return _NONE if listed is None else listed.most()

    def has_room(self, entry: WorkerEntry, part: Part, needs: Needs) -> bool:
        """Whether one worker has room for these needs."""
        room = self._room(entry, part)
        return room is not None and room.holds(part, needs)

    def _enter(self, entry: WorkerEntry) -> list[tuple[_Open, _Room]]:
        role, entered = entry.registration.role, []
        for part in _PARTS[role]:
            room = self._room(entry, part)
            if room is None:
                continue
            listed = self._open.get((role, part))
            if listed is None:
                listed = self._open[role, part] = _Open(part)
            listed.add(room)
            entered.append((listed, room))
        return entered

    def _room(self, entry: WorkerEntry, part: Part) -> _Room | None:
        """Return what a worker has room for; None where it takes nothing at all."""
        pool = self._pools[entry.registration.pool]
        free = entry.num_blocks_free * entry.registration.block_size
        ahead = entry.run_ahead_tokens
        prefill = min(free, self._run_ahead_tokens - ahead) if ahead > 0 else free
        report = entry.report
        is_shut = entry.health is not Health.ALIVE or report.is_draining
        is_shut |= is_closed(pool.batching, num_running=report.num_running)
        has_slot = part is Part.PREFILL or entry.num_slots_used < pool.num_batch_slots
        is_computing = part is not Part.DECODE
        if is_shut or free < 1 or not has_slot or (is_computing and prefill < 1):
            return None
        cost_s = 0.0
        if is_computing:
            cost_s += self._costs.prefill_s(entry, _MIDDLING_TOKENS)
        if part is not Part.PREFILL:
            cost_s += self._costs.decode_s(entry, self._costs.expected_output_tokens)
        return _Room(entry, prefill, free, (cost_s, entry.last_granted, entry.worker_id))


def _cost(room: _Room) -> _Key:
    return room.cost


def _has_grown(old: Sequence[tuple[_Open, _Room]], new: Sequence[tuple[_Open, _Room]]) -> bool:
    before = {id(listed): room for listed, room in old}
    for listed, room in new:
        known = before.get(id(listed))
        if known is None or room.prefill > known.prefill or room.decode > known.decode:
            return True
    return False
