"""The workers that could take something now, the cheapest first, kept up to date.

Placing looks at a few of each list, however many workers there are. A list's order is by what its
workers would cost a middling request: whoever is chosen among the first few is priced exactly.
The lists are in ``open_workers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.config import Role
from cluster.control.facts import Health
from cluster.control.needs import takes_from_below
from cluster.control.open_workers import NOTHING, Most, Openings, OpenWorkers, Part, Room
from cluster.policy.batching import is_closed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

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


_Rooms = Sequence[tuple[OpenWorkers, Room]]
"""Of one worker, and where it is listed."""
_NO_ROOM: _Rooms = []


class Fleet:
    """Lists of open workers, by role and part. An open one may have room for somebody."""

    def __init__(
        self, config: DeployConfig, ledger: Ledger, costs: CostModel, most_tokens: int
    ) -> None:
        """``most_tokens``: nobody needs more of a worker."""
        self._most_tokens = most_tokens
        self._run_ahead_tokens = config.scheduling.run_ahead_tokens
        num_tiers = len(config.scheduling.tiers)
        self._num_tiers = num_tiers if takes_from_below(config) else 1
        self._num_tiers_of: Mapping[str, int] = {
            pool.name: num_tiers if takes_from_below(config, pool) else 1 for pool in config.pools
        }
        """1 where none takes from lower ones."""
        self._num_slots_of = {pool.name: pool.num_batch_slots for pool in config.pools}
        self._closing = {p.name for p in config.pools if is_closed(p.batching, num_running=1)}
        """Pools whose workers take nobody while their batch runs."""
        self._ledger = ledger
        self._costs = costs
        self._open: dict[tuple[Role, Part], OpenWorkers] = {}
        self._rooms: dict[str, _Rooms] = {}
        self._has_grown = False

    def refresh(self) -> None:
        """Take in what has changed in the ledger."""
        changed = self._ledger.changed
        while changed:
            worker_id = changed.pop()
            entry = self._ledger.workers.get(worker_id)
            self._costs.learn_speeds(worker_id, entry)
            old = self._rooms.pop(worker_id, _NO_ROOM)
            new = _NO_ROOM if entry is None else self._rooms_of(entry)
            if new:
                self._rooms[worker_id] = new
            if new != old:
                self._list(old, new)

    def _list(self, old: _Rooms, new: _Rooms) -> None:
        for listed, room in old:
            listed.remove(room)
        for listed, room in new:
            listed.add(room)
        self._has_grown = self._has_grown or _has_grown(old, new)

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

    def openings(
        self, prefill: Role | None, decode: Role | None, local: Iterable[Role]
    ) -> Openings:
        """Return the lists of those that may prefill, decode, or do both.

        Whoever needs no decode worker has None there.
        """
        return Openings(
            None if prefill is None else self._lists_of(prefill, Part.PREFILL),
            None if decode is None else self._lists_of(decode, Part.DECODE),
            tuple([self._lists_of(role, Part.LOCAL) for role in local]),
        )

    def has_room(self, entry: WorkerEntry, part: Part, needs: Needs) -> bool:
        """Whether one worker had room for these needs at the last ``refresh``."""
        listed = self._open.get((entry.registration.role, part))
        for where, room in self._rooms.get(entry.worker_id, _NO_ROOM):
            if where is listed and room.tier <= needs.tier and room.most.holds(needs):
                return True
        return False

    def _rooms_of(self, entry: WorkerEntry) -> _Rooms:
        by_tier = () if self._is_shut(entry) else self._room_by_tier(entry)
        if not by_tier:
            return _NO_ROOM
        rooms, costs, below = [], self._costs_by_part(entry), dict[Part, Most]()
        for tier, (both, parts) in enumerate(by_tier):
            for part in parts:
                most, less = part.of(both), below.get(part, NOTHING)
                if most.exceeds(less):
                    below[part] = most
                    key = (costs[part], entry.last_granted, entry.worker_id)
                    listed = self._lists_of(entry.registration.role, part)
                    rooms.append((listed, Room(*key, tier, most, less, entry)))
        return rooms

    def _room_by_tier(self, entry: WorkerEntry) -> list[tuple[Most, Sequence[Part]]]:
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
        return [(most, parts), *[self._room(entry, t) for t in higher], top] if top[1] else []

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
        is_running = entry.report.num_running > 0
        return is_running and entry.registration.pool in self._closing

    def _room(self, entry: WorkerEntry, taken: Taken) -> tuple[Most, Sequence[Part]]:
        """Return what a worker has room for, with so much taken, and for which parts it has any."""
        registration = entry.registration
        free = (registration.num_blocks - taken.blocks) * registration.block_size
        ahead = taken.run_ahead_tokens
        prefill = min(free, self._run_ahead_tokens - ahead) if ahead > 0 else free
        has_slot = taken.slots < self._num_slots_of[registration.pool]
        parts = _PARTS[registration.role, prefill >= 1, has_slot and free >= 1]
        return Most(prefill, free), parts

    def _costs_by_part(self, entry: WorkerEntry) -> Mapping[Part, float]:
        prefill_s = self._costs.prefill_s(entry, _MIDDLING_TOKENS)
        if entry.registration.role is Role.PREFILL:
            return {Part.PREFILL: prefill_s}
        decode_s = self._costs.decode_s(entry, self._costs.expected_output_tokens)
        return {Part.PREFILL: prefill_s, Part.DECODE: decode_s, Part.LOCAL: prefill_s + decode_s}


def _has_grown(old: _Rooms, new: _Rooms) -> bool:
    before = {(listed, room.tier): room.most for listed, room in old}
    return any(room.most.exceeds(before.get((listed, room.tier), NOTHING)) for listed, room in new)
