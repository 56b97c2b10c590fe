"""A request draws the same tokens whatever runs beside it, on the real model in fp32 (P-14)."""

import random
from dataclasses import replace

import pytest

from cluster.request import SamplingParams
from tests.factories_runner import make_prompts

NUM_TOKENS = 20
NUM_REPEATS = 20
PLAIN = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, num_logprobs=0)
TARGETS = {
    "greedy": PLAIN,
    "seeded, penalties": replace(
        PLAIN, temperature=0.9, seed=42, top_p=0.95, presence_penalty=0.5, repetition_penalty=1.2
    ),
}
[PROMPT] = make_prompts([37], seed=14)


def companion_params(dice):
    """Rules that would show in a neighbour's row: each picks some of them."""
    params = SamplingParams(
        max_tokens=dice.choice([1, 2, 5, 12, 30]),
        temperature=dice.choice([0.0, 0.7, 1.8]),
        seed=dice.randrange(1 << 30),
    )
    kinds = (
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 1.8},
        {"logit_bias": tuple((token, 50.0) for token in dice.sample(range(3, 512), 5))},
        {"top_k": 3},
        {"min_tokens": 1, "stop_token_ids": tuple(range(100, 400))},
        {"num_logprobs": 3},
    )
    for fields in dice.sample(kinds, dice.randint(0, 3)):
        params = replace(params, **fields)
    return params


def run_target(engine, params, companions=()):
    """The target's tokens and logprobs; companions come at (step, prompt, params)."""
    target, number = None, 0
    left = sorted(companions, key=lambda each: each[0])
    while target is None or target.key not in engine.log.ends:
        while left and left[0][0] <= number:
            _, prompt, other = left.pop(0)
            engine.add(f"c{len(left)}", prompt_ids=tuple(prompt), params=other)
        if target is None and number >= 2 * bool(companions):
            target = engine.add(
                "target", prompt_ids=tuple(PROMPT), params=params, eos_ids=frozenset()
            )
        engine.step()
        number += 1
    return engine.tokens(target), [entry.logprob for entry in engine.log.logprobs[target.key]]


@pytest.mark.parametrize("name", TARGETS)
def test_companions_change_no_token(make_model_engine, name):
    """P-14: 1 to 15 of them, staggered, of any length, some of them gone soon; 20 times."""
    params = TARGETS[name]
    expected, logprobs = run_target(make_model_engine(), params)
    dice = random.Random(name)
    sizes = set()
    for repeat in range(NUM_REPEATS):
        number = 15 if repeat == 0 else dice.randint(1, 15)
        prompts = make_prompts([dice.randint(1, 70) for _ in range(number)], seed=repeat)
        companions = [(dice.randint(0, 12), p, companion_params(dice)) for p in prompts]
        engine = make_model_engine(
            num_blocks=600, max_num_seqs=16, chunk_tokens=dice.choice([0, 7, 32])
        )
        tokens, ours = run_target(engine, params, companions)
        assert tokens == expected
        assert ours == pytest.approx(logprobs, abs=1e-3)
        engine.run_to_end()
        engine.assert_idle()
        sizes.update(len(batch.tokens) for batch in engine.log.batches)
    assert max(sizes) > 5, "they were not together"
