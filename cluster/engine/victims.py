"""Who gives up its blocks, and perhaps its slot, when another may take them.

Low tiers give way before high ones, and in a tier the youngest first, by when their routers took
them, whether they are in the engine or hold blocks outside it (``outsiders``). To one that runs and
must grow those that wait with imported KV give before those that run in their tier, and those who
have aged last, whatever their tier; to higher tiers these give nothing.
One whose choice was preempted ``max_preemptions`` times, here and elsewhere, holds all the blocks
it may ever need when it runs again, and is left alone; only where it waits for a slot with them,
and nobody that has one can move, it gives them up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from cluster.engine.outsiders import Outsiders
from cluster.engine.sequence import Sequence, SequenceState
from cluster.kv.block_pool import BlockPool, Holder
from cluster.kv.outside import Demand, Outsider
from cluster.policy.order import Ordering
from cluster.request import LegKey

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from cluster.engine.rules import Rules

    Giver = Callable[[Sequence, Iterable[Sequence], float], Sequence | None]
    """Chooses who gives its blocks, now, to one that runs and must grow."""

_Giving = TypeVar("_Giving", Sequence, Outsider, Sequence | Outsider)


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
    is_spared: Callable[[int], bool]
    """Whether one that was preempted so often gives up nothing more."""
    ordering: Ordering
    takes_from_below: bool
    """Whether higher tiers take slots and blocks of lower ones."""
    outsiders: Outsiders

    @classmethod
    def of(cls, pool: BlockPool, rules: Rules) -> Victims:
        """Return how they are chosen by an engine's rules."""
        return cls(
            pool=pool,
            is_spared=rules.needs_all,
            ordering=rules.ordering,
            takes_from_below=rules.takes_from_below,
            outsiders=Outsiders(pool, rules),
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

    def last_without_slot(
        self, sequence: Sequence, live: Iterable[Sequence], now: float
    ) -> Sequence | None:
        """Return the same also of those who gave way too often, where all who run lack blocks:
        these would wait for slots that wait for them."""
        waiting = (s for s in live if s.block_ids and s.state is SequenceState.WAITING)
        return self._first_to_give(waiting, now)

    def below(
        self, demand: Demand, live: Iterable[Sequence], now: float, *, needs_slot: bool
    ) -> list[Sequence]:
        """Return whose blocks, and at least one slot if it ``needs_slot``, make room for what one
        of a higher tier lacks; nobody where all of theirs would not be enough.

        Nor anybody yet where some are outside the engine: these are asked first, if what was given
        up there already is not enough. Those who have aged keep what they have, as they go before
        higher tiers in the queue.
        """
        if not self.takes_from_below:
            return []
        tier, num_blocks = demand.tier, demand.num_blocks
        needed = replace(demand, num_blocks=self.pool.num_free + num_blocks, shares=frozenset())
        if 0 < num_blocks <= self.outsiders.num_coming:
            self.outsiders.choose((), needed)
            return []
        lower: list[Sequence | Outsider] = [
            other
            for other in self._holders(live)
            if other.tier < tier and not self._has_aged(other, now)
        ]
        if num_blocks > 0:
            lower += self.outsiders.below(tier, now)
        lower.sort(key=lambda other: (other.tier, -other.arrived, -other.order))
        if needs_slot:
            runs = (other for other in lower if _runs(other))
            first = next(runs, None)
            if first is None:
                return []
            lower.remove(first)
            lower.insert(0, first)
        elif num_blocks <= 0:
            return []
        chosen = _enough(self.pool, lower, num_blocks, demand.shares)
        outside = [other for other in chosen if isinstance(other, Outsider)]
        if outside:
            self.outsiders.choose(outside, needed)
            return []
        return [other for other in chosen if isinstance(other, Sequence)]

    def gives_outside(
        self, sequence: Sequence, other: Sequence | None, num_blocks: int, now: float
    ) -> bool:
        """Have those outside the engine asked, rather than ``other``, for what ``sequence`` lacks,
        which runs and must grow; whether they are of a tier below both, and have enough, or
        enough was given up there already."""
        tier = sequence.tier if other is None else min(sequence.tier, other.tier)
        lower = sorted(self.outsiders.below(tier, now), key=lambda o: (o.tier, -o.arrived))
        num_lacking = num_blocks - self.pool.num_free
        are_coming = 0 < num_lacking <= self.outsiders.num_coming
        is_short = num_lacking > 0 and not are_coming
        chosen = _enough(self.pool, lower, num_lacking) if is_short else []
        if chosen or are_coming:
            self.outsiders.choose(chosen, Demand(num_blocks=num_blocks, tier=sequence.tier))
        return bool(chosen) or are_coming

    def holdings(self, live: Collection[Sequence], now: float) -> Holdings:
        """Return who would give way; nobody where tiers take nothing from one another."""
        if not self.takes_from_below:
            return Holdings()
        firm = frozenset(s.key for s in live if self._is_firm(s, now))
        giving = tuple((s.tier, s.key) for s in self._holders(live) if s.key not in firm)
        return Holdings(giving=giving, firm=firm)

    def _is_firm(self, sequence: Sequence, now: float) -> bool:
        """Whether it goes before all who come, or holds what it has since it gave way so often."""
        holds = sequence.state is not SequenceState.WAITING or bool(sequence.block_ids)
        return self._has_aged(sequence, now) or (
            holds and self.is_spared(sequence.num_preemptions_in_all)
        )

    def _first_to_give(self, holders: Iterable[Sequence], now: float) -> Sequence | None:
        return max(holders, key=lambda s: (not self._has_aged(s, now), _giving(s)), default=None)

    def _has_aged(self, sequence: Sequence, now: float) -> bool:
        return self.ordering.has_aged(sequence.arrived, now)

    def _holders(self, live: Iterable[Sequence]) -> list[Sequence]:
        return [
            other
            for other in live
            if other.block_ids and not self.is_spared(other.num_preemptions_in_all)
        ]


def _enough(
    pool: BlockPool, givers: list[_Giving], num_blocks: int, but: Collection[int] = ()
) -> list[_Giving]:
    """Return the first of these, as many as are needed; nobody where all would not be enough.

    Blocks in ``but`` are of no use to whoever needs them.
    """
    holders = [g.holder if isinstance(g, Outsider) else g.key for g in givers]
    importing = [g.num_importing if isinstance(g, Outsider) else 0 for g in givers]
    if sum(importing) + sum(len(pool.blocks_of(holder)) for holder in holders) < num_blocks:
        return []
    num_freed = 0
    for number, num_own in enumerate(freed_in_turn(pool, holders, but)):
        num_freed += num_own + importing[number]
        if num_freed >= num_blocks:
            return givers[: number + 1]
    return []


def _runs(giver: Sequence | Outsider) -> bool:
    return isinstance(giver, Sequence) and giver.state is SequenceState.RUNNING


def freed_in_turn(
    pool: BlockPool, holders: Iterable[Holder], but: Collection[int] = ()
) -> Iterator[int]:
    """Iterate over how many blocks become free as each of these lets go of its own, in turn.

    What others share with them stays with those; blocks in ``but`` don't count. Whoever wants it as
    of one instant holds the pool's lock.
    """
    num_letting_go: Counter[int] = Counter()
    for holder in holders:
        num_own, shared = pool.shares_of(holder, but)
        num_letting_go.update(shared.keys())
        yield num_own + sum(num_letting_go[block_id] == n for block_id, n in shared.items())


def _giving(sequence: Sequence) -> tuple[int, bool, float, int]:
    is_waiting = sequence.state is SequenceState.WAITING
    return (-sequence.tier, is_waiting, sequence.arrived, sequence.order)
