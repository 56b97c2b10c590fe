"""Log-probabilities: the model's own, the best ones in order, finite whatever the model says."""

import pytest
import torch

from cluster.model.logprobs import token_logprobs
from cluster.request import LOGPROB_FLOOR

VOCAB_SIZE = 300


@pytest.fixture
def logits():
    return torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 5


def test_they_are_the_log_softmax_with_the_best_in_order(logits):
    """P-07: 0 tells the chosen one only."""
    expected = logits.double().log_softmax(-1)
    entries = token_logprobs(logits, [5, 6, 7, 8], [0, 1, 20, 3])
    for row, (entry, token_id, num_top) in enumerate(
        zip(entries, [5, 6, 7, 8], [0, 1, 20, 3], strict=True)
    ):
        assert entry.logprob == pytest.approx(float(expected[row, token_id]), abs=1e-5)
        assert [i for i, _ in entry.top] == expected[row].topk(num_top).indices.tolist()
        values = [value for _, value in entry.top]
        assert values == pytest.approx(expected[row].topk(num_top).values.tolist(), abs=1e-5)


def test_the_chosen_token_among_the_best_has_the_same_value(logits):
    best = int(logits[0].argmax())
    [entry] = token_logprobs(logits[:1], [best], [5])
    assert entry.top[0] == (best, entry.logprob)


def test_ties_are_told_by_token_id():
    [entry] = token_logprobs(torch.zeros(1, 5), [3], [5])
    assert [i for i, _ in entry.top] == [0, 1, 2, 3, 4]


def test_more_than_the_vocabulary_is_the_vocabulary():
    [entry] = token_logprobs(torch.randn(1, 5), [3], [20])
    assert len(entry.top) == 5


def test_what_the_model_rules_out_has_the_floor(logits):
    logits[0, :] = float("-inf")
    logits[0, 7] = 1.0
    [entry] = token_logprobs(logits[:1], [9], [2])
    assert entry.logprob == LOGPROB_FLOOR
    assert entry.top[0] == (7, 0.0)
    assert entry.top[1][1] == LOGPROB_FLOOR


def test_a_row_alone_is_the_row_among_others(logits):
    """P-14."""
    together = token_logprobs(logits, [1, 2, 3, 4], [5, 0, 20, 2])
    for row, (token_id, num) in enumerate(zip([1, 2, 3, 4], [5, 0, 20, 2], strict=True)):
        [alone] = token_logprobs(logits[row : row + 1], [token_id], [num])
        assert alone.logprob == pytest.approx(together[row].logprob, abs=1e-6)
        assert [i for i, _ in alone.top] == [i for i, _ in together[row].top]
