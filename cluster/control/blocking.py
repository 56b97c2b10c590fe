"""The wants that have no room during one walk of the queue, and what they hold.

A want without room is passed by those behind it that have some, but by none that arrived more than
the aging bound after it, or after an export: against these it holds the workers that it lacks room
on. One of the same kind needs one of them in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.control.facts import Want
from cluster.control.needs import Needs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

    from cluster.control.placement import Placement
    from cluster.control.waiting import Waiting, WaitingQueue
    from cluster.policy.queue import Head

_NEVER = float("inf")


@dataclass(slots=True)
class _Hold:
    """What a want lacks is not for those that arrived after ``until``."""

    until: float
    want: Want
    needs: Needs
    worker_ids: frozenset[str] | None = None
    """Found out when somebody asks."""


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
        self._bounds = {
            kind: placement.bounds(sample, kind, may_fall_back=may_fall_back)
            for kind, sample in queue.samples.items()
        }

    def is_hopeless(self) -> bool:
        """Whether a walk would change nothing: all have routes, and nobody has room on them."""
        if self._queue.num_special or self._queue.routeless:
            return False
        for kind, bounds in self._bounds.items():
            smallest = self._queue.smallest(kind)
            if bounds is None or bounds.admit(smallest.prefill_tokens, smallest.decode_tokens):
                return False
        return True

    def admits(self, group: Hashable) -> bool:
        """Whether some worker may have room for a group's wants; the special ones have a say."""
        assert isinstance(group, tuple), "as NeedsRule makes them"
        if len(group) != 3 or self._queue.routeless:
            return True
        kind, prefill_tokens, decode_tokens = group
        bounds = self._bounds.get(kind)
        return bounds is None or bounds.admit(prefill_tokens, decode_tokens)

    def sift(
        self, heads: Sequence[Head], first_of: Callable[[Hashable], Waiting]
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
                self.add(first.want, first.needs, self._queue.passable_until(first))

    def look_again(self) -> None:
        """Take in that room has been given away."""
        for kind, bounds in self._bounds.items():
            sample = self._queue.samples.get(kind)
            if bounds is not None and sample is not None:
                again = self._placement.bounds(sample, kind, may_fall_back=self.may_fall_back)
                self._bounds[kind] = again
        for kind in self._bounds.keys() - self._queue.samples.keys():
            del self._bounds[kind]

    def add(self, want: Want, needs: Needs, until: float) -> None:
        """Note that a want has no room, and up to which arrival others may pass it."""
        kind = self._kinds.setdefault(needs.rivals, _Kind())
        kind.until = min(kind.until, until)
        # Whoever lacks at least as much, and stops no fewer, does it for both.
        if not any(hold.until <= until and needs.covers(hold.needs) for hold in kind.holds):
            kind.holds.append(_Hold(until, want, needs))

    def stops(self, waiting: Waiting) -> bool:
        """Whether it has no room, or one of its own kind may not be passed by it."""
        if not self.admits(waiting.group):
            self.add(waiting.want, waiting.needs, self._queue.passable_until(waiting))
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
                    if arrived > hold.until:
                        held |= self._workers(hold)
        return held

    def _workers(self, hold: _Hold) -> frozenset[str]:
        if hold.worker_ids is None:
            hold.worker_ids = self._placement.lacking(
                hold.want, hold.needs, may_fall_back=self.may_fall_back
            )
        return hold.worker_ids
