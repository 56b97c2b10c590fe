"""Penalties, bias and bans: what changes a row's logits before its token is drawn.

In this order: the repetition penalty (Keskar et al. 2019, as transformers computes it) on the
model's own logits; then OpenAI's frequency and presence penalties; then the bias; then bans. Rows
are changed at single tokens only, so a row costs what its rules name, and never its neighbours'.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.model.draw import Draw

_LARGEST = 1e30
"""Logits are kept within it, so that no rule makes an infinity, nor a difference of two one."""


@dataclass(slots=True)
class _Entries:
    """(row, token id) pairs, each once, with one number each; ids of no token are passed over."""

    vocab_size: int
    rows: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, token_id: int, value: float) -> None:
        if not 0 <= token_id < self.vocab_size:
            return
        self.rows.append(row)
        self.token_ids.append(token_id)
        self.values.append(value)

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return (
            torch.tensor(self.rows, device=device),
            torch.tensor(self.token_ids, device=device),
        )


def apply_logit_rules(logits_RV: Tensor, draws: Sequence[Draw]) -> None:
    """Change fp32 logits in place as each row's draw says; they stay finite where they were."""
    vocab_size, device = logits_RV.shape[1], logits_RV.device
    repeated, added, banned = (_Entries(vocab_size) for _ in range(3))
    for row, draw in enumerate(draws):
        penalty = draw.params.repetition_penalty
        if penalty != 1.0:
            for token_id in {*draw.prompt_ids, *draw.output_ids}:
                repeated.add(row, token_id, penalty)
        for token_id, value in _sums(draw).items():
            added.add(row, token_id, value)
        for token_id in set(draw.banned_ids):
            banned.add(row, token_id, -_LARGEST)
    for entries, change in ((repeated, _repeated), (added, torch.add), (banned, _replaced)):
        if entries.rows:
            index = entries.index(device)
            values_e = torch.tensor(entries.values, dtype=torch.float64, device=device)
            changed_e = change(logits_RV[index].double(), values_e)
            logits_RV[index] = changed_e.clamp(-_LARGEST, _LARGEST).float()


def _repeated(logits_e: Tensor, penalties_e: Tensor) -> Tensor:
    return torch.where(logits_e > 0, logits_e / penalties_e, logits_e * penalties_e)


def _replaced(logits_e: Tensor, values_e: Tensor) -> Tensor:
    return values_e


def _sums(draw: Draw) -> dict[int, float]:
    """Return what is added to the row's logits, by token id."""
    params = draw.params
    sums: dict[int, float] = {}
    if params.frequency_penalty or params.presence_penalty:
        for token_id, count in Counter(draw.output_ids).items():
            sums[token_id] = -(params.frequency_penalty * count + params.presence_penalty)
    for token_id, bias in params.logit_bias:
        sums[token_id] = sums.get(token_id, 0.0) + bias
    return sums
