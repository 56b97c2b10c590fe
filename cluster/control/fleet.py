"""The workers that could take something now, the cheapest first, kept up to date.

Placing looks at a few of each list, however many workers there are. A list's order is by what its
workers would cost a middling request: whoever is chosen among the first few is priced exactly.
The lists are in ``open_workers``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.config import Role
from cluster.control.facts import Health
from cluster.control.needs import takes_from_below
from cluster.control.open_workers import (
    NOTHING,
    UNBOUNDED,
    Key,
    OpenWorkers,
    Part,
    Room,
    exceeds,
    holds,
    most_of,
)
from cluster.control.unplaced import Bounds, Most
from cluster.policy.batching import is_closed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cluster.config import DeployConfig
    from cluster.control.costs import CostModel
    from cluster.control.ledger import Ledger
    from cluster.control.needs import Needs
    from cluster.control.worker_entry import Taken, WorkerEntry

_MIDDLING_TOKENS = 256
"""Of prompt, for the order of the lists."""

_ALL_PARTS = {
    Role.PREFILL: (Part.PREFILL,),
    Role.DECODE: (Part.DECODE, Part.LOCAL),
    Role.MIXED: (Part.PREFILL, Part.DECODE, Part.LOCAL),
}
_PARTS = {
    (role, can_prefill, can_decode): tuple(
        part
        for part in parts
        if (can_prefill or part is Part.DECODE) and (can_decode or part is Part.PREFILL)
    )
    for role, parts in _ALL_PARTS.items()
    for can_prefill in (False, True)
    for can_decode in (False, True)
}
"""What a worker of a role does while it has room for a prompt, and for a sequence that decodes."""

_Rooms = list[tuple[OpenWorkers, Room]]


class Fleet:
    """Lists of open workers, by role and part. An open one may have room for somebody."""

    def __init__(
        self, config: DeployConfig, ledger: Ledger, costs: CostModel, most_tokens: int
    ) -> None:
        """``most_tokens``: nobody needs more of a worker."""
        self._most_tokens = most_tokens
        self._pools = {pool.name: pool for pool in config.pools}
        self._run_ahead_tokens = config.scheduling.run_ahead_tokens
        num_tiers = len(config.scheduling.tiers)
        self._num_tiers = num_tiers if takes_from_below(config) else 1
        self._num_tiers_of: Mapping[str, int] = {
            pool.name: num_tiers if takes_from_below(config, pool) else 1 for pool in config.pools
        }
        """1 where none takes from lower ones."""
        self._ledger = ledger
        self._costs = costs
        self._open: dict[tuple[Role, Part], OpenWorkers] = {}
        self._nobody = [NOTHING for _ in range(self._num_tiers)]
        self._unbounded = [UNBOUNDED for _ in range(self._num_tiers)]
        self._rooms: dict[str, _Rooms] = {}
        self._has_grown = False

    def refresh(self) -> None:
        """Take in what has changed in the ledger."""
        changed = self._ledger.changed
        while changed:
            worker_id = changed.pop()
            old = self._rooms.pop(worker_id, [])
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
        """Iterate over the workers of a role that have room for these needs, cheapest first.

        After those with room for everybody come those where lower tiers would give way.
        """
        listed = self._open.get((role, part))
        return iter(()) if listed is None else listed.with_room(needs)

    def bounds(self, prefill: Role | None, decode: Role | None, local: Sequence[Role]) -> Bounds:
        """Return the most room that those that may prefill, decode, or do both have now.

        No tier has less than those below it. Whoever needs no decode worker has None there.
        """
        decodes = self._unbounded if decode is None else self._mosts(decode, Part.DECODE)
        locals_ = self._mosts(local[0] if local else None, Part.LOCAL)
        if len(local) > 1:
            each = (self._mosts(role, Part.LOCAL) for role in local)
            locals_ = [most_of(rooms) for rooms in zip(*each, strict=True)]
        return Bounds.of(self._mosts(prefill, Part.PREFILL), decodes, locals_)

    def _mosts(self, role: Role | None, part: Part) -> list[Most]:
        listed = None if role is None else self._open.get((role, part))
        return self._nobody if listed is None else listed.mosts()

    def has_room(self, entry: WorkerEntry, part: Part, needs: Needs) -> bool:
        """Whether one worker had room for these needs at the last ``refresh``."""
        return any(
            room.part is part and room.tier <= needs.tier and holds(room.most, part, needs)
            for _, room in self._rooms.get(entry.worker_id, ())
        )

    def _enter(self, entry: WorkerEntry) -> _Rooms:
        entered: _Rooms = []
        rooms = [] if self._is_shut(entry) else self._rooms_by_tier(entry)
        keys = self._keys(entry) if rooms else {}
        below: dict[Part, Most] = {}
        for tier, (most, parts) in enumerate(rooms):
            for part in parts:
                less = below.get(part)
                if exceeds(most, less):
                    below[part] = most
                    room = Room(entry, part, most, keys[part], tier, less)
                    listed = self._lists_of(entry.registration.role, part)
                    listed.add(room)
                    entered.append((listed, room))
        return entered

    def _rooms_by_tier(self, entry: WorkerEntry) -> list[tuple[Most, Sequence[Part]]]:
        """Return its room for each tier, up to one for which it has room for all there is."""
        registration = entry.registration
        (taken,) = entry.taken(1)
        most, parts = self._room(entry, taken)
        num_tiers = self._num_tiers_of[registration.pool]
        is_for_all = parts == _ALL_PARTS[registration.role] and self._is_ample(most)
        if num_tiers == 1 or is_for_all:
            return [(most, parts)] if parts else []
        higher = entry.taken(num_tiers)[1:]
        top = self._room(entry, higher.pop())
        # Whoever is full for the highest tier, as most are under load, is full for all.
        return [(most, parts), *(self._room(entry, t) for t in higher), top] if top[1] else []

    def _lists_of(self, role: Role, part: Part) -> OpenWorkers:
        listed = self._open.get((role, part))
        if listed is None:
            listed = self._open[role, part] = OpenWorkers(part, self._num_tiers)
        return listed

    def _is_ample(self, most: Most) -> bool:
        return min(most.prefill, most.decode) >= self._most_tokens

    def _is_shut(self, entry: WorkerEntry) -> bool:
        """Whether it takes nothing at all."""
        if entry.health is not Health.ALIVE or entry.report.is_draining:
            return True
        batching = self._pools[entry.registration.pool].batching
        return is_closed(batching, num_running=entry.report.num_running)

    def _room(self, entry: WorkerEntry, taken: Taken) -> tuple[Most, Sequence[Part]]:
        """Return what a worker has room for, with so much taken, and for which parts it has any."""
        registration = entry.registration
        free = (registration.num_blocks - taken.blocks) * registration.block_size
        ahead = taken.run_ahead_tokens
        prefill = min(free, self._run_ahead_tokens - ahead) if ahead > 0 else free
        has_slot = taken.slots < self._pools[registration.pool].num_batch_slots
        parts = _PARTS[registration.role, prefill >= 1, has_slot and free >= 1]
        return Most(prefill, free), parts

    def _keys(self, entry: WorkerEntry) -> dict[Part, Key]:
        tie = (entry.last_granted, entry.worker_id)
        prefill_s = self._costs.prefill_s(entry, _MIDDLING_TOKENS)
        if entry.registration.role is Role.PREFILL:
            return {Part.PREFILL: (prefill_s, *tie)}
        decode_s = self._costs.decode_s(entry, self._costs.expected_output_tokens)
        return {
            Part.PREFILL: (prefill_s, *tie),
            Part.DECODE: (decode_s, *tie),
            Part.LOCAL: (prefill_s + decode_s, *tie),
        }


def _has_grown(old: _Rooms, new: _Rooms) -> bool:
    before = {(id(listed), room.tier): room.most for listed, room in old}
    return any(exceeds(room.most, before.get((id(listed), room.tier))) for listed, room in new)
