"""Whether greedy answers are right: each token the likeliest after those before it.

``transformers`` says so, from the same weights in fp32 and in one pass over a prompt and its
answer; the cluster has no part in it. Two tokens may be taken for one another where their logits
are as good as equal, as sums are taken in another order. In a cluster of 16 bits rounding moves
logits further, so that more tokens pass: what a wrong prompt's KV, or a lost or repeated token,
leads to does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from cluster.config import Dtype

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cluster.config import DeployConfig

_TIE, _ROUNDED_TIE = 1e-4, 1.0
"""Between two logits: in fp32, and where some of what is computed has 16 bits."""


class AnswerKey:
    """Marks answers of one model as the pools of a deploy file compute it."""

    def __init__(self, folder: Path, config: DeployConfig) -> None:
        dtypes = {each for pool in config.pools for each in (pool.dtype, pool.stored_dtype)}
        self._tie = _TIE if dtypes == {Dtype.FP32} else _ROUNDED_TIE
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
        self._model = model.eval()

    @torch.inference_mode()
    def wrong_at(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> int | None:
        """Return the index of the first token that is wrong; None where none is."""
        input_ids = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
        logits_NV = self._model(input_ids, logits_to_keep=len(output_ids)).logits[0]
        given_N = logits_NV.gather(1, torch.tensor(output_ids).unsqueeze(1)).squeeze(1)
        is_wrong_N = logits_NV.amax(1) - given_N > self._tie
        return int(is_wrong_N.int().argmax()) if is_wrong_N.any() else None
