"""Penalties, bias, bans and min-p against transformers' processors and the definitions."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cluster.model import sampler
from cluster.model.draw import Draw
from cluster.model.logit_rules import apply_logit_rules
from cluster.model.sampler import gumbel_noise, sample
from cluster.request import SamplingParams

VOCAB_SIZE = 500
PROMPT, OUTPUT = (3, 9, 9, 40, 41), (9, 7, 7, 7, 200)


def make_draw(*, prompt_ids=PROMPT, output_ids=OUTPUT, banned_ids=(), index=5, **params) -> Draw:
    params = SamplingParams(max_tokens=99, **({"temperature": 0.0} | params))
    return Draw(
        params=params, choice=0, output_index=index,
        prompt_ids=prompt_ids, output_ids=output_ids, banned_ids=banned_ids,
    )  # fmt: skip


def ruled(logits, **options):
    """One row's logits after its rules."""
    row = logits[None].clone()
    apply_logit_rules(row, [make_draw(**options)])
    return row[0]


@pytest.fixture
def logits():
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 3


@pytest.mark.parametrize("penalty", [0.3, 1.1, 2.0])
def test_repetition_is_penalised_as_transformers_does(logits, penalty):
    ids = torch.tensor([[*PROMPT, *OUTPUT]])
    [expected] = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[None].clone())
    assert torch.allclose(ruled(logits, repetition_penalty=penalty), expected)


def test_frequency_and_presence_look_at_the_output_alone(logits):
    expected = logits.clone()
    for token_id, count in ((9, 1), (7, 3), (200, 1)):
        expected[token_id] -= 0.5 * count + 1.5
    changed = ruled(logits, frequency_penalty=0.5, presence_penalty=1.5)
    assert torch.allclose(changed, expected)
    assert torch.equal(ruled(logits, presence_penalty=1.0, output_ids=()), logits)


def test_negative_penalties_raise(logits):
    assert float(ruled(logits, presence_penalty=-2.0)[7] - logits[7]) == pytest.approx(2.0)


def test_bias_is_added_after_penalties_and_bans_come_last(logits):
    ids = torch.tensor([[*PROMPT, *OUTPUT]])
    [expected] = RepetitionPenaltyLogitsProcessor(1.5)(ids, logits[None].clone())
    expected[7] += 4.0 - 3 * 1.0
    expected[300] += -100.0
    bias = ((7, 4.0), (8, 5.0), (300, -100.0))
    changed = ruled(
        logits, repetition_penalty=1.5, frequency_penalty=1.0, logit_bias=bias, banned_ids=(8, 8)
    )
    for token_id in (3, 7, 300, 499):
        assert float(changed[token_id]) == pytest.approx(float(expected[token_id]), abs=1e-4)
    assert changed[8] == changed.min()


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-5, 1.1e-5, 2.0])
def test_extreme_rules_never_make_infinities(logits, temperature):
    """P-03: nothing overflows, and what is ruled out is not drawn."""
    logits[7], logits[9] = 1e20, float("-inf")
    bias = tuple((i, 100.0) for i in range(20))
    options = {
        "temperature": temperature, "repetition_penalty": 1e-45, "logit_bias": bias,
        "presence_penalty": 2.0, "banned_ids": (3,), "top_p": 0.9, "min_p": 0.1,
    }  # fmt: skip
    changed = ruled(logits, **options)
    assert torch.isfinite(changed).all()
    drawn = [sample(logits[None], [make_draw(index=i, **options)])[0] for i in range(20)]
    assert 3 not in drawn
    assert 9 not in drawn


def test_a_row_with_every_token_banned_still_draws_one(logits):
    """One row's bad wishes are no fault of the step that others share."""
    draws = [make_draw(banned_ids=tuple(range(VOCAB_SIZE)), temperature=1.0), make_draw()]
    tokens = sample(logits.expand(2, -1), draws)
    assert 0 <= tokens[0] < VOCAB_SIZE
    assert tokens[1] == int(logits.argmax())


def test_ids_outside_the_vocabulary_are_passed_over(logits):
    changed = ruled(logits, logit_bias=((VOCAB_SIZE, 5.0),), banned_ids=(VOCAB_SIZE, 1 << 31))
    assert torch.equal(changed, logits)


@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
def test_min_p_keeps_what_transformers_keeps(logits, min_p):
    flat = logits / 4
    kept = torch.isfinite(MinPLogitsWarper(min_p)(None, flat[None].clone())[0])
    draws = [make_draw(index=i, temperature=1.0, min_p=min_p) for i in range(3000)]
    drawn = set(sample(flat.expand(3000, -1), draws))
    assert drawn <= set(kept.nonzero()[:, 0].tolist())
    assert len(drawn) >= min(int(kept.sum()), 300) * 0.8


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.7, 50, 0.9, 0.02), (1.5, 0, 0.8, 0.1), (1.0, 20, 1.0, 0.0), (2.0, 400, 0.99, 0.001)],
)
def test_limits_apply_in_transformers_order(logits, temperature, top_k, top_p, min_p):
    """The draw is the best of transformers' warped scores with our noise on them."""
    warpers = [TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)]
    if top_k:
        warpers.insert(1, TopKLogitsWarper(top_k))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    scores = logits[None].clone()
    for warper in warpers:
        scores = warper(None, scores)
    draws = [
        make_draw(index=i, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for i in range(300)
    ]
    noise = gumbel_noise(draws, VOCAB_SIZE, logits.device)
    expected = (scores.log_softmax(-1) + noise).argmax(-1).tolist()
    assert sample(logits.expand(300, -1), draws) == expected


def test_rules_reach_their_own_row_only(logits):
    """P-14: among others with rules of every kind, a row draws what it draws alone."""
    kinds = [
        {}, {"temperature": 0.9}, {"repetition_penalty": 2.0, "temperature": 0.8},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0}, {"banned_ids": (1, 2, 3)},
        {"logit_bias": ((0, 100.0),)}, {"temperature": 1.2, "min_p": 0.2, "top_k": 5},
    ]  # fmt: skip
    draws = [make_draw(**kind) for kind in kinds]
    rows = torch.stack([logits.roll(shift) for shift in range(len(kinds))])
    before = rows.clone()
    together = sample(rows, draws)
    assert torch.equal(rows, before)
    assert together == [sample(rows[i : i + 1], [draws[i]])[0] for i in range(len(kinds))]
    order = [3, 6, 0, 5, 2, 1, 4]
    shuffled = sample(rows[order], [draws[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_rows_without_rules_are_not_copied_for_those_with(logits, monkeypatch):
    shapes = []

    def noted(logits_RV, draws):
        shapes.append((tuple(logits_RV.shape), len(draws)))
        apply_logit_rules(logits_RV, draws)

    monkeypatch.setattr(sampler, "apply_logit_rules", noted)
    sample(logits.expand(4, -1), [make_draw() for _ in range(4)])
    assert shapes == []
    ruled_draw = make_draw(presence_penalty=1.0)
    sample(logits.expand(4, -1), [make_draw(), ruled_draw, make_draw(temperature=1.0), make_draw()])
    assert shapes == [((1, VOCAB_SIZE), 1)]
