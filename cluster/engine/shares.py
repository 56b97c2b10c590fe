"""How one step's token budget is shared out among the sequences that are ready for it.

A sequence that decodes, or whose KV was imported, gets its one token first. What is left goes to
prompts, in their turn: up to ``chunk_tokens`` each, or all they have where that is 0. One prompt of
a step may be cut, the first that the step cannot end; all others are in a step that ends them, or
wait. So long prompts go one after another, a step is as short as their chunks, and a short prompt
waits for a chunk of theirs, not for their ends.

    token budget:  [ decodes ) [ ended ) [ a chunk of the first long one ) [ ended, if younger )

Where the budget is little more than a chunk, that chunk gives up to half of it to short ones that
are younger (``yields``), so that these pass a long one at its next chunk in any case; and it loses
half of its speed at most.
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
    yields: bool = False
    """Whether a chunk makes room for younger short prompts, as is fair only among equals."""

    def share_out(self, ready: Iterable[Sequence]) -> tuple[Scheduled, ...]:
        """Return the shares of sequences given in their turn; those of one token come first."""
        ready = list(ready)
        shares = [self._share(sequence, 1) for sequence in ready if sequence.num_tokens_left == 1]
        budget = self.token_budget - len(shares)
        prompts = [sequence for sequence in ready if sequence.num_tokens_left > 1]
        has_cut = False
        for number, sequence in enumerate(prompts):
            if budget < 1:
                break
            left = sequence.num_tokens_left
            num_tokens = min(left, self.chunk_tokens or left, budget)
            if num_tokens < left:
                may_cut = self.chunk_tokens > 0 or number == 0
                if has_cut or not may_cut:
                    continue
                has_cut = True
                num_tokens -= self._yielded(prompts[number + 1 :], num_tokens, budget)
            shares.append(self._share(sequence, num_tokens))
            budget -= num_tokens
        # The last token of a prompt is a single one too.
        return tuple(sorted(shares, key=lambda share: len(share.token_ids) > 1))

    def _yielded(self, younger: Iterable[Sequence], num_tokens: int, budget: int) -> int:
        """Return what a chunk gives up of its tokens for prompts that the step can end then."""
        if not self.yields:
            return 0
        room = max(budget - num_tokens, budget // 2)
        num_wanted = 0
        for sequence in younger:
            left = sequence.num_tokens_left
            if num_wanted + left <= room and left <= (self.chunk_tokens or left):
                num_wanted += left
        return max(0, num_wanted - (budget - num_tokens))

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
            stored=sequence.stored,
        )
