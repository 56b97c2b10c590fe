"""The aging bound between the chunks of prompts that have begun."""

from __future__ import annotations

import itertools

import pytest

from cluster.config import Policy
from cluster.engine.rules import Rules
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from tests.factories import Engine

AGING_S, STEP_S = 1.0, 0.01
BUDGET, NUM_PROMPT, NUM_RIVAL = 24, 200, 100


@pytest.mark.parametrize("preempts", [True, False], ids=["preempts", "off"])
@pytest.mark.parametrize("is_fair", [False, True], ids=["", "fair"])
@pytest.mark.parametrize("chunk_tokens", [16, 0], ids=["chunked", "whole"])
@pytest.mark.parametrize("policy", [Policy.PRIORITY, Policy.SJF])
def test_a_prompt_that_has_aged_gets_the_next_chunks(policy, chunk_tokens, is_fair, preempts):
    """P-13: however many of a higher tier, or with less to do, come all the time."""
    ordering = Ordering(policy=policy, num_tiers=2, aging_s=AGING_S, is_fair=is_fair)
    rules = Rules(
        ordering=ordering, tiers=Tiers(names=("low", "high"), default="low"), preempts=preempts
    )
    engine = Engine(rules=rules, num_blocks=2000, chunk_tokens=chunk_tokens, token_budget=BUDGET)
    old = engine.add("old", priority="low", num_prompt_tokens=NUM_PROMPT, tenant="a")
    came_at = engine.clock.now()
    engine.step()
    numbers, rivals = itertools.count(), []
    while not old.output_ids:
        while engine.scheduler.num_waiting < 1:
            name = f"rival {next(numbers)}"
            rivals.append(
                engine.add(name, priority="high", num_prompt_tokens=NUM_RIVAL, tenant="b")
            )
        engine.step()
        engine.clock.advance(STEP_S)
        # By itself it takes a chunk a step; those who come with it may have aged a step before it.
        own_s = STEP_S * (NUM_PROMPT // (chunk_tokens or BUDGET) + 2)
        assert engine.clock.now() - came_at <= AGING_S + 2 * own_s, old.num_computed_tokens
    assert any(rival.output_ids for rival in rivals), "they went before it until then"
