"""What sampling params must be before a worker draws a token by them.

The doors check the same and say it better; this stands behind them, for a value that slipped
through would spoil a step that others share. NaN is within no range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.errors import InvalidRequest

if TYPE_CHECKING:
    from cluster.request import SamplingParams

MAX_LOGPROBS = 20
_MAX_ENTRIES = 4096
_RANGES = {
    "temperature": (0.0, 2.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_MAX_REPETITION = 2.0
_MAX_BIAS = 100.0


def check_params(params: SamplingParams, *, vocab_size: int) -> None:
    """Raise InvalidRequest that names the field, unless every value can be sampled by."""
    for name, (low, high) in _RANGES.items():
        if not low <= getattr(params, name) <= high:
            raise InvalidRequest(f"{name} is from {low:g} to {high:g}", field=name)
    if not 0 < params.top_p <= 1:
        raise InvalidRequest("top_p is above 0 and at most 1", field="top_p")
    if not 0 < params.repetition_penalty <= _MAX_REPETITION:
        reason = f"repetition_penalty is above 0 and at most {_MAX_REPETITION:g}"
        raise InvalidRequest(reason, field="repetition_penalty")
    for name in ("top_k", "min_tokens"):
        if getattr(params, name) < 0:
            raise InvalidRequest(f"{name} is 0 or above", field=name)
    if params.num_logprobs is not None and not 0 <= params.num_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs are from 0 to {MAX_LOGPROBS}", field="num_logprobs")
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], vocab_size)
    if not all(-_MAX_BIAS <= bias <= _MAX_BIAS for _, bias in params.logit_bias):
        raise InvalidRequest(f"a bias is from -{_MAX_BIAS:g} to {_MAX_BIAS:g}", field="logit_bias")


def _check_ids(field: str, token_ids: tuple[int, ...] | list[int], vocab_size: int) -> None:
    if len(token_ids) > _MAX_ENTRIES:
        raise InvalidRequest(f"{field} has more than {_MAX_ENTRIES} entries", field=field)
    if not all(0 <= token_id < vocab_size for token_id in token_ids):
        raise InvalidRequest("a token id is outside the vocabulary", field=field)
