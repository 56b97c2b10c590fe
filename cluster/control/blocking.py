"""The wants that have no room during one walk of the queue, and what they hold.

A want without room is passed by those behind it that have some, but by none that arrived more than
the aging bound after it: against these it holds the workers that it lacks room on. An export holds
them against all, but those of higher tiers that take from its own, and is stopped by exports only:
placing it frees what others need. One of the same kind needs one of them in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.control.facts import Want
from cluster.control.needs import Kind, Needs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator

    from cluster.control.open_workers import Openings
    from cluster.control.placement import Placement
    from cluster.control.waiting import Waiting, WaitingQueue
    from cluster.policy.lines import Head

_NEVER = float("inf")


@dataclass(slots=True)
class _Hold:
    """What a want lacks is not for those that arrived after ``until``."""

    until: float
    until_above: float
    """The same for those of higher tiers, where tiers take from one another."""
    want: Want
    needs: Needs
    worker_ids: frozenset[str] | None = None
    """Found out when somebody asks."""

    def stops(self, waiting: Waiting) -> bool:
        if waiting.want.export is not None and self.want.export is None:
            return False
        is_above = waiting.needs.tier > self.needs.tier
        return waiting.ticket.arrived > (self.until_above if is_above else self.until)


@dataclass(slots=True)
class _Kind:
    until: float = _NEVER
    """The earliest of its holds."""
    holds: list[_Hold] = field(default_factory=list)


class BlockedWants:
    """Grows with the walk, and spares it all the wants that no worker has room for."""

    def __init__(self, queue: WaitingQueue, placement: Placement, *, may_fall_back: bool) -> None:
        self.may_fall_back = may_fall_back
        self._queue = queue
        self._placement = placement
        self._kinds: dict[Hashable, _Kind] = {}

    def is_hopeless(self) -> bool:
        """Whether a walk would change nothing: all have routes, and nobody has room on them."""
        if self._queue.num_special or self._queue.routeless:
            return False
        shut: list[Openings] = []
        for kind, sample in self._queue.samples.items():
            openings = self._placement.openings(sample, kind, may_fall_back=self.may_fall_back)
            if openings is None:
                return False
            if openings in shut:
                continue
            if not openings.admit_any():
                shut.append(openings)
            elif openings.admit(kind.tier, *self._queue.smallest(kind)):
                return False
        return True

    def admits(self, group: Hashable) -> bool:
        """Whether some worker may have room for a group's wants; the special ones have a say."""
        assert isinstance(group, tuple), "as NeedsRule makes them"
        if len(group) != 3 or self._queue.routeless:
            return True
        kind, prefill_tokens, decode_tokens = group
        assert isinstance(kind, Kind), "as NeedsRule makes them"
        sample = self._queue.samples.get(kind)
        if sample is None:
            return True
        openings = self._placement.openings(sample, kind, may_fall_back=self.may_fall_back)
        return openings is None or openings.admit(kind.tier, prefill_tokens, decode_tokens)

    def sift(
        self, heads: Iterable[Head], first_of: Callable[[Hashable], Waiting]
    ) -> Iterator[Head]:
        """Leave out the groups that no worker has room for; they hold what they lack."""
        # Among rivals the first one stops the most, and others hold nothing more.
        are_all_rivals = len(set(self._queue.rivals.values())) == 1 and not self._queue.num_special
        has_first = False
        for head in heads:
            if self.admits(head[2]):
                yield head
            elif not has_first or not are_all_rivals:
                has_first = True
                first = first_of(head[2])
                self.add(first, first.want)

    def look_again(self) -> None:
        """Take in that room has been given away."""
        self._placement.refresh()

    def add(self, waiting: Waiting, want: Want) -> None:
        """Note that one has no room; ``want`` is how it is placed now."""
        needs, until = waiting.needs, self._queue.passable_until(waiting)
        kind = self._kinds.setdefault(needs.rivals, _Kind())
        kind.until = min(kind.until, until)
        # Whoever lacks at least as much, and stops no fewer, does it for both.
        if not any(hold.until <= until and needs.covers(hold.needs) for hold in kind.holds):
            above = self._queue.passable_until(waiting, from_above=True)
            kind.holds.append(_Hold(until, above, want, needs))

    def stops(self, waiting: Waiting) -> bool:
        """Whether it has no room, or one of its own kind may not be passed by it."""
        if not self.admits(waiting.group):
            self.add(waiting, waiting.want)
            return True
        kind = self._kinds.get(waiting.needs.rivals)
        return kind is not None and waiting.ticket.arrived > kind.until

    def stops_group(self, waiting: Waiting) -> bool:
        """Whether the rest of its group is stopped with it."""
        return self._queue.is_by_arrival or not self.admits(waiting.group)

    def held_from(self, waiting: Waiting) -> Collection[str]:
        """Return the workers that it must leave to wants of other kinds."""
        arrived, own = waiting.ticket.arrived, waiting.needs.rivals
        held: set[str] = set()
        for name, kind in self._kinds.items():
            if name != own and arrived > kind.until:
                for hold in kind.holds:
                    if hold.stops(waiting):
                        held |= self._workers(hold)
        return held

    def _workers(self, hold: _Hold) -> frozenset[str]:
        if hold.worker_ids is None:
            hold.worker_ids = self._placement.lacking(
                hold.want, hold.needs, may_fall_back=self.may_fall_back
            )
        return hold.worker_ids
