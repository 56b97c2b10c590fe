"""The attention that a transformers model runs here: ragged, causal, over the paged cache.

A step is one flat row of tokens. Its decodes (one token each) come first, in groups of similar
length, then longer shares one by one. Every layer stores the step's K and V in the cache and then
attends from there. Products are grouped-query matmuls: on a CPU in bf16, scaled_dot_product_
attention is an order of magnitude slower for single tokens, and no faster for prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from cluster.errors import UnsupportedModel
from cluster.kv.cache import PagedCache

BACKEND = "pdserve_paged"
"""The name under which transformers finds this attention."""
STEP_KWARG = "paged_step"
"""The forward's extra argument: an ``AttentionStep``."""

_QUERY_TILE = 128
_HARMLESS = frozenset(
    {
        "cache", "past_key_values", "cache_position",
        "position_embeddings", "position_ids", "return_dict", "use_cache",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What a layer asks of its attention beside the tensors."""

    scaling: float
    sliding_window: int | None = None
    """Positions that a token sees, itself included; None: all before it."""
    softcap: float | None = None


class KVStored(Exception):
    """Ends the forward of a step whose logits nobody reads: all it was for is in the cache."""


class AttentionStep(Protocol):
    """What the registered function hands each layer's tensors to."""

    def attend(
        self, layer: int, q_HnD: Tensor, k_HnD: Tensor, v_HnD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return the attention's output ``[n, query heads, head_dim]`` for a layer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Neighbouring decodes that are computed together, padded to the longest."""

    first: int
    """Row of the first of them in the flat batch."""
    rows: Tensor
    """Of ``PagedCache.row_index``, over block tables padded to equal length."""
    lengths_b: Tensor
    """Tokens of each sequence, the one of this step included."""
    num_padded: int
    """Tokens that each block table has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptShare:
    """A share of more than one token: positions ``start .. start + length``."""

    first: int
    length: int
    start: int
    rows: Tensor | None
    """Where K and V are read; None where all of them are this step's own."""


@dataclass(slots=True, kw_only=True)
class PagedStep:
    """One step's attention over a paged cache, all layers."""

    cache: PagedCache
    slots: Tensor
    """Where the step's own K and V go; of ``PagedCache.slot_index``."""
    decodes: tuple[DecodeGroup, ...]
    prompts: tuple[PromptShare, ...]
    is_for_kv_alone: bool = False
    """Whether the step ends with ``KVStored`` once the last layer's K and V are in the cache."""
    on_stored: Mapping[int, Callable[[], None]] = field(default_factory=dict)
    """What to call once the K and V of so many layers, the first ones, are in the cache."""
    _num_stored: int = 0
    """Layers that have stored theirs."""
    _masks: dict[tuple[int | None, ...], Tensor] = field(default_factory=dict)
    """All layers use the same ones."""

    def attend(
        self, layer: int, q_HnD: Tensor, k_HnD: Tensor, v_HnD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Store K and V, then attend; see ``AttentionStep``."""
        self.cache.write(layer, self.slots, k_HnD, v_HnD)
        self._num_stored += 1
        if self.is_for_kv_alone and self._num_stored == self.cache.layout.num_layers:
            raise KVStored
        if self.on_stored and (tell := self.on_stored.get(self._num_stored)) is not None:
            tell()
        k_HnD, v_HnD = self.cache.rounded(k_HnD), self.cache.rounded(v_HnD)
        num_heads, num_tokens, head_dim = q_HnD.shape
        out_nHD = q_HnD.new_empty(num_tokens, num_heads, head_dim)
        for group in self.decodes:
            last = group.first + len(group.lengths_b)
            q = q_HnD[:, group.first : last]
            out_nHD[group.first : last] = self._decode(layer, group, q, options)
        for share in self.prompts:
            span = slice(share.first, share.first + share.length)
            if share.rows is None:
                k, v = k_HnD[:, span], v_HnD[:, span]
            else:
                k, v = self._gather(layer, share.rows, 1, q_HnD.dtype)
            self._attend_prompt(q_HnD[:, span], (k, v), share.start, options, out_nHD[span])
        return out_nHD

    def _gather(
        self, layer: int, rows: Tensor, num_tables: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        layout = self.cache.layout
        num_runs = num_tables * layout.num_kv_heads
        kv = self.cache.gather(layer, rows).view(2, num_runs, -1, layout.head_dim).to(dtype)
        return kv[0], kv[1]

    def _decode(
        self, layer: int, group: DecodeGroup, q_HbD: Tensor, options: AttentionOptions
    ) -> Tensor:
        num_seqs = len(group.lengths_b)
        k, v = self._gather(layer, group.rows, num_seqs, q_HbD.dtype)
        num_heads, _, head_dim = q_HbD.shape
        num_kv_heads = self.cache.layout.num_kv_heads
        # A query head h reads the K of head h // (heads / kv heads).
        q = q_HbD.reshape(num_kv_heads, -1, num_seqs, head_dim).permute(2, 0, 1, 3)
        scores = torch.bmm(q.reshape(num_seqs * num_kv_heads, -1, head_dim), k.transpose(1, 2))
        scores = _capped(scores.mul_(options.scaling), options.softcap)
        scores.view(num_seqs, num_heads, -1).add_(self._decode_mask(group, options, scores))
        return torch.bmm(_softmax(scores), v).view(num_seqs, num_heads, head_dim)

    def _decode_mask(self, group: DecodeGroup, options: AttentionOptions, scores: Tensor) -> Tensor:
        key = (group.first, options.sliding_window)
        if key not in self._masks:
            positions = torch.arange(group.num_padded, device=scores.device)
            ends = group.lengths_b[:, None]
            is_hidden = positions >= ends
            if options.sliding_window is not None:
                is_hidden |= positions < ends - options.sliding_window
            self._masks[key] = _additive(is_hidden, scores.dtype)[:, None]
        return self._masks[key]

    def _attend_prompt(
        self,
        q_HnD: Tensor,
        kv_GTD: tuple[Tensor, Tensor],
        start: int,
        options: AttentionOptions,
        out_nHD: Tensor,
    ) -> None:
        """Attend causally, a tile of queries at a time; ``k`` and ``v`` start at position 0.

        A tile's keys are ``lo .. hi``, so that nothing wholly above the diagonal is computed::

            position  0        lo             start+i0      hi = start+i1
            keys      [ unseen |  seen by all  | triangle ][ not computed ]
                       (window only)
        """
        k_GTD, v_GTD = kv_GTD
        num_kv_heads, head_dim = k_GTD.shape[0], k_GTD.shape[2]
        length = q_HnD.shape[1]
        q = q_HnD.reshape(num_kv_heads, -1, length, head_dim)
        out = out_nHD.view(length, num_kv_heads, -1, head_dim)
        window = options.sliding_window
        for i0 in range(0, length, _QUERY_TILE):
            i1 = min(i0 + _QUERY_TILE, length)
            hi = start + i1
            lo = max(0, start + i0 + 1 - window) if window is not None else 0
            q_tile = q[:, :, i0:i1].reshape(num_kv_heads, -1, head_dim)
            scores = torch.bmm(q_tile, k_GTD[:, lo:hi].transpose(1, 2))
            scores = _capped(scores.mul_(options.scaling), options.softcap)
            tiled = scores.view(num_kv_heads, -1, i1 - i0, hi - lo)
            if window is None:
                triangle = self._causal_mask(i1 - i0, i1 - i0, 0, None, scores)
                tiled[..., hi - lo - (i1 - i0) :].add_(triangle)
            else:
                offset = start + i0 - lo
                tiled.add_(self._causal_mask(i1 - i0, hi - lo, offset, window, scores))
            result = torch.bmm(_softmax(scores), v_GTD[:, lo:hi])
            out[i0:i1] = result.view(num_kv_heads, -1, i1 - i0, head_dim).permute(2, 0, 1, 3)

    def _causal_mask(
        self, num_queries: int, num_keys: int, offset: int, window: int | None, like: Tensor
    ) -> Tensor:
        """Return ``[queries, keys]``: 0 where query i, at key ``offset + i``, sees key j, else
        -inf; made once a step."""
        key = (num_queries, num_keys, offset, window)
        if key not in self._masks:
            positions = torch.arange(num_queries, device=like.device)[:, None] + offset
            keys = torch.arange(num_keys, device=like.device)
            is_hidden = keys > positions
            if window is not None:
                is_hidden |= keys <= positions - window
            self._masks[key] = _additive(is_hidden, like.dtype)
        return self._masks[key]


def register() -> None:
    """Make ``BACKEND`` known to transformers; calling again changes nothing."""
    AttentionInterface.register(BACKEND, _paged_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(BACKEND, _no_mask)


def _no_mask(*_args: object, **_kwargs: object) -> None:
    """Stand for transformers' dense mask: a step's mask follows from its shares."""


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Adapt transformers' call (tensors ``[1, heads, n, head_dim]``) to the step's ``attend``."""
    step: AttentionStep = kwargs.pop(STEP_KWARG)
    head_dim = query.shape[-1]
    scaling = kwargs.pop("scaling", None)
    options = AttentionOptions(
        scaling=head_dim**-0.5 if scaling is None else float(scaling),
        sliding_window=kwargs.pop("sliding_window", None),
        softcap=kwargs.pop("softcap", None),
    )
    _refuse_unknown(module, attention_mask, kwargs)
    layer: int = module.layer_idx  # type: ignore[assignment]
    return step.attend(layer, query[0], key[0], value[0], options)[None], None


def _refuse_unknown(module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Refuse what would change the result if it were ignored."""
    is_causal = kwargs.pop("is_causal", None)
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel("attention that is not causal is not supported")
    if mask is not None:
        raise UnsupportedModel("the model brings its own attention mask")
    if kwargs.pop("dropout", 0.0):
        raise UnsupportedModel("attention dropout is on")
    for name, value in kwargs.items():
        # ``output_...`` asks for further results, which nobody reads.
        if value is not None and name not in _HARMLESS and not name.startswith("output_"):
            raise UnsupportedModel(f"the model's attention needs {name!r}, which is not supported")


def _additive(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return mask.masked_fill_(is_hidden, float("-inf"))


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def _softmax(scores: Tensor) -> Tensor:
    """Return the weights in the scores' dtype, computed in fp32 as transformers does."""
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
