"""How one step's token budget is shared out among the sequences that are ready for it.

A sequence that decodes, or whose KV was imported, gets its one token first. What is left goes to
prompts, in their turn: ``chunk_tokens`` each, or all they have where that is 0. Without chunks
only the first prompt of a step may be cut by the budget; the others wait for a step that holds
them whole, and a younger one that fits goes in their place for that step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.engine.needs import needs_of
from cluster.engine.plan import Scheduled

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShares:
    """The rule of a worker's steps; all sizes in tokens."""

    token_budget: int
    """Computed in one step at most; not below the number of slots, so that no decode waits."""
    chunk_tokens: int
    """One prompt's share at most; 0: the whole prompt, within the budget."""
    block_size: int

    def share_out(self, ready: Iterable[Sequence]) -> tuple[Scheduled, ...]:
        """Return the shares of sequences given in their turn; those of one token come first."""
        ready = list(ready)
        shares = [self._share(sequence, 1) for sequence in ready if sequence.num_tokens_left == 1]
        budget = self.token_budget - len(shares)
        has_prompt = False
        for sequence in ready:
            left = sequence.num_tokens_left
            may_cut = self.chunk_tokens > 0 or not has_prompt
            if left == 1 or budget < 1 or (left > budget and not may_cut):
                continue
            num_tokens = min(left, self.chunk_tokens or left, budget)
            shares.append(self._share(sequence, num_tokens))
            budget -= num_tokens
            has_prompt = True
        # The last token of a prompt is a single one too.
        return tuple(sorted(shares, key=lambda share: len(share.token_ids) > 1))

    def _share(self, sequence: Sequence, num_tokens: int) -> Scheduled:
        # tokens:  0 [ computed ) start [ this share ) end [ later shares ) num_tokens
        start = sequence.num_computed_tokens
        end = start + num_tokens
        num_blocks = -(-end // self.block_size)
        # With max_tokens 0 the prompt is computed and nothing is drawn.
        is_sampled = end == sequence.num_tokens and sequence.params.max_tokens > 0
        return Scheduled(
            key=sequence.key,
            token_ids=sequence.token_ids(start, end),
            start=start,
            block_ids=tuple(sequence.block_ids[:num_blocks]),
            is_sampled=is_sampled,
            output_index=sequence.num_output_tokens,
            params=sequence.params,
            needs=needs_of(sequence, start, end, is_sampled=is_sampled),
        )
