"""Who waits for blocks on a decode worker: in which order, and for how long.

Offers of exports that waited elsewhere go first, then the others; each of the two first come,
first served, and nobody passes one that does not fit yet. Nobody waits for longer than a short
patience, though: a refused export waits where its KV is, so that no decode memory is kept for it,
and the prefill worker knows where it stands.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.handoff import Offer
from cluster.rpc.legs import OpenLeg
from cluster.rpc.link import Link
from decode_worker.landing import Landing

if TYPE_CHECKING:
    from cluster.handoff import Handoff, HandoffState


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

    @property
    def handoff(self) -> Handoff | None:
        """The handoff, once it was offered."""
        return self.landing.handoff if self.landing is not None else None

    @property
    def state(self) -> HandoffState | None:
        """Where it stands; None before its offer."""
        return self.handoff.state if self.handoff is not None else None


class WaitingImports:
    """The line of those that wait for blocks."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self._redirected: OrderedDict[str, Import] = OrderedDict()
        self._fresh: OrderedDict[str, Import] = OrderedDict()

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._redirected) + len(self._fresh)

    def add(self, entry: Import, now: float) -> None:
        """Put one at the end of its line."""
        assert entry.offer is not None, "joined before it waits"
        entry.waits_since = now
        line = self._redirected if entry.offer.is_redirected else self._fresh
        line[entry.handoff_id] = entry

    def remove(self, entry: Import) -> bool:
        """Take one out of its line; whether it was there."""
        line = self._redirected if entry.handoff_id in self._redirected else self._fresh
        return line.pop(entry.handoff_id, None) is not None

    def first(self) -> Import | None:
        """Return whose turn it is; None where nobody waits."""
        line = self._redirected or self._fresh
        return next(iter(line.values()), None)

    def overdue(self, now: float) -> Import | None:
        """Return one that has waited for longer than the patience, the longest first."""
        heads = [next(iter(line.values())) for line in (self._redirected, self._fresh) if line]
        oldest = min(heads, key=lambda entry: entry.waits_since, default=None)
        if oldest is None or now < oldest.waits_since + self.patience_s:
            return None
        return oldest
