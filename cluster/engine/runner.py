"""Compute a plan: one forward over the flat batch, one draw for each sampled share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cluster.engine.batch import build_batch
from cluster.engine.plan import Outcome, Plan, Scheduled
from cluster.model.sampler import Draw, sample
from cluster.request import LegKey, SamplingParams

if TYPE_CHECKING:
    from cluster.kv.cache import PagedCache
    from cluster.model.loader import LoadedModel


class ModelRunner:
    """Runs plans on one model and one paged cache, on the step thread.

    It believes its plans and keeps nothing about a sequence: tokens come with the plan, and KV is
    in the blocks that the plan names.
    """

    def __init__(self, loaded: LoadedModel, cache: PagedCache) -> None:
        expected = loaded.layout(cache.layout.block_size)
        assert expected == cache.layout, expected.mismatch(cache.layout)
        self._loaded = loaded
        self._cache = cache

    @torch.inference_mode()
    def run(self, plan: Plan) -> Outcome:
        """Return the drawn tokens; KV of all shares is in the cache when it returns."""
        batch = build_batch(plan, self._cache)
        self._cache.clear_blocks(batch.opened_blocks)
        logits_SV = self._loaded.forward(
            batch.input_ids_n, batch.positions_n, batch.rows_s, batch.attention
        )
        if not batch.sampled:
            return Outcome({})
        draws = [
            Draw(params=share.params, choice=share.key.choice, output_index=share.output_index)
            for share in batch.sampled
        ]
        token_ids = sample(logits_SV, draws)
        keys = [share.key for share in batch.sampled]
        return Outcome(dict(zip(keys, token_ids, strict=True)))

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
