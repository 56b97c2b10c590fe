"""Compute a plan: one forward over the flat batch, one draw for each sampled share."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from cluster.engine.batch import build_batch
from cluster.engine.plan import Outcome, Plan, Scheduled
from cluster.engine.stored import shares_by_layers
from cluster.model.draw import Draw
from cluster.model.logprobs import token_logprobs
from cluster.model.sampler import sample
from cluster.request import LegKey, PromptLogprobs, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from cluster.engine.stored import OnStored
    from cluster.kv.cache import PagedCache
    from cluster.model.loader import LoadedModel

_SCORED_ROWS = 64
"""Rows of a prompt whose logits are in memory together, a vocabulary for each."""


class ModelRunner:
    """Runs plans on one model and one paged cache, on the step thread.

    It believes its plans and keeps nothing about a sequence: tokens come with the plan, and KV is
    in the blocks that the plan names.
    """

    def __init__(self, loaded: LoadedModel, cache: PagedCache) -> None:
        obstacle = loaded.layout(cache.layout.block_size).obstacle(cache.layout)
        assert obstacle is None, str(obstacle)
        self._loaded = loaded
        self._cache = cache

    @torch.inference_mode()
    def run(self, plan: Plan, on_stored: OnStored | None = None) -> Outcome:
        """Return the drawn tokens; KV of all shares is in the cache when it returns."""
        batch = build_batch(plan, self._cache)
        # On a GPU the host runs ahead: what it has asked for is not stored yet, and a part would
        # wait for the whole step with the links' locks taken.
        if on_stored is not None and self._cache.device.type == "cpu":
            batch.attention.on_stored = {
                num_layers: functools.partial(on_stored, shares, num_layers)
                for num_layers, shares in shares_by_layers(plan, self._cache.layout).items()
            }
        self._cache.clear_blocks(batch.opened_blocks)
        scores: dict[LegKey, tuple[PromptLogprobs, ...]] = {}
        if batch.scored:
            hidden_nH = self._loaded.hidden(batch.input_ids_n, batch.positions_n, batch.attention)
            scores = {
                share.key: tuple(self._scores(share, hidden_nH[first:]))
                for share, first in batch.scored
            }
            if not batch.sampled:
                return Outcome({}, prompt_logprobs=scores)
            logits_SV = self._loaded.logits(hidden_nH[batch.rows_s])
        elif not batch.sampled:
            self._loaded.store(batch.input_ids_n, batch.positions_n, batch.attention)
            return Outcome({})
        else:
            logits_SV = self._loaded.forward(
                batch.input_ids_n, batch.positions_n, batch.rows_s, batch.attention
            )
        token_ids = sample(logits_SV, [_draw(share) for share in batch.sampled])
        keys = [share.key for share in batch.sampled]
        return Outcome(
            dict(zip(keys, token_ids, strict=True)),
            logprobs=_logprobs(logits_SV, batch.sampled, token_ids),
            prompt_logprobs=scores,
        )

    def _scores(self, share: Scheduled, hidden_nH: Tensor) -> Iterator[PromptLogprobs]:
        """Yield runs of the share's prompt scores; ``hidden_nH`` begins with the share's rows."""
        needs = share.needs
        assert needs is not None, "it is scored"
        # rows: 0 is position start, and the row before a token's position tells of that token.
        row = needs.scored_from - 1 - share.start
        for first in range(0, len(needs.scored_ids), _SCORED_ROWS):
            token_ids = needs.scored_ids[first : first + _SCORED_ROWS]
            logits_RV = self._loaded.logits(hidden_nH[row + first : row + first + len(token_ids)])
            num_top = share.params.num_logprobs or 0
            entries = token_logprobs(logits_RV, token_ids, [num_top] * len(token_ids))
            yield PromptLogprobs(share.key, needs.scored_from + first, tuple(entries))

    def warm_up(self, *, num_tokens: int, num_seqs: int) -> None:
        """Run a prompt and a decode step of the given sizes, so that later ones pay no first call.

        Sizes are cut to the cache. Overwrites blocks: to be called before any is handed out.
        """
        block_size = self._cache.layout.block_size
        num_tokens = min(num_tokens, self._cache.num_blocks * block_size - 1)
        block_ids = tuple(range(self._cache.layout.num_blocks_for(num_tokens + 1)))
        params = SamplingParams(max_tokens=1, temperature=0.0)

        def share(choice: int, length: int, start: int) -> Scheduled:
            return Scheduled(
                key=LegKey("warm-up", 0, choice), token_ids=(0,) * length, start=start,
                block_ids=block_ids, is_sampled=True, output_index=0, params=params,
            )  # fmt: skip

        self.run(Plan((share(0, num_tokens, 0),)))
        self.run(Plan(tuple(share(choice, 1, num_tokens) for choice in range(num_seqs))))


def _draw(share: Scheduled) -> Draw:
    params, choice, index = share.params, share.key.choice, share.output_index
    needs = share.needs
    if needs is None:
        return Draw(params=params, choice=choice, output_index=index)
    return Draw(
        params=params,
        choice=choice,
        output_index=index,
        prompt_ids=needs.prompt_ids,
        output_ids=needs.output_ids,
        banned_ids=needs.banned_ids,
    )


def _logprobs(
    logits_SV: Tensor, sampled: Sequence[Scheduled], token_ids: Sequence[int]
) -> dict[LegKey, TokenLogprobs]:
    """Return the log-probabilities of drawn tokens, for the shares that ask for them."""
    asked = [
        (row, share.key, share.params.num_logprobs)
        for row, share in enumerate(sampled)
        if share.params.num_logprobs is not None
    ]
    if not asked:
        return {}
    index = torch.tensor([row for row, _, _ in asked], device=logits_SV.device)
    entries = token_logprobs(
        logits_SV[index], [token_ids[row] for row, _, _ in asked], [num for _, _, num in asked]
    )
    return {key: entry for (_, key, _), entry in zip(asked, entries, strict=True)}
