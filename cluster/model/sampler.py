"""Draw the next token of each row: greedy, or Gumbel-max within top-k, top-p and min-p.

The noise is a hash of (seed, choice, output index, token id) and of nothing else, so a draw does
not depend on the batch it ran in, on the worker, or on how often it is repeated. Adding Gumbel
noise to scaled logits and taking the largest samples from their softmax (Gumbel 1954; Maddison,
Tarlow, Minka 2014), and a small change of logits rarely changes the winner.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cluster.errors import EngineFault
from cluster.model.logit_rules import apply_logit_rules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.model.draw import Draw
    from cluster.request import SamplingParams

_CANDIDATES = 1024
"""Logits sorted at first for top-p; all of them where these do not hold enough probability."""
_MASK_64 = (1 << 64) - 1
# Multipliers and shifts of the SplitMix64 finaliser (Steele, Lea, Flood 2014).
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sample(logits_SV: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Return the token drawn for each row; raises EngineFault for a row without a finite maximum.

    Each row's result depends on that row and its draw alone. The logits are not changed.
    """
    best_S, ids_S = logits_SV.max(dim=-1)
    is_finite = torch.isfinite(best_S).all()
    noisy = [row for row, d in enumerate(draws) if not (d.is_greedy or d.has_logit_rules)]
    if noisy:
        index = torch.tensor(noisy, device=logits_SV.device)
        noisy_RV = _noisy(logits_SV[index], best_S[index], [draws[row] for row in noisy])
        ids_S = ids_S.index_copy(0, index, noisy_RV.argmax(dim=-1))
    ruled = [row for row, draw in enumerate(draws) if draw.has_logit_rules]
    if ruled:
        index = torch.tensor(ruled, device=logits_SV.device)
        ruled_R = _drawn_by_rules(logits_SV[index], [draws[row] for row in ruled])
        ids_S = ids_S.index_copy(0, index, ruled_R)
    # One transfer for both, so that a GPU is waited for once.
    all_finite, *ids = torch.cat([is_finite[None].long(), ids_S]).tolist()
    if not all_finite:
        raise EngineFault("the model's logits are not finite", stage="sample")
    return ids


def gumbel_noise(draws: Sequence[Draw], vocab_size: int, device: torch.device) -> Tensor:
    """Return Gumbel(0, 1) noise ``[rows, vocab]`` in fp32.

    The hash is integer arithmetic; its upper 32 bits become a float64 in (0, 1) without rounding,
    and the two logarithms are taken in float64, so that devices agree on the fp32 result.
    """
    keys = [_row_key(draw.params.seed, draw.choice, draw.output_index) for draw in draws]
    keys_R1 = torch.tensor([_signed(key) for key in keys], device=device)[:, None]
    token_ids_V = torch.arange(1, vocab_size + 1, device=device)
    bits_RV = _mix(keys_R1 + token_ids_V * _signed(_GOLDEN))
    uniform_RV = _shift(bits_RV, 32).double().add_(0.5).mul_(2.0**-32)
    return uniform_RV.log_().neg_().log_().neg_().float()


