"""Who gives up its blocks, and perhaps its slot, when another may take them.

Low tiers give way before high ones, and in a tier the youngest first, by when their routers took
them. To one that runs and must grow those that wait with imported KV give before those that run in
their tier, and those who have aged last, whatever their tier; to higher tiers these give nothing.
One that has been preempted ``max_preemptions`` times holds all the blocks it may ever need when it
runs again, and is left alone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.engine.sequence import SequenceState
from cluster.kv.block_pool import BlockPool
from cluster.policy.order import Ordering
from cluster.request import LegKey

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from cluster.engine.rules import Rules
    from cluster.engine.sequence import Sequence

    Giver = Callable[[Sequence, Iterable[Sequence], float], Sequence | None]
    """Chooses who gives its blocks, now, to one that runs and must grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Who would give way to higher tiers, as the control plane is told."""

    giving: tuple[tuple[int, LegKey], ...] = ()
    """(tier, key) of those whose blocks a higher tier may take."""
    firm: frozenset[LegKey] = field(default_factory=frozenset)
    """Those that keep what they have, or go before all who come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Victims:
    """Chooses among the live sequences of an engine."""

    pool: BlockPool
    max_preemptions: int
    ordering: Ordering
    takes_from_below: bool
    """Whether higher tiers take slots and blocks of lower ones."""

    @classmethod
    def of(cls, pool: BlockPool, rules: Rules) -> Victims:
        """Return how they are chosen by an engine's rules."""
        return cls(
            pool=pool,
            max_preemptions=rules.max_preemptions if rules.preempts else 0,
            ordering=rules.ordering,
            takes_from_below=rules.takes_from_below,
        )

    def junior_to(
        self, sequence: Sequence, live: Iterable[Sequence], now: float
    ) -> Sequence | None:
        """Return who gives its blocks to ``sequence``, which runs and must grow; None: nobody.

        Those who have aged do it last.
        """
        own = _giving(sequence)
        return self._first_to_give((s for s in self._holders(live) if _giving(s) > own), now)

    def without_slot(
        self, sequence: Sequence, live: Iterable[Sequence], now: float
    ) -> Sequence | None:
        """Return who gives its blocks to ``sequence``, which runs, whatever their tiers, since it
        found no slot to use them in; None: nobody."""
        waiting = (s for s in self._holders(live) if s.state is SequenceState.WAITING)
        return self._first_to_give(waiting, now)

    def below(
        self, tier: int, live: Iterable[Sequence], now: float, *, num_blocks: int, needs_slot: bool
    ) -> list[Sequence]:
        """Return whose blocks, and at least one slot if it ``needs_slot``, make room for what a
        higher ``tier`` lacks; nobody where all of theirs would not be enough.

        Those who have aged keep what they have, as they go before higher tiers in the queue.
        """
        if not self.takes_from_below:
            return []
        lower = [
            other
            for other in self._holders(live)
            if other.tier < tier and not self._has_aged(other, now)
        ]
        if sum(len(other.block_ids) for other in lower) < num_blocks:
            return []
        lower.sort(key=lambda other: (other.tier, -other.arrived, -other.order))
        if needs_slot:
            runs = (other for other in lower if other.state is SequenceState.RUNNING)
            first = next(runs, None)
            if first is None:
                return []
            lower.remove(first)
            lower.insert(0, first)
        elif num_blocks <= 0:
            return []
        num_freed = itertools.accumulate(freed_in_turn(self.pool, (s.key for s in lower)))
        for number, count in enumerate(num_freed, start=1):
            if count >= num_blocks:
                return lower[:number]
        return []

    def holdings(self, live: Collection[Sequence], now: float) -> Holdings:
        """Return who would give way; nobody where tiers take nothing from one another."""
        if not self.takes_from_below:
            return Holdings()
        firm = frozenset(s.key for s in live if self._is_firm(s, now))
        giving = tuple((s.tier, s.key) for s in self._holders(live) if s.key not in firm)
        return Holdings(giving=giving, firm=firm)

    def _is_firm(self, sequence: Sequence, now: float) -> bool:
        """Whether it goes before all who come, or holds what it has since it gave way so often."""
        is_spared = sequence.num_preemptions >= self.max_preemptions
        return self._has_aged(sequence, now) or (
            is_spared and sequence.state is not SequenceState.WAITING
        )

    def _first_to_give(self, holders: Iterable[Sequence], now: float) -> Sequence | None:
        return max(holders, key=lambda s: (not self._has_aged(s, now), _giving(s)), default=None)

    def _has_aged(self, sequence: Sequence, now: float) -> bool:
        return self.ordering.has_aged(sequence.arrived, now)

    def _holders(self, live: Iterable[Sequence]) -> list[Sequence]:
        return [
            other
            for other in live
            if other.block_ids and other.num_preemptions < self.max_preemptions
        ]


def freed_in_turn(pool: BlockPool, keys: Iterable[LegKey]) -> Iterator[int]:
    """Iterate over how many blocks become free as each of these lets go of its own, in turn.

    What others share with them stays with those. Whoever wants it as of one instant holds the
    pool's lock.
    """
    num_letting_go: Counter[int] = Counter()
    for key in keys:
        num_own, shared = pool.shares_of(key)
        num_letting_go.update(shared.keys())
        yield num_own + sum(num_letting_go[block_id] == n for block_id, n in shared.items())


def _giving(sequence: Sequence) -> tuple[int, bool, float, int]:
    is_waiting = sequence.state is SequenceState.WAITING
    return (-sequence.tier, is_waiting, sequence.arrived, sequence.order)
