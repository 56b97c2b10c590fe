"""Run a causal LM in two parts: all layers over a batch, then its head over any of the rows.

One forward makes the logits of its rows together, a vocabulary for each. Where logits of a whole
prompt are asked for, the head runs over a few rows at a time instead.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


class _Passed:
    """What layers return, to a head that wants their last hidden states only."""

    def __init__(self, hidden_1rH: Tensor) -> None:
        self.last_hidden_state = hidden_1rH

    def __getitem__(self, index: int) -> Tensor:
        # Older heads take it by its place, which is the first.
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """Caches, attentions, router logits: nothing of the kind was asked for."""


class _Given(nn.Module):
    """Stands for the layers of a model: their output is what they are given."""

    def __init__(self, *, has_decoder: bool) -> None:
        super().__init__()
        # Some heads call the decoder inside the layers' module.
        self.decoder = _Given(has_decoder=False) if has_decoder else None

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Passed:
        return _Passed(inputs_embeds)


class SplitModel:
    """The two parts of ``model``, with its own weights and its own code, scales and caps too."""

    def __init__(self, model: nn.Module) -> None:
        name = str(model.base_model_prefix)
        self._layers: nn.Module = getattr(model, name)
        given = _Given(has_decoder=hasattr(self._layers, "decoder"))
        self._head = copy.copy(model)
        # A copy of the module's own table: the weights in it are shared.
        self._head._modules = dict(model._modules) | {name: given}

    def hidden(self, **inputs: Any) -> Tensor:
        """Return the hidden states ``[1, n, hidden]`` that the head would see."""
        hidden_1nH: Tensor = self._layers(use_cache=False, **inputs).last_hidden_state
        return hidden_1nH

    def logits(self, hidden_1rH: Tensor) -> Tensor:
        """Return the logits ``[r, vocab]`` of some rows of ``hidden``."""
        output = self._head(inputs_embeds=hidden_1rH, use_cache=False)
        logits_rV: Tensor = output.logits[0]
        return logits_rV
