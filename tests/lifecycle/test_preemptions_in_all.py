"""How often a request is preempted is bounded over all its workers and attempts, not on each."""

from dataclasses import replace

import pytest

from cluster.config import Policy
from cluster.engine.rules import Rules
from cluster.handoff import AbortCause, AbortHandoff
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from tests.factories import expected_tokens, make_key
from tests.lifecycle.pair import MAX_TOKENS, Pair

TIERS = Tiers(names=("low", "normal", "high"), default="normal")
BY_TIER = Rules(ordering=Ordering(policy=Policy.PRIORITY, num_tiers=3), tiers=TIERS)
LOW = make_key("low")
SIZES = {"priority": "low", "num_prompt_tokens": 32, "max_tokens": 16}


def live(engine, key=LOW):
    return engine.scheduler._live[key]


async def preempt_in_prefill(pair: Pair) -> None:
    """Start the low one, and let a high one take its blocks between two of its chunks."""
    pair.start("low", **SIZES)
    await pair.step_prefill(2)
    assert 0 < live(pair.p_engine).num_computed_tokens < 32
    pair.start("urgent", priority="high", num_prompt_tokens=24)
    while not live(pair.p_engine).num_preemptions:
        await pair.step_prefill()


async def test_it_is_bounded_over_prefill_decode_and_another_worker():
    """P-15: preempted in both halves it has given way twice, and gives nothing on the third."""
    rules = replace(BY_TIER, max_preemptions=2)
    pair = Pair(p_blocks=10, d_blocks=16, rules=rules, p_rules=rules)

    # STEP 1: the prefill half, between two chunks.
    await preempt_in_prefill(pair)
    assert pair.p_sink.num_preemptions[LOW] == 1
    await pair.run_dry_of("urgent")

    # STEP 2: the decode half, which was told with the KV.
    await pair.prefill_all()
    await pair.step_decode()
    low = live(pair.d_engine)
    assert (low.num_preemptions_before, low.num_preemptions) == (1, 0)
    pair.start("high", priority="high", num_prompt_tokens=36)
    await pair.prefill_all()
    await pair.step_decode()
    assert pair.d_sink.num_preemptions[LOW] == low.num_preemptions_in_all == 2
    await pair.run_dry_of("high")

    # STEP 3: there it gives nothing more, and holds all that it may come to need.
    while not low.block_ids:
        await pair.step_decode()
    assert len(low.block_ids) == (32 + 16) // 4
    assert pair.d_engine.scheduler.holdings(pair.clock.now()).firm == {LOW}
    pair.start("late", priority="high", num_prompt_tokens=20)
    await pair.prefill_all()
    await pair.step_decode(2)
    assert pair.decode.inbox.num_waiting == 1
    assert low.num_preemptions == 1
    output = pair.d_sink.output(LOW)

    # STEP 4: nor on the worker that goes on with it, to which the router brings what it heard.
    pair.decode.abort_leg(LOW, AbortCause.FAULT)
    side = pair.add_decode("e", num_blocks=16)
    resumed = {**SIZES, "output_ids": tuple(output), "num_preemptions": 2}
    again = make_key("low", attempt=1)
    pair.start_local("low", on="e", key=again, **resumed)
    side.engine.step()
    assert side.engine.scheduler.holdings(pair.clock.now()).firm == {again}
    pair.start_local("most urgent", on="e", priority="high", num_prompt_tokens=20)
    side.engine.step()
    assert live(side.engine, again).num_preemptions == 0
    await pair.run_dry()
    assert [*output, *side.sink.output(again)] == expected_tokens("low", 16)
    assert side.engine.scheduler.num_preemptions == 0
    pair.assert_idle()


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
async def test_one_that_reaches_the_bound_in_its_prefill_gets_all_its_blocks_where_it_decodes(
    streams,
):
    """What was reserved before is too little for one that will never give way again."""
    rules = replace(BY_TIER, max_preemptions=1)
    pair = Pair(p_blocks=10, d_blocks=16, rules=rules, p_rules=rules, streams=streams)
    await preempt_in_prefill(pair)
    await pair.prefill_all()
    assert pair.decode.inbox.counts["refused"] == 1
    (notice,) = [told for told in pair.p_sink.waiting if told.key == LOW]
    assert notice.error.message == "no room for 8 blocks and all that may come"
    assert pair.p_sink.num_preemptions[LOW] == 1

    # The next handoff says how often it was preempted before anything is reserved for it.
    await pair.run_dry_of("urgent")
    pair.redirect("d", "low", **SIZES)
    await pair.prefill_all()
    await pair.step_decode()
    low = live(pair.d_engine)
    assert (low.num_preemptions_before, len(low.block_ids)) == (1, 12)
    assert pair.d_engine.scheduler.holdings(pair.clock.now()).firm == {LOW}
    pair.start("high", priority="high", num_prompt_tokens=20)
    await pair.prefill_all()
    await pair.step_decode(2)
    assert pair.decode.inbox.num_waiting == 1
    await pair.run_dry()
    assert low.num_preemptions == pair.d_engine.scheduler.num_preemptions == 0
    assert pair.d_sink.output(LOW) == expected_tokens("low", 16)
    pair.assert_idle()


async def let_give_way(pair, sizes, *, is_computed: bool) -> None:
    """Let the import of ``low``, computed wholly or in part, give way to one of a higher tier."""
    pair.start("low", **sizes)
    await pair.step_prefill()
    if is_computed:
        await pair.prefill_all()
    pair.start("high", priority="high", num_prompt_tokens=20)
    while not pair.decode.inbox.num_waiting:
        await pair.step_prefill()
    await pair.step_decode()


