"""Who gives up its blocks, and perhaps its slot, when another may take them.

Low tiers give way before high ones; in a tier those that wait with imported KV before those that
run, and the youngest first. One that has been preempted ``max_preemptions`` times holds all the
blocks it may ever need when it runs again, and is left alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.engine.sequence import SequenceState
from cluster.kv.block_pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cluster.engine.rules import Rules
    from cluster.engine.sequence import Sequence

    Giver = Callable[[Sequence, Iterable[Sequence]], Sequence | None]
    """Chooses who gives its blocks to one that runs and must grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Victims:
    """Chooses among the live sequences of an engine."""

    pool: BlockPool
    max_preemptions: int
    aging_s: float

    @classmethod
    def of(cls, pool: BlockPool, rules: Rules) -> Victims:
        """Return how they are chosen by an engine's rules."""
        return cls(
            pool=pool,
            max_preemptions=rules.max_preemptions if rules.preempts else 0,
            aging_s=rules.ordering.aging_s,
        )

    def junior_to(self, sequence: Sequence, live: Iterable[Sequence]) -> Sequence | None:
        """Return who gives its blocks to ``sequence``, which runs and must grow; None: nobody."""
        junior = max(self._holders(live), key=_giving, default=None)
        return None if junior is None or _giving(junior) <= _giving(sequence) else junior

    def without_slot(self, sequence: Sequence, live: Iterable[Sequence]) -> Sequence | None:
        """Return who gives its blocks to ``sequence``, which runs, whatever their tiers, since it
        found no slot to use them in; None: nobody."""
        holders = self._holders(live)
        waiting = (other for other in holders if other.state is SequenceState.WAITING)
        return max(waiting, key=_giving, default=None)

    def below(
        self, tier: int, live: Iterable[Sequence], now: float, *, num_blocks: int, needs_slot: bool
    ) -> list[Sequence]:
        """Return whose blocks, and at least one slot if it ``needs_slot``, make room for one
        of a higher ``tier``; nobody where all of theirs would not be enough.

        Those who have aged keep what they have, as they go before higher tiers in the queue.
        """
        lower = [
            other
            for other in self._holders(live)
            if other.tier < tier and now < other.arrived + self.aging_s
        ]
        lower.sort(key=lambda other: (other.tier, -other.order))
        if needs_slot:
            runs = (other for other in lower if other.state is SequenceState.RUNNING)
            first = next(runs, None)
            if first is None:
                return []
            lower.remove(first)
            lower.insert(0, first)
        elif num_blocks <= 0:
            return []
        num_letting_go: Counter[int] = Counter()
        num_freed = 0
        for number, other in enumerate(lower, start=1):
            for block_id, num_holders in self.pool.num_holders(other.key).items():
                num_letting_go[block_id] += 1
                # What others share with them stays with those.
                num_freed += num_letting_go[block_id] == num_holders
            if num_freed >= num_blocks:
                return lower[:number]
        return []

    def _holders(self, live: Iterable[Sequence]) -> list[Sequence]:
        return [
            other
            for other in live
            if other.block_ids and other.num_preemptions < self.max_preemptions
        ]


def _giving(sequence: Sequence) -> tuple[int, bool, int]:
    return (-sequence.tier, sequence.state is SequenceState.WAITING, sequence.order)
