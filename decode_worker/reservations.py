"""Who waits for blocks on a decode worker: in which order, and for how long.

Higher tiers go first, where tiers take from one another, and whoever has aged is of the highest.
Within one, offers of exports that waited elsewhere go first, then the others; each of the two first
come, first served, and nobody passes one that does not fit yet. Nobody waits for longer than a
short patience, though: a refused export waits where its KV is, so that no decode memory is kept for
it, and the prefill worker knows where it stands.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.handoff import Offer
from cluster.kv.outside import Demand
from cluster.rpc.legs import OpenLeg
from cluster.rpc.link import Link
from decode_worker.landing import Landing

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.handoff import Handoff, HandoffState
    from cluster.kv.layout import KVLayout


@dataclass(slots=True, kw_only=True, eq=False)
class Import:
    """One handoff as its receiver sees it; leg and offer come in either order."""

    handoff_id: str
    arrived: float
    opened: OpenLeg | None = None
    offer: Offer | None = None
    landing: Landing | None = None
    """Set with the offer."""
    link: Link | None = None
    waits_since: float = 0.0
    """When leg and offer were there, so that only blocks were missing."""
    tier: int = 0
    """How high its request stands, where tiers take from one another."""

    @property
    def handoff(self) -> Handoff | None:
        """The handoff, once it was offered."""
        return self.landing.handoff if self.landing is not None else None

    @property
    def state(self) -> HandoffState | None:
        """Where it stands; None before its offer."""
        return self.handoff.state if self.handoff is not None else None

    def num_blocks(self, layout: KVLayout, *, reserves_all: bool) -> int:
        """Return how many blocks it is to reserve, with ``reserves_all`` for all that may come."""
        assert self.opened is not None, "joined before it waits"
        assert self.handoff is not None, "joined before it waits"
        if not reserves_all:
            return self.handoff.num_blocks
        leg = self.opened.leg
        # The last token's KV is never computed.
        num_tokens = len(leg.prompt_ids) + leg.params.max_tokens - 1
        return max(self.handoff.num_blocks, layout.num_blocks_for(num_tokens))

    def demand(self, num_blocks: int) -> Demand:
        """Return what it lacks while there are not so many blocks for it."""
        return Demand(num_blocks=num_blocks, tier=self.tier, is_import=True)


_Line = tuple[int, bool]
"""(how low its tier is, whether it is fresh): the lowest goes first."""


class WaitingImports:
    """The lines of those that wait for blocks."""

    def __init__(self, patience_s: float, tier_of: Callable[[str, float, float], int]) -> None:
        """``tier_of``: (tier's name, arrival, now) to how high a request stands."""
        self.patience_s = patience_s
        self._tier_of = tier_of
        self._lines: dict[_Line, OrderedDict[str, Import]] = {}
        """None of them is empty."""
        self._num_waiting = 0

    def __len__(self) -> int:
        """Return how many wait; any thread may ask."""
        return self._num_waiting

    def add(self, entry: Import, now: float) -> None:
        """Put one at the end of its line."""
        entry.waits_since = now
        entry.tier = self._tier(entry, now)
        self._put(entry)

    def age(self, now: float) -> bool:
        """Move up those who have aged while they wait; whether there were any."""
        waiting = [entry for line in self._lines.values() for entry in line.values()]
        aged = [entry for entry in waiting if self._tier(entry, now) != entry.tier]
        for entry in aged:
            self.remove(entry)
            entry.tier = self._tier(entry, now)
            line = self._put(entry)
            for later in [e for e in line.values() if e.waits_since > entry.waits_since]:
                line.move_to_end(later.handoff_id)
        return bool(aged)

    def remove(self, entry: Import) -> bool:
        """Take one out of its line; whether it was there."""
        if entry.offer is None:
            return False
        name = _line(entry)
        line = self._lines.get(name, OrderedDict())
        was_there = line.pop(entry.handoff_id, None) is not None
        self._num_waiting -= was_there
        if was_there and not line:
            del self._lines[name]
        return was_there

    def first(self) -> Import | None:
        """Return whose turn it is; None where nobody waits."""
        if not self._lines:
            return None
        return next(iter(self._lines[min(self._lines)].values()))

    def overdue(self, now: float) -> Import | None:
        """Return one that has waited for longer than the patience, the longest first."""
        heads = [next(iter(line.values())) for line in self._lines.values()]
        oldest = min(heads, key=lambda entry: entry.waits_since, default=None)
        if oldest is None or now < oldest.waits_since + self.patience_s:
            return None
        return oldest

    def _put(self, entry: Import) -> OrderedDict[str, Import]:
        line = self._lines.setdefault(_line(entry), OrderedDict())
        self._num_waiting += entry.handoff_id not in line
        line[entry.handoff_id] = entry
        return line

    def _tier(self, entry: Import, now: float) -> int:
        assert entry.opened is not None, "joined before it waits"
        return self._tier_of(entry.opened.leg.priority, entry.opened.arrived, now)


def _line(entry: Import) -> _Line:
    assert entry.offer is not None, "joined before it waits"
    return -entry.tier, not entry.offer.is_redirected
