"""What counts as a right answer: what transformers generates, and nothing that resembles it."""

import dataclasses

import pytest

from cluster.config import DeployConfig, Dtype, PoolConfig, Role
from deploy.bench import fault_table
from deploy.bench.answers import AnswerKey
from deploy.bench.load import Call
from tests.deploy.bench_doors import FakeDoors, make_site
from tests.e2e.reference import greedy
from tests.factories_model import write_tiny_llama

NUM_TOKENS = 12
PROMPTS = [[5 + (i * (7 + number)) % 500 for i in range(20)] for number in range(3)]
SPOILT = {
    "another token": (lambda ids: [*ids[:4], ids[4] ^ 1, *ids[5:]], 4),
    "one is lost": (lambda ids: [*ids[:4], *ids[5:]], 4),
    "one comes twice": (lambda ids: [*ids[:5], *ids[4:-1]], 5),
    "two change places": (lambda ids: [*ids[:4], ids[5], ids[4], *ids[6:]], 4),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def answers(model):
    return greedy(model, PROMPTS, NUM_TOKENS).tokens


def config_of(dtype: Dtype = Dtype.FP32, kv_dtype: Dtype = Dtype.AUTO) -> DeployConfig:
    return DeployConfig(
        pools=(PoolConfig(name="all", role=Role.MIXED, dtype=dtype, kv_dtype=kv_dtype),)
    )


@pytest.mark.parametrize(
    "dtypes", [(Dtype.FP32, Dtype.AUTO), (Dtype.FP32, Dtype.FP16), (Dtype.BF16, Dtype.AUTO)]
)
def test_what_the_model_generates_is_right_in_any_dtype(dtypes, model, answers):
    key = AnswerKey(model, config_of(*dtypes))
    assert [key.wrong_at(*pair) for pair in zip(PROMPTS, answers, strict=True)] == [None] * 3
    assert None not in [key.wrong_at(PROMPTS[i - 1], answers[i]) for i in range(3)]


@pytest.mark.parametrize("how", SPOILT)
def test_a_token_that_is_wrong_is_found_where_it_stands(how, model, answers):
    key = AnswerKey(model, config_of())
    spoil, at = SPOILT[how]
    assert [key.wrong_at(*pair) for pair in zip(PROMPTS, map(spoil, answers), strict=True)] == (
        [at] * 3
    )


def test_a_call_that_got_a_wrong_token_has_failed_and_none_may(model, answers):
    """Also one that ends while nobody could have served it: that is no reason."""
    doors = FakeDoors()
    doors.config = config_of()
    size = fault_table.FaultTableSize()
    table = fault_table._Table(make_site(model), doors, "1P+1D", size)
    right = Call(started=0.0, ended=1.0, prompt_ids=tuple(PROMPTS[0]), output_ids=tuple(answers[0]))
    other = dataclasses.replace(right, output_ids=tuple(answers[1]))
    failed = Call(started=0.0, ended=1.0, error="no_worker", prompt_ids=tuple(PROMPTS[0]))
    marked = table._marked([right, other, failed])
    assert [call.error for call in marked] == ["", "wrong_token", "no_worker"]
    story = fault_table._Story(marked[:2], 0.0, 0.5, 2.0)
    assert table._failed(story, "a fault", fault_table._NONE).holds is False
    assert table._untyped(story.calls, "a fault").holds is False
