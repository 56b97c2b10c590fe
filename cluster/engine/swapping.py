"""Preemption by swap: what is preempted keeps its KV in CPU memory, and goes on where it was.

    RUNNING, or waiting with KV ──put_out──▶ WAITING, leaving ──settle──▶ WAITING, out
    WAITING, out ──bring_back──▶ RUNNING, entering ──settle──▶ RUNNING

The scheduler decides here, and the copies are a plan of their own (``Plan.swaps``): the blocks that
leave are free once it is committed, and whoever needs them is given them by the plan after it. In
the same way what enters counts as computed only then. So nobody ever has a block that is still to
be copied, and no copy goes on while a step is computed.

Where the buffer has no room for all of a sequence, that one is computed again, and counted. It is
also what is cheaper where there is no KV to keep, and where all of it is found in the cache when
it comes back; blocks that are found there are not copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.engine.plan import Swaps
from cluster.engine.sequence import SequenceState
from cluster.kv.swap_buffer import swap_holder

if TYPE_CHECKING:
    from cluster.engine.prefix_reuse import PrefixReuse
    from cluster.engine.sequence import Sequence
    from cluster.kv.block_pool import BlockPool


class Swapping:
    """The copies of one engine; without a swap buffer there are none."""

    def __init__(self, pool: BlockPool, prefix: PrefixReuse, block_size: int) -> None:
        self._pool = pool
        self._buffer = pool.swap
        self._prefix = prefix
        self._block_size = block_size
        self._out: list[tuple[int, int]] = []
        self._back: list[tuple[int, int]] = []
        self._leaving: list[Sequence] = []
        self._entering: list[Sequence] = []
        self.num_swapped = 0
        """Preemptions whose KV was kept."""
        self.num_refused = 0
        """Preemptions whose KV was dropped because the buffer was too full."""
        self.num_blocks_copied = 0
        """To the buffer and back."""

    @property
    def is_leaving(self) -> bool:
        """Whether blocks wait for their copy, so that more room comes with the next plan."""
        return bool(self._leaving)

    def put_out(self, sequence: Sequence) -> bool:
        """Keep the KV of a sequence that is being preempted; False where it is to be dropped.

        Its blocks are its own no more: those with KV are free once they are copied.
        """
        num_blocks = -(-sequence.num_computed_tokens // self._block_size)
        if self._buffer is None or not num_blocks:
            return False
        key = sequence.key
        with self._pool.lock:
            slots = self._buffer.take(key, num_blocks)
            if slots is None:
                self.num_refused += 1
                return False
            block_ids = sequence.block_ids[:num_blocks]
            self._pool.share(key, block_ids, swap_holder(key))
            self._pool.release(key)
        self._out.extend(zip(block_ids, slots, strict=True))
        self._leaving.append(sequence)
        sequence.num_swapped_tokens = sequence.num_computed_tokens
        self.num_swapped += 1
        return True

    def bring_back(self, sequence: Sequence) -> None:
        """Copy back what a sequence that has its blocks again does not find in them already."""
        if not sequence.num_swapped_tokens:
            return
        if sequence.num_computed_tokens >= sequence.num_swapped_tokens:
            self._forget(sequence)
            return
        # blocks:  [ found in the cache, whole ) first [ in slots ) len(slots) [ empty )
        first = sequence.num_computed_tokens // self._block_size
        assert self._buffer is not None, "it was swapped out"
        slots = self._buffer.slots_of(sequence.key)
        block_ids = sequence.block_ids[: len(slots)]
        self._back.extend(zip(slots[first:], block_ids[first:], strict=True))
        self._entering.append(sequence)

    def take(self) -> Swaps | None:
        """Return the copies that were asked for since the last call; None where none were."""
        if not (self._out or self._back):
            return None
        swaps = Swaps(out=tuple(self._out), back=tuple(self._back))
        self._out, self._back = [], []
        return swaps

    def settle(self, swaps: Swaps) -> None:
        """The copies are done: free what left, and count what came back as computed."""
        self.num_blocks_copied += len(swaps.out) + len(swaps.back)
        for sequence in self._leaving:
            self._pool.release(swap_holder(sequence.key))
        for sequence in self._entering:
            if sequence.state is SequenceState.RUNNING:
                sequence.num_computed_tokens = sequence.num_swapped_tokens
                self._forget(sequence)
                self._prefix.register(sequence)
        self._leaving, self._entering = [], []

    def drop(self, sequence: Sequence) -> None:
        """Free the slots of one that ends, and the blocks it leaves; to be called before a copy
        was planned, or after it was made."""
        if sequence.num_swapped_tokens:
            self._pool.release(swap_holder(sequence.key))
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        assert self._buffer is not None, "it was swapped out"
        sequence.num_swapped_tokens = 0
        with self._pool.lock:
            self._buffer.give_back(sequence.key)