def _drawn_by_rules(logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return the tokens of rows whose logits are changed first, greedy ones among them."""
    logits_RV = logits_RV.float()  # a copy already, or made one by the cast
    apply_logit_rules(logits_RV, draws)
    best_R, ids_R = logits_RV.max(dim=-1)
    noisy = [row for row, draw in enumerate(draws) if not draw.is_greedy]
    if noisy:
        index = torch.tensor(noisy, device=logits_RV.device)
        noisy_NV = _noisy(logits_RV[index], best_R[index], [draws[row] for row in noisy])
        ids_R = ids_R.index_copy(0, index, noisy_NV.argmax(dim=-1))
    return ids_R


def _noisy(logits_RV: Tensor, best_R: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return scaled logits plus noise, -inf outside each row's top-k, top-p and min-p."""
    device = logits_RV.device
    temperature_R1 = torch.tensor([draw.params.temperature for draw in draws], device=device)
    # The maximum goes first, so that a small temperature makes large negatives, never infinities.
    scaled_RV = (logits_RV.float() - best_R.float()[:, None]) / temperature_R1[:, None]
    noisy_RV = scaled_RV + gumbel_noise(draws, logits_RV.shape[1], device)
    limited = [row for row, draw in enumerate(draws) if _is_limited(draw.params)]
    if limited:
        index = torch.tensor(limited, device=device)
        least_L = _least_kept(scaled_RV[index], [draws[row].params for row in limited])
        least_R = scaled_RV.new_full((len(draws),), float("-inf")).index_copy(0, index, least_L)
        noisy_RV.masked_fill_(scaled_RV < least_R[:, None], float("-inf"))
    return noisy_RV


def _is_limited(params: SamplingParams) -> bool:
    return bool(params.top_k or params.top_p < 1 or params.min_p)


def _least_kept(scaled_LV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return each row's lowest logit within its limits; whatever ties with it is kept too.

    The best of a row is 0. Min-p keeps what has at least ``min_p`` of the best one's probability
    (Nguyen et al. 2024); dividing by what the others leave would change nothing.
    """
    # log 0 is where nothing is cut off; a min_p of 1 keeps the best.
    logs = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    least_L = torch.tensor(logs, dtype=scaled_LV.dtype, device=scaled_LV.device)
    topped = [row for row, p in enumerate(params) if p.top_k or p.top_p < 1]
    if len(topped) == len(params):
        return torch.maximum(least_L, _least_of_top(scaled_LV, params))
    if topped:
        index = torch.tensor(topped, device=scaled_LV.device)
        least_T = _least_of_top(scaled_LV[index], [params[row] for row in topped])
        least_L = least_L.index_copy(0, index, torch.maximum(least_L[index], least_T))
    return least_L


def _least_of_top(scaled_LV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return each row's lowest logit within top-k and top-p.

    Top-p is taken of what top-k leaves: the fewest likeliest tokens that hold ``top_p`` of it.
    """
    vocab_size = scaled_LV.shape[1]
    device = scaled_LV.device
    top_k = torch.tensor([min(p.top_k or vocab_size, vocab_size) for p in params], device=device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    whole_L = scaled_LV.exp().sum(dim=-1, dtype=torch.float64)
    most = max((p.top_k for p in params if p.top_k < vocab_size), default=0)
    num_candidates = min(max(_CANDIDATES, most), vocab_size)
    while True:
        values_LC = scaled_LV.topk(num_candidates, dim=-1).values
        mass_LC = values_LC.double().exp().cumsum(dim=-1)
        at_k = mass_LC.gather(1, (top_k.clamp(max=num_candidates) - 1)[:, None])[:, 0]
        total_L = torch.where(top_k == vocab_size, whole_L, at_k)
        wanted_L1 = (top_p * total_L)[:, None]
        # Kept: every token before whose place the mass is not yet enough; one at least.
        num_kept_L = 1 + (mass_LC[:, :-1] < wanted_L1).sum(dim=-1)
        is_short = (mass_LC[:, -1:] < wanted_L1).any()
        if num_candidates == vocab_size or not is_short:
            break
        num_candidates = vocab_size
    last_L = torch.minimum(num_kept_L, top_k) - 1
    return values_LC.gather(1, last_L.clamp(min=0)[:, None])[:, 0]


def _row_key(seed: int, choice: int, output_index: int) -> int:
    """Hash the row's three integers, one after the other, to 64 bits."""
    key = 0
    for value in (seed, choice, output_index):
        key = _mix_int((key + (value & _MASK_64) + _GOLDEN) & _MASK_64)
    return key


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK_64
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK_64
    return x ^ (x >> 31)


def _mix(x: Tensor) -> Tensor:
    """Do as ``_mix_int``, on int64 tensors, whose products wrap around."""
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, num_bits: int) -> Tensor:
    """Shift right without the sign, which int64's own shift would copy in."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
