"""The wants that have no room during one walk of the queue, and whom they stop.

A want without room is passed by those behind it that have some, with two exceptions: none that
arrived more than the aging bound after it takes a worker that it lacks room on, and none at all
where an export waits, which holds blocks that others need. What cannot have room either, for it
needs no less than one that has none, is not even tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.control.facts import Want
from cluster.control.needs import Needs

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

    from cluster.control.placement import Placement
    from cluster.control.waiting import Waiting, WaitingQueue


@dataclass(slots=True)
class _Hold:
    """The workers that a want lacks room on are not for those that arrived after ``until``."""

    until: float
    want: Want
    needs: Needs
    worker_ids: frozenset[str] | None = None
    """Found out when somebody asks."""


class BlockedWants:
    """Grows with the walk."""

    def __init__(self, queue: WaitingQueue, placement: Placement, *, may_fall_back: bool) -> None:
        self.may_fall_back = may_fall_back
        self._queue = queue
        self._placement = placement
        self._holds: list[_Hold] = []
        self._frontier: list[Needs] = []
        self._full_kinds: set[Hashable] = set()

    def stops(self, waiting: Waiting) -> bool:
        """Whether it has no room because one that needs no more had none."""
        needs = waiting.needs
        return needs.kind in self._full_kinds or any(n.covers(needs) for n in self._frontier)

    def held_from(self, waiting: Waiting) -> Collection[str]:
        """Return the workers that it must leave to others."""
        holds = [hold for hold in self._holds if waiting.ticket.arrived > hold.until]
        if not holds:
            return ()
        return frozenset().union(*(self._workers(hold) for hold in holds))

    def add(self, waiting: Waiting, want: Want, held: Collection[str]) -> bool:
        """Note that it has no room, ``want`` being what was tried; whether nobody has any."""
        until, needs = self._queue.passable_until(waiting), waiting.needs
        # Whoever lacks room for less, and stops no fewer, stops them already.
        if not any(hold.until <= until and needs.covers(hold.needs) for hold in self._holds):
            self._holds.append(_Hold(until, want, needs))
        if held or want.avoid or want.export is not None:
            # Others may have room where this one may not go.
            return False
        smallest = self._queue.smallest(needs.kind)
        if smallest == needs or not self._placement.has_room(
            want, smallest, may_fall_back=self.may_fall_back
        ):
            self._full_kinds.add(needs.kind)
            return self._full_kinds >= self._queue.kinds
        self._frontier = [n for n in self._frontier if not needs.covers(n)]
        self._frontier.append(needs)
        return False

    def _workers(self, hold: _Hold) -> frozenset[str]:
        if hold.worker_ids is None:
            hold.worker_ids = self._placement.lacking(
                hold.want, hold.needs, may_fall_back=self.may_fall_back
            )
        return hold.worker_ids
