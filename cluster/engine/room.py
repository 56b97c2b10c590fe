"""How many blocks a sequence needs, and how it gets them when it starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cluster.engine.finish import Limits
from cluster.engine.prefix_reuse import PrefixReuse
from cluster.engine.rules import Rules
from cluster.kv.block_pool import BlockPool
from cluster.kv.outside import Demand

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Room:
    """The pool as a scheduler uses it; numbers are of blocks."""

    pool: BlockPool
    prefix: PrefixReuse
    block_size: int
    limits: Limits
    rules: Rules
    num_cached_tokens: int = 0
    _num_set_aside: int = 0

    def short(self, sequence: Sequence) -> int:
        """Return how many it lacks for its tokens."""
        return self._blocks_for(sequence.num_tokens) - len(sequence.block_ids)

    def ready(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Return those who have blocks for all their tokens."""
        return [sequence for sequence in running if self.short(sequence) <= 0]

    def short_to_start(self, sequence: Sequence) -> int:
        """Return how many it lacks to start."""
        return self._wanted(sequence) - len(sequence.block_ids)

    def next_growth(self, sequence: Sequence, num_next: int = 1) -> int:
        """Return how many its next tokens will need on top of those for its present ones."""
        num_tokens = min(sequence.num_tokens + num_next, self.limits.max_kv_tokens(sequence))
        covered = max(len(sequence.block_ids), self._wanted(sequence))
        return max(0, self._blocks_for(num_tokens) - covered)

    def growing(self, running: Iterable[Sequence], num_next: int = 1) -> int:
        """Return how many those that run need for their tokens and each one's next ones."""
        return sum(self.next_growth(s, num_next) + max(0, self.short(s)) for s in running)

    def needs_all(self, sequence: Sequence) -> bool:
        """Whether it starts only with blocks for all that may come, since nobody will give it any
        later, or it will never give up any."""
        return self.rules.needs_all(sequence.num_preemptions_in_all)

    def brings_blocks(self, sequence: Sequence) -> bool:
        """Whether it lacks a slot only: it has imported KV, and what it needs beside it."""
        is_enough = not self.needs_all(sequence) or self.short_to_start(sequence) <= 0
        return bool(sequence.block_ids) and is_enough

    def cover(self, sequence: Sequence, num_spare: int) -> bool:
        """Give it the blocks it needs to start, if ``num_spare`` are left free after that.

        One without blocks begins with those of its longest known prefix, computed already.
        """
        num_short = self.short_to_start(sequence)
        if num_short <= 0:
            return True
        with self.pool.lock:
            prefix = [] if sequence.block_ids else self.prefix.match(sequence)
            block_ids = self.pool.allocate(
                num_short - len(prefix), sequence.key, prefix=prefix, num_spare=num_spare
            )
        if block_ids is None:
            return False
        sequence.block_ids.extend(block_ids)
        if prefix:
            self._skip(sequence, len(prefix) * self.block_size)
        return True

    def lack(self, sequence: Sequence, num_spare: int) -> Demand:
        """Return what it lacks to start, with so many to be left free.

        The blocks of others that it would share it need not be given; what is cached of its prefix
        it takes from what is free.
        """
        with self.pool.lock:
            num_blocks = max(0, self.short_to_start(sequence)) + num_spare - self.pool.num_free
            is_short = num_blocks > 0 and not sequence.block_ids
            shares = self.pool.held_of(self.prefix.match(sequence)) if is_short else frozenset()
        return Demand(num_blocks=num_blocks - len(shares), tier=sequence.tier, shares=shares)

    def promised(self, sequence: Sequence, now: float) -> int:
        """Return how many it must leave free for an import of a higher tier, unless it has aged."""
        demand = self.pool.demand
        if demand is None or sequence.tier >= demand.tier:
            return 0
        has_aged = self.rules.ordering.has_aged(sequence.arrived, now)
        return 0 if has_aged else demand.num_blocks

    def promises_end(self, sequences: Iterable[Sequence], now: float) -> list[float]:
        """Return when those age that must leave blocks free for an import of a higher tier."""
        if self.pool.demand is None:
            return []
        aging_s = self.rules.ordering.aging_s
        return [s.arrived + aging_s for s in sequences if self.promised(s, now)]

    def short_for_import(
        self, running: Iterable[Sequence], preempted: Sequence | None, now: float
    ) -> Demand | None:
        """Return what an import of a higher tier lacks, beside what is set aside; None where none
        waits for blocks, or there are enough."""
        with self.pool.lock:  # else it may have its blocks in between
            demand, num_free = self.pool.demand, self.pool.num_free
        if demand is None:
            return None
        num_short = demand.num_blocks + self._due(running, preempted, now) - num_free
        return replace(demand, num_blocks=num_short) if num_short > 0 else None

    def set_aside(
        self, running: Iterable[Sequence], preempted: Sequence | None, now: float
    ) -> None:
        """Keep new imports from blocks that started sequences wait for."""
        num_blocks = self._due(running, preempted, now)
        if num_blocks != self._num_set_aside:
            self._num_set_aside = num_blocks
            self.pool.set_aside(num_blocks)

    def _due(self, running: Iterable[Sequence], preempted: Sequence | None, now: float) -> int:
        """Return how many those that started wait for; where an import of a higher tier waits,
        the lower ones wait for it until they have aged.

        The preempted starts where it leaves room for the next tokens of all that run, each of which
        may have one more until then: imports take what is left beside these, so that none goes
        before it.
        """
        waiting = [s for s in running if not self.promised(s, now)]
        if preempted is None or self.promised(preempted, now):
            return sum(max(0, self.short(sequence)) for sequence in waiting)
        num_to_start = self.short_to_start(preempted) + self.next_growth(preempted)
        return num_to_start + self.growing(waiting, num_next=2)

    def _skip(self, sequence: Sequence, num_found: int) -> None:
        """Take its first tokens as computed: what it found in the cache."""
        sequence.num_computed_tokens = num_found
        # Prompt tokens that it computed before it was preempted count as prefilled already.
        num_found = min(num_found, sequence.num_prompt_tokens)
        num_new = max(0, num_found - sequence.num_prefilled_tokens)
        sequence.num_prefilled_tokens += num_new
        sequence.num_cached_tokens += num_new
        self.num_cached_tokens += num_new

    def _wanted(self, sequence: Sequence) -> int:
        """Return how many it must have to start."""
        num_tokens = sequence.num_tokens
        if self.needs_all(sequence):
            num_tokens = self.limits.max_kv_tokens(sequence)
        return self._blocks_for(num_tokens)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
