"""A request that higher tiers have preempted draws what it draws undisturbed, in fp32."""

import pytest

from cluster.config import Dtype
from cluster.model.loader import load_model
from cluster.request import SamplingParams
from tests.factories_model import write_tiny_llama
from tests.factories_preemption import assert_undisturbed

NUM_TOKENS = 40
PARAMS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
    "seeded": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, seed=7),
    "penalties": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.8, seed=11, presence_penalty=0.5,
        frequency_penalty=0.5, repetition_penalty=1.2,
    ),
    "minimum": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=1.0, seed=3, min_tokens=20, stop_token_ids=(5, 9, 40)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = write_tiny_llama(tmp_path_factory.mktemp("llama"))
    return load_model(folder, dtype=Dtype.FP32, device="cpu")


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("kind", PARAMS)
def test_preempted_is_undisturbed(loaded, kind, swaps):
    """P-15: computed again in chunks, or swapped."""
    assert_undisturbed(loaded, PARAMS[kind], swaps=swaps)
