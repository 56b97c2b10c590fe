"""Legs that their router gave up and that were not there: each may still come, and is not taken."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.request import LegKey

MAX_REMEMBERED = 4096
REMEMBERED_S = 60.0
"""How long a start may be on its way behind its abort."""


class GivenUpLegs:
    """Which legs, by key and grant, are not to be taken; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._until: OrderedDict[tuple[LegKey, str], float] = OrderedDict()

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._until)

    def add(self, key: LegKey, grant_id: str, now: float) -> None:
        """Remember a leg from now on."""
        self._forget(now)
        self._until[key, grant_id] = now + REMEMBERED_S
        self._until.move_to_end((key, grant_id))
        if len(self._until) > MAX_REMEMBERED:
            self._until.popitem(last=False)

    def has(self, key: LegKey, grant_id: str, now: float) -> bool:
        """Whether the leg was given up before it came."""
        self._forget(now)
        return (key, grant_id) in self._until

    def _forget(self, now: float) -> None:
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
