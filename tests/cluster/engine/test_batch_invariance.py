"""A request draws the same tokens whatever runs beside it, on the real model in fp32 (P-14)."""

import random
from dataclasses import replace

import pytest

from cluster.request import FinishReason, SamplingParams
from tests.factories_runner import make_prompts

NUM_TOKENS = 20
NUM_REPEATS = 5
"""Of each target in each kind of company."""
PLAIN = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, num_logprobs=0)
SEEDED = replace(PLAIN, temperature=0.9, seed=42)
TARGETS = {
    "greedy": PLAIN,
    "seeded, penalties": replace(
        SEEDED, top_p=0.95, presence_penalty=0.5, repetition_penalty=1.2
    ),
    "every rule": replace(
        SEEDED, temperature=1.3, top_k=80, min_p=1e-4, frequency_penalty=0.7,
        repetition_penalty=1.4, logit_bias=((7, 6.0), (8, -100.0)), num_logprobs=4,
        prompt_logprobs=True,
    ),
    "stopped": replace(SEEDED, stop_token_ids=tuple(range(5, 512, 11)), min_tokens=6),
}  # fmt: skip
COMPANY = {
    "together": {"num_blocks": 600},
    "recomputed": {"num_blocks": 40},
    "swapped": {"num_blocks": 40, "swap_slots": 120},
    "begun alike": {"num_blocks": 600, "has_prefix_cache": True},
}
"""Beside whom: with blocks for all; with so few that some lose theirs; with the same beginning."""
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
    """The target in company, whose members come at (step, prompt, params); it comes at step 2."""
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
    return target


def told_of(engine, target):
    """Its tokens, why it ended, which tokens were the best, and all logprobs."""
    outputs = engine.log.logprobs[target.key]
    prompt = engine.log.prompt_logprobs.get(target.key, [])
    top = [[token_id for token_id, _ in each.top] for each in outputs]
    values = [each.logprob for each in (*prompt, *outputs)]
    values += [value for each in outputs for _, value in each.top]
    return engine.tokens(target), engine.end(target).finish_reason, top, values


def make_company(dice, kind, repeat):
    """1 to 15 of them, staggered, of any length, some of them gone soon."""
    number = 15 if repeat == 0 else dice.randint(1, 15)
    prompts = make_prompts([dice.randint(1, 70) for _ in range(number)], seed=repeat)
    if kind == "begun alike":
        prompts = [[*PROMPT[: dice.randint(8, 36)], *prompt] for prompt in prompts]
    company = [(dice.randint(0, 12), prompt, companion_params(dice)) for prompt in prompts]
    if COMPANY[kind]["num_blocks"] < 100:
        # Older than the target, and with it too much for the blocks before it is through.
        growing = replace(companion_params(dice), max_tokens=40, min_tokens=40, stop_token_ids=())
        company += [(0, prompt, growing) for prompt in make_prompts([30] * 3, seed=100 + repeat)]
    return company


@pytest.mark.parametrize("kind", COMPANY)
@pytest.mark.parametrize("name", TARGETS)
def test_companions_change_no_token(make_model_engine, name, kind):
    """P-14, P-15: nor when it ends, nor a logprob, whoever it shares steps, blocks or prefix with.

    In each step's batch are whole prompts, chunks of them, decodes and what is computed again.
    """
    params = TARGETS[name]
    alone = make_model_engine()
    *expected, logprobs = told_of(alone, run_target(alone, params))
    assert (expected[1] is FinishReason.STOP) == (name == "stopped")
    dice = random.Random(f"{name}, {kind}")
    sizes, num_given_way, num_found = set(), 0, 0
    for repeat in range(NUM_REPEATS):
        engine = make_model_engine(
            max_num_seqs=16, chunk_tokens=dice.choice([0, 7, 32]), **COMPANY[kind]
        )
        target = run_target(engine, params, make_company(dice, kind, repeat))
        *ours, values = told_of(engine, target)
        assert ours == expected
        assert values == pytest.approx(logprobs, abs=1e-3)
        engine.run_to_end()
        sizes.update(len(batch.tokens) for batch in engine.log.batches)
        num_given_way += engine.end(target).num_preemptions
        num_found += sum(end.num_cached_tokens for end in engine.log.ends.values())
        engine.pool.check()
    assert max(sizes) > 4, "they were not together"
    assert (num_given_way > 0) == (kind in {"recomputed", "swapped"})
    assert (num_found > 0) == (kind == "begun alike")
