"""Draw the next token of each row: greedy, or Gumbel-max within top-k and top-p.

The noise is a hash of (seed, choice, output index, token id) and of nothing else, so a draw does
not depend on the batch it ran in, on the worker, or on how often it is repeated. Adding Gumbel
noise to scaled logits and taking the largest samples from their softmax (Gumbel 1954; Maddison,
Tarlow, Minka 2014), and a small change of logits rarely changes the winner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cluster.errors import EngineFault
from cluster.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

_GREEDY_UP_TO = 1e-5
"""Temperatures that cannot be told from 0: the noise is below the rounding of scaled logits."""
_CANDIDATES = 1024
"""Logits sorted at first for top-p; all of them where these do not hold enough probability."""
_MASK_64 = (1 << 64) - 1
# Multipliers and shifts of the SplitMix64 finaliser (Steele, Lea, Flood 2014).
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One row to be drawn."""

    params: SamplingParams
    choice: int
    output_index: int

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.params.temperature <= _GREEDY_UP_TO


def sample(logits_SV: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Return the token drawn for each row; raises EngineFault for a row without a finite maximum.

    Each row's result depends on that row and its draw alone.
    """
    best_S, ids_S = logits_SV.max(dim=-1)
    random = [row for row, draw in enumerate(draws) if not draw.is_greedy]
    if random:
        index = torch.tensor(random, device=logits_SV.device)
        noisy_RV = _noisy(logits_SV[index], best_S[index], [draws[row] for row in random])
        ids_S = ids_S.index_copy(0, index, noisy_RV.argmax(dim=-1))
    # One transfer for both, so that a GPU is waited for once.
    is_finite, *ids = torch.cat([torch.isfinite(best_S).all()[None].long(), ids_S]).tolist()
    if not is_finite:
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


def _noisy(logits_RV: Tensor, best_R: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return scaled logits plus noise, -inf outside each row's top-k and top-p."""
    device = logits_RV.device
    temperature_R1 = torch.tensor([draw.params.temperature for draw in draws], device=device)
    # The maximum goes first, so that a small temperature makes large negatives, never infinities.
    scaled_RV = (logits_RV.float() - best_R.float()[:, None]) / temperature_R1[:, None]
    noisy_RV = scaled_RV + gumbel_noise(draws, logits_RV.shape[1], device)
    limited = [row for row, draw in enumerate(draws) if draw.params.top_k or draw.params.top_p < 1]
    if limited:
        index = torch.tensor(limited, device=device)
        least_L = _least_kept(scaled_RV[index], [draws[row].params for row in limited])
        least_R = scaled_RV.new_full((len(draws),), float("-inf")).index_copy(0, index, least_L)
        noisy_RV.masked_fill_(scaled_RV < least_R[:, None], float("-inf"))
    return noisy_RV


def _least_kept(scaled_LV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return each row's lowest logit within top-k and top-p; whatever ties with it is kept too.

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
