"""Imports of higher tiers that lack blocks: they take them from lower ones that decode."""

import dataclasses

import pytest

from cluster.config import Policy
from cluster.engine.rules import Rules
from cluster.engine.sequence import SequenceState
from cluster.handoff import AbortCause
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from tests.factories import expected_tokens, make_key
from tests.lifecycle.pair import MAX_TOKENS, Pair

TIERS = Tiers(names=("low", "normal", "high"), default="normal")
BY_TIER = Rules(ordering=Ordering(policy=Policy.PRIORITY, num_tiers=3), tiers=TIERS)


async def start_lows(pair: Pair, count: int = 2, **fields) -> list:
    """Low ones that decode, and have taken the pool's blocks but for a few."""
    names = [f"low{i}" for i in range(count)]
    for name in names:
        pair.start(name, priority="low", num_prompt_tokens=20, max_tokens=16, **fields)
    await pair.prefill_all()
    await pair.step_decode(2)
    return [pair.d_engine.scheduler._live[make_key(name)] for name in names]


async def test_an_import_of_a_higher_tier_takes_blocks_of_the_lowest_tiers_youngest():
    """P-15: blocks come from who decodes; all of them end as undisturbed ones."""
    pair = Pair(d_blocks=14, rules=BY_TIER)
    lows = await start_lows(pair)
    assert pair.d_pool.num_free < 5
    pair.start("high", priority="high", num_prompt_tokens=20)
    await pair.prefill_all()
    assert pair.decode.inbox.num_waiting == 1
    await pair.step_decode()
    assert [low.num_preemptions for low in lows] == [0, 1]
    assert pair.decode.inbox.num_waiting == 0
    await pair.run_dry()
    for name, length in {"low0": 16, "low1": 16, "high": MAX_TOKENS}.items():
        assert pair.d_sink.output(make_key(name)) == expected_tokens(name, length)
    assert pair.d_pool.demand is None
    pair.assert_idle()


@pytest.mark.parametrize("tiers", [("low", "low"), ("high", "high"), ("high", "low")])
async def test_equals_and_higher_ones_give_no_blocks_to_an_import(tiers):
    pair = Pair(d_blocks=14, rules=BY_TIER)
    for i in range(2):
        pair.start(f"r{i}", priority=tiers[0], num_prompt_tokens=20, max_tokens=4)
    await pair.prefill_all()
    await pair.step_decode()
    pair.start("late", priority=tiers[1], num_prompt_tokens=20)
    await pair.prefill_all()
    assert pair.decode.inbox.num_waiting == 1
    await pair.run_dry()
    assert pair.d_engine.scheduler.num_preemptions == 0
    assert pair.d_sink.output(make_key("late")) == expected_tokens("late", MAX_TOKENS)
    pair.assert_idle()


async def test_two_imports_of_a_higher_tier_take_from_one_each():
    pair = Pair(d_blocks=14, rules=BY_TIER)
    lows = await start_lows(pair)
    for name in ("h0", "h1"):
        pair.start(name, priority="high", num_prompt_tokens=20)
    await pair.prefill_all()
    await pair.step_decode(3)
    assert [low.num_preemptions for low in lows] == [1, 1]
    await pair.run_dry()
    for name in ("low0", "low1"):
        assert pair.d_sink.output(make_key(name)) == expected_tokens(name, 16)
    pair.assert_idle()


async def test_nothing_is_taken_from_those_that_were_preempted_often_enough():
    pair = Pair(d_blocks=14, rules=dataclasses.replace(BY_TIER, max_preemptions=0))
    pair.start("low", priority="low", num_prompt_tokens=40, max_tokens=8)
    await pair.prefill_all()
    await pair.step_decode()
    pair.start("high", priority="high", num_prompt_tokens=20)
    await pair.prefill_all()
    await pair.step_decode()
    assert pair.decode.inbox.num_waiting == 1
    await pair.run_dry()
    assert pair.d_engine.scheduler.num_preemptions == 0
    assert pair.d_sink.output(make_key("high")) == expected_tokens("high", MAX_TOKENS)
    pair.assert_idle()


async def test_nothing_is_taken_from_those_that_have_aged():
    """P-16: nor is the control plane told that anything could be."""
    pair = Pair(d_blocks=14, rules=BY_TIER)
    lows = await start_lows(pair)
    pair.clock.advance(BY_TIER.ordering.aging_s)
    holdings = pair.d_engine.scheduler.holdings(pair.clock.now())
    assert (holdings.giving, holdings.firm) == ((), {low.key for low in lows})
    pair.start("high", priority="high", num_prompt_tokens=20)
    await pair.prefill_all()
    await pair.step_decode()
    assert pair.decode.inbox.num_waiting == 1
    assert [low.num_preemptions for low in lows] == [0, 0]
    await pair.run_dry()
    for name, length in {"low0": 16, "low1": 16, "high": MAX_TOKENS}.items():
        assert pair.d_sink.output(make_key(name)) == expected_tokens(name, length)
    pair.assert_idle()


