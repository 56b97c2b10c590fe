"""How the step scheduler uses the prefix index: sequences start behind what is known already.

Only full, computed blocks are shared, so no block is ever written by two, and none is copied:

    positions:  0 [ computed: only read ) num_computed_tokens [ the next share writes ) ...
    blocks:     [ full: findable, perhaps shared )[ partly filled or empty: this sequence's alone )

A share writes from ``num_computed_tokens`` on. A sequence that found ``n`` blocks starts with
``n * block_size`` computed tokens, so its first write is behind them; and what a sequence makes
findable lies below its own ``num_computed_tokens``, which falls only when it gives all its blocks
back. A match ends before the last token, since a draw needs that one's logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.engine.sequence import Sequence
    from cluster.kv.block_pool import BlockPool
    from cluster.kv.prefix_index import PrefixIndex


class PrefixReuse:
    """Names blocks by what sequences have in them; does nothing in a pool without an index."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._index = pool.prefix
        self._block_size = pool.prefix.block_size if pool.prefix is not None else 0

    def match(self, sequence: Sequence) -> list[int]:
        """Return the blocks of its longest known prefix, for a sequence that has no blocks yet.

        They stay findable only while the caller holds the pool's lock. Whoever wants the prompt's
        logprobs finds nothing: these come of computing every position.
        """
        if self._index is None or sequence.params.prompt_logprobs:
            return []
        num_blocks = (sequence.num_tokens - 1) // self._index.block_size
        return self._index.find(self._digests(sequence, num_blocks))

    def num_known_tokens(self, sequence: Sequence) -> int:
        """Return how many of its first tokens it would not have to compute now."""
        if sequence.block_ids:
            return 0
        with self._pool.lock:
            return len(self.match(sequence)) * self._block_size

    def register(self, sequence: Sequence, start: int = 0) -> None:
        """Make findable the blocks that ``start .. num_computed_tokens`` filled up."""
        if self._index is None:
            return
        first = start // self._index.block_size
        last = sequence.num_computed_tokens // self._index.block_size
        if first < last:
            self._pool.register(sequence.key, first, self._digests(sequence, last)[first:])
        self._name(sequence, self._index)

    def _name(self, sequence: Sequence, index: PrefixIndex) -> None:
        """Tell the index what the control plane calls the beginnings that are computed by now."""
        names, stride = sequence.prefix.names, sequence.prefix.stride_tokens
        if sequence.num_named == len(names) or stride % index.block_size:
            return
        # tokens:  [ stride ) ... num_named * stride [ computed whole since ) covered * stride [ ...
        covered = min(len(names), sequence.num_computed_tokens // stride)
        num_blocks = stride // index.block_size
        digests = self._digests(sequence, covered * num_blocks)
        with self._pool.lock:
            for number in range(sequence.num_named, covered):
                index.name(digests[(number + 1) * num_blocks - 1], names[number])
        sequence.num_named = max(sequence.num_named, covered)

    def _digests(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Return the names of its first blocks; each is made once in a sequence's life."""
        assert self._index is not None, "asked for with an index only"
        known = sequence.block_digests
        if len(known) < num_blocks:
            size = self._index.block_size
            token_ids = sequence.token_ids(len(known) * size, num_blocks * size)
            self._index.extend(known, sequence.tenant, token_ids)
        return known[:num_blocks]
