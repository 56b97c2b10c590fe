"""Log-probabilities of tokens under the model's own distribution, the best ones beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cluster.request import LOGPROB_FLOOR, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence


def token_logprobs(
    logits_RV: Tensor, token_ids: Sequence[int], nums_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return for each row the logprob of its token, and of as many best tokens as it asks for.

    They come from the softmax of the model's logits as they are. All values are finite.
    """
    logits_RV = logits_RV.float()
    vocab_size, device = logits_RV.shape[1], logits_RV.device
    chosen_R1 = torch.tensor(token_ids, device=device)[:, None]
    num_top = min(max(nums_top), vocab_size)
    best = logits_RV.topk(num_top, dim=-1)
    logits_RT = torch.cat([logits_RV.gather(1, chosen_R1), best.values], dim=1)
    logprobs_RT = logits_RT.double() - logits_RV.logsumexp(dim=-1, keepdim=True).double()
    logprobs_RT.clamp_(min=LOGPROB_FLOOR, max=0.0)
    # One transfer for both: a float64 holds any token id.
    packed = torch.cat([logprobs_RT, best.indices.double()], dim=1).tolist()
    return [
        _entry(row, num_top, min(num, num_top)) for row, num in zip(packed, nums_top, strict=True)
    ]


def _entry(row: list[float], num_top: int, num_wanted: int) -> TokenLogprobs:
    # row: [ chosen ) 1 [ best logprobs ) 1 + num_top [ their ids ) 1 + 2 * num_top
    values, ids = row[1 : 1 + num_wanted], row[1 + num_top : 1 + num_top + num_wanted]
    top = sorted(zip(map(int, ids), values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(row[0], tuple(top))