async def test_whoever_lacks_as_much_as_the_one_before_asks_anew():
    """Else an engine that had nothing to compute meanwhile would sleep on."""
    pair = Pair(d_blocks=14, rules=BY_TIER)
    await start_lows(pair)
    asked = []
    pair.d_pool.subscribe(lambda: asked.append(pair.d_pool.demand))
    for name in ("h0", "h1"):
        pair.start(name, priority="high", num_prompt_tokens=20)
    await pair.prefill_all()
    demand = asked[-1]
    assert demand is not None
    asked.clear()
    await pair.step_decode()
    assert pair.decode.inbox.num_waiting == 1
    assert asked[-1] == demand
    assert None in asked
    await pair.run_dry()
    pair.assert_idle()


async def test_an_import_of_a_higher_tier_passes_those_that_wait_and_leaves_them_their_turn():
    pair = Pair(d_blocks=14, rules=BY_TIER)
    pair.d_pool.allocate(8, "another")
    pair.start("low", priority="low", num_prompt_tokens=28)
    await pair.prefill_all()
    pair.start("high", priority="high", num_prompt_tokens=16)
    await pair.prefill_all()
    assert pair.decode.inbox.num_waiting == 1, "high has its blocks"
    pair.d_pool.release("another")
    await pair.run_dry()
    for name in ("low", "high"):
        assert pair.d_sink.output(make_key(name)) == expected_tokens(name, MAX_TOKENS)
    pair.assert_idle()


@pytest.mark.parametrize("gone", ["high", "low0", "low1"])
async def test_whoever_is_cancelled_while_blocks_change_hands_leaves_nothing(gone):
    """The one that took them, one that kept its own, and the one that gave way."""
    pair = Pair(d_blocks=14, rules=BY_TIER)
    lows = await start_lows(pair)
    pair.start("high", priority="high", num_prompt_tokens=20)
    await pair.prefill_all()
    await pair.step_decode()
    assert [low.num_preemptions for low in lows] == [0, 1]
    pair.decode.abort_leg(make_key(gone), AbortCause.CANCELLED)
    await pair.run_dry()
    for name, length in {"low0": 16, "low1": 16, "high": MAX_TOKENS}.items():
        if name != gone:
            assert pair.d_sink.output(make_key(name)) == expected_tokens(name, length)
    assert pair.d_pool.demand is None
    pair.assert_idle()


@pytest.mark.parametrize("is_taken", [False, True], ids=["asked for", "taken"])
async def test_what_is_taken_for_an_import_that_is_lost_on_its_way_goes_back(is_taken):
    """The prefill worker dies: who gave way runs again, and nobody asks for anything."""
    pair = Pair(d_blocks=14, rules=BY_TIER)
    lows = await start_lows(pair)
    pair.wire.holds_bytes = True
    pair.start("high", priority="high", num_prompt_tokens=20)
    await pair.prefill_all()
    assert pair.decode.inbox.num_waiting == 1
    if is_taken:
        await pair.step_decode()
        assert [low.num_preemptions for low in lows] == [0, 1]
        assert pair.decode.inbox.num_transferring == 1
    pair.stop_prefill()
    await pair.settle()
    assert pair.d_pool.demand is None
    await pair.step_decode()
    assert [low.num_preemptions for low in lows] == [0, int(is_taken)]
    assert [low.state for low in lows] == [SequenceState.RUNNING] * 2
    await pair.run_dry()
    for name in ("low0", "low1"):
        assert pair.d_sink.output(make_key(name)) == expected_tokens(name, 16)
    assert pair.d_pool.num_free == pair.d_pool.num_blocks


async def test_who_asked_for_blocks_and_left_asks_no_more():
    pair = Pair(d_blocks=14, rules=BY_TIER)
    pair.d_pool.allocate(12, "another")
    pair.start("high", priority="high", num_prompt_tokens=20)
    await pair.prefill_all()
    assert pair.d_pool.demand is not None
    pair.decode.abort_leg(make_key("high"), AbortCause.CANCELLED)
    await pair.settle()
    assert pair.d_pool.demand is None
    pair.d_pool.release("another")
    await pair.run_dry()
    pair.assert_idle()