@pytest.mark.parametrize("is_computed", [True, False], ids=["exported", "still computed"])
async def test_one_whose_import_gave_way_as_often_as_it_may_keeps_its_export(is_computed):
    """P-15: the prefill worker is told with the refusal, and counts on from there."""
    rules = replace(BY_TIER, max_preemptions=1)
    pair = Pair(p_blocks=20, d_blocks=12, rules=rules, p_rules=rules)
    pair.wire.holds_landing = True
    sizes = {"priority": "low", "num_prompt_tokens": 40}
    await let_give_way(pair, sizes, is_computed=is_computed)
    assert pair.d_sink.num_preemptions[LOW] == 1
    opened = pair.prefill.book.get(LOW)
    assert opened.leg.num_preemptions == 1
    if not is_computed:
        assert live(pair.p_engine).num_preemptions_in_all == 1
        assert pair.p_engine.scheduler.holdings(pair.clock.now()).firm == {LOW}
    pair.wire.let_go()
    await pair.prefill_all()

    # What comes finds too little, and nobody who gives.
    pair.start_prefill("urgent", priority="high", num_prompt_tokens=60)
    await pair.step_prefill(2)
    assert pair.p_engine.scheduler.num_waiting == 1
    assert pair.p_pool.outside.asked() == []
    assert pair.prefill.outbox.counts["gave_way"] == 0
    pair.redirect("d", "low", **sizes, num_preemptions=1)
    pair.start_decode("urgent", priority="high", num_prompt_tokens=60)
    pair.add_decode("e")
    await pair.run_dry_of("low")
    assert pair.d_sink.output(LOW) == expected_tokens("low", MAX_TOKENS)
    pair.prefill.abort_leg(make_key("urgent"), AbortCause.CANCELLED)
    pair.decode.abort_leg(make_key("urgent"), AbortCause.CANCELLED)
    await pair.run_dry()
    pair.assert_idle()


@pytest.mark.parametrize("is_computed", [True, False], ids=["exported", "still computed"])
async def test_where_the_refusal_is_lost_with_its_link_the_redirect_tells_of_it(is_computed):
    """P-15: only the router heard that its import gave way; it goes on counting from there."""
    rules = replace(BY_TIER, max_preemptions=1)
    pair = Pair(p_blocks=20, d_blocks=12, rules=rules, p_rules=rules)
    pair.wire.holds_landing = True
    pair.wire.hold = {AbortHandoff}
    sizes = {"priority": "low", "num_prompt_tokens": 40}
    await let_give_way(pair, sizes, is_computed=is_computed)
    opened = pair.prefill.book.get(LOW)
    assert (pair.d_sink.num_preemptions[LOW], opened.leg.num_preemptions) == (1, 0)
    pair.wire.cut("cut")
    await pair.settle()
    pair.decode.abort_leg(make_key("high"), AbortCause.FAULT)
    pair.prefill.abort_leg(make_key("high"), AbortCause.FAULT)
    pair.new_wire()
    pair.wire.holds_landing = True

    pair.redirect("d", "low", **sizes, num_preemptions=1)
    assert opened.leg.num_preemptions == 1
    if not is_computed:
        assert live(pair.p_engine).num_preemptions_in_all == 1
        assert pair.p_engine.scheduler.holdings(pair.clock.now()).firm == {LOW}
    pair.start_prefill("urgent", priority="high", num_prompt_tokens=60)
    await pair.step_prefill(2)
    assert pair.p_pool.outside.asked() == []
    assert pair.p_engine.scheduler.num_preemptions == 0
    pair.prefill.abort_leg(make_key("urgent"), AbortCause.CANCELLED)
    pair.wire.let_go()
    await pair.run_dry_of("low")
    assert pair.d_sink.output(LOW) == expected_tokens("low", MAX_TOKENS)
    await pair.run_dry()
    pair.assert_idle()


async def test_a_reservation_is_spared_once_its_prefill_was_preempted_too_often():
    rules = replace(BY_TIER, max_preemptions=1)
    pair = Pair(p_blocks=10, d_blocks=16, rules=rules, p_rules=rules)
    # What it may come to need is no more than what was reserved.
    pair.start("low", priority="low", num_prompt_tokens=30, max_tokens=3)
    await pair.step_prefill(2)
    pair.start("urgent", priority="high", num_prompt_tokens=24)
    told = []
    while pair.decode.inbox.counts["committed"] < 2:
        outside = {o.holder: o.num_preemptions for o in pair.d_pool.outside.below(2)}
        told.append(outside[("import", "handoff-low")])
        await pair.step_prefill()
    assert (told[0], told[-1]) == (0, 1)
    await pair.run_dry()
    assert pair.decode.inbox.counts["refused"] == 0
    pair.assert_idle()


async def test_a_leg_that_comes_at_its_bound_reserves_for_all_that_may_follow():
    pair = Pair(d_blocks=16, rules=replace(BY_TIER, max_preemptions=2))
    pair.start("low", **SIZES, num_preemptions=2)
    await pair.prefill_all()
    assert len(pair.d_pool.blocks_of(LOW)) == 12
    assert pair.decode.inbox.counts["refused"] == 0
    await pair.run_dry()
    pair.assert_idle()
