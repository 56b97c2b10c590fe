"""Handoffs that are over on a decode worker, known for a while: a late other half is answered."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.handoff import AbortCause

MAX_REMEMBERED = 4096
REMEMBERED_S = 60.0
"""How long a handoff that is over is known."""


class PastHandoffs:
    """What a late offer, or a late leg, is told; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._over: OrderedDict[str, tuple[AbortCause, float]] = OrderedDict()

    def __len__(self) -> int:
        """Return how many are known."""
        return len(self._over)

    def cause(self, handoff_id: str) -> AbortCause | None:
        """Return why the handoff is over; None where it is not known to be."""
        over = self._over.get(handoff_id)
        return over[0] if over is not None else None

    def remember(self, handoff_id: str, cause: AbortCause, now: float) -> None:
        """Note that it is over, or over again: it is the last one to be forgotten then."""
        self._over[handoff_id] = (cause, now + REMEMBERED_S)
        self._over.move_to_end(handoff_id)
        while len(self._over) > MAX_REMEMBERED:
            self._over.popitem(last=False)

    def forget(self, now: float) -> None:
        """Drop those whose time is over."""
        while self._over and next(iter(self._over.values()))[1] <= now:
            self._over.popitem(last=False)
