"""Sampling params at the worker's door: each value that cannot be sampled by names its field."""

import math
from dataclasses import replace

import pytest

from cluster.errors import InvalidRequest
from cluster.request import SamplingParams
from cluster.rpc.param_rules import check_params

GOOD = SamplingParams(max_tokens=4)
NAN, INF = math.nan, math.inf
BAD = {
    "temperature": [NAN, INF, -INF, -0.1, 2.0001],
    "top_p": [NAN, INF, 0.0, -1.0, 1.0001],
    "min_p": [NAN, INF, -0.1, 1.1],
    "presence_penalty": [NAN, -INF, 2.01, -2.01],
    "frequency_penalty": [NAN, INF, 2.01, -2.01],
    "repetition_penalty": [NAN, INF, 0.0, -1.0, 2.01],
    "top_k": [-1],
    "min_tokens": [-1],
    "num_logprobs": [-1, 21],
    "stop_token_ids": [(100,), (-1,), (1,) * 5000],
    "logit_bias": [((1, NAN),), ((1, INF),), ((1, 100.5),), ((100, 1.0),), ((-1, 1.0),)],
}
FINE = {
    "temperature": [0.0, -0.0, 1e-45, 2.0],
    "top_p": [1e-45, 1.0],
    "min_p": [0.0, 1.0],
    "presence_penalty": [-2.0, 2.0],
    "repetition_penalty": [1e-45, 2.0],
    "top_k": [0, 10**9],
    "num_logprobs": [None, 0, 20],
    "stop_token_ids": [(0, 99)],
    "logit_bias": [((0, -100.0), (99, 100.0))],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD.items() for value in values]
)
def test_a_bad_value_is_refused_by_name(field, value):
    """P-03: NaN is within no range."""
    with pytest.raises(InvalidRequest) as refused:
        check_params(replace(GOOD, **{field: value}), vocab_size=100)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in FINE.items() for value in values]
)
def test_values_at_the_border_are_fine(field, value):
    check_params(replace(GOOD, **{field: value}), vocab_size=100)
