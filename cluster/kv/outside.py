"""Blocks held outside an engine that a higher tier may have, and who is asked to give them up.

    outbox, inbox ──enter, leave──▶ ``Outside`` ◀──below, ask── step scheduler
                  ◀─────asked──────

The scheduler chooses, since it knows who lacks what. An entry is what it goes by, and no promise:
whoever entered it looks again when it is asked, on its own thread, and has left by then or gives
up its blocks. So an engine's victims give way within a step, and these a moment later; that long
nobody below the one that asks gets blocks instead of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one of a higher tier lacks, and may have from those of lower ones."""

    num_blocks: int
    tier: int
    is_import: bool = False
    """Whether an import lacks it, which asks no more once it has its blocks."""
    shares: frozenset[int] = frozenset()
    """Blocks of others that it will hold too: it gains nothing where these let go of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outsider:
    """One that holds blocks outside the engine, and gives them up when it is asked to."""

    holder: tuple[str, str]
    """As the pool names it; of a reservation ``("import", handoff_id)``."""
    tier: int
    arrived: float
    """When its router took it: in a tier the youngest gives first."""
    num_preemptions: int
    order: int = 0
    """For ties of ``arrived``."""
    num_importing: int = 0
    """Blocks of its reservation; what a holder has, the pool knows."""


class Outside:
    """Those of one pool that could be asked; any thread."""

    def __init__(self, lock: threading.RLock, tell: Callable[[], None]) -> None:
        """``lock`` is the pool's; ``tell`` wakes its subscribers."""
        self._lock = lock
        self._tell = tell
        self._entries: dict[tuple[str, str], Outsider] = {}
        self._asked: frozenset[tuple[str, str]] = frozenset()
        self._demand: Demand | None = None
        self.has_takers = False
        """Whether anybody is ever asked: else nobody enters. The engine says so at its start."""

    def enter(self, outsider: Outsider) -> None:
        """Let it be asked from now on; somebody may have waited for it."""
        if self.has_takers:
            with self._lock:
                self._entries[outsider.holder] = outsider
            self._tell()

    def leave(self, holder: tuple[str, str]) -> None:
        """Let it be asked no more; nothing happens where it is not here."""
        with self._lock:
            was_asked = self._entries.pop(holder, None) is not None and holder in self._asked
        if was_asked:
            self._tell()

    def below(self, tier: int) -> list[Outsider]:
        """Return all of lower tiers."""
        with self._lock:
            return [entry for entry in self._entries.values() if entry.tier < tier]

    def ask(self, holders: Collection[tuple[str, str]], demand: Demand | None) -> None:
        """Ask these to give up their blocks; replaces the last call.

        ``demand``: how many blocks have to be free for whom they are asked. If one has left
        since it was chosen, the subscribers are told too: another is to be chosen.
        """
        with self._lock:
            asked = frozenset(holders)
            is_new = (asked, demand) != (self._asked, self._demand)
            self._asked, self._demand = asked, demand
            has_left = not asked <= self._entries.keys()
        if is_new or has_left:
            self._tell()

    def import_served(self) -> None:
        """Keep free blocks from nobody any more for an import: it has them."""
        with self._lock:
            if self._demand is not None and self._demand.is_import:
                self._demand = None

    def asked(self) -> list[tuple[str, str]]:
        """Return who is asked, and has not left."""
        with self._lock:
            return [holder for holder in self._asked if holder in self._entries]

    def kept_from(self, tier: int) -> int:
        """Return how many free blocks those of a tier have to leave, for whom others are asked."""
        demand = self._demand
        return demand.num_blocks if demand is not None and tier < demand.tier else 0
