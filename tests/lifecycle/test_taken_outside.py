"""Blocks that lower tiers hold outside an engine, as exports or imports, go to higher ones."""

import pytest

from cluster.config import Policy
from cluster.engine.rules import Rules
from cluster.errors import HandoffFailed
from cluster.handoff import AbortCause, Credit, Offer
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from tests.factories import expected_tokens, make_key, make_prompt
from tests.lifecycle.pair import LEASE_S, MAX_TOKENS, PATIENCE_S, Pair

TIERS = Tiers(names=("low", "normal", "high"), default="normal")
BY_TIER = Rules(ordering=Ordering(policy=Policy.PRIORITY, num_tiers=3, aging_s=30.0), tiers=TIERS)
LONG = {"num_prompt_tokens": 20}
"""Five blocks."""


def by_tier(p_rules: Rules = BY_TIER, **fields) -> Pair:
    return Pair(rules=BY_TIER, p_rules=p_rules, **fields)


def is_open(pair: Pair, name: str) -> bool:
    return make_key(name) in pair.prefill.book


async def all_given_back(pair: Pair) -> None:
    """Nothing is kept when its prefill worker has stopped, and its decode worker then."""
    pair.stop_prefill()
    await pair.run_dry()
    pair.stop_decode()
    await pair.run_dry()
    pair.assert_idle()


# ---- exports


async def exported(pair: Pair, *names: str, priority: str = "low", **fields) -> None:
    """Whole ones whose offers got no answer yet; each has arrived a second after the last one."""
    pair.wire.hold = {Offer}
    for name in names:
        pair.clock.advance(1.0)
        pair.start(name, priority=priority, **LONG, **fields)
        await pair.prefill_all()


async def ask(pair: Pair, name: str = "high", priority: str = "high", **fields) -> None:
    """A fresh one that lacks blocks, and whose engine has asked others for theirs."""
    pair.start_prefill(name, priority=priority, **{**LONG, **fields})
    pair.p_engine.step()


def seen_by_engine(pool) -> list[tuple[int, int]]:
    """How many could be asked, and how many blocks are free, whenever it is told of a change."""
    seen = []
    pool.subscribe(lambda: seen.append((len(pool.outside.below(2)), pool.num_free)))
    return seen


async def test_the_blocks_of_an_export_are_free_before_it_leaves():
    """P-15: else the engine would take as many from another."""
    pair = by_tier(p_blocks=8)
    await exported(pair, "low")
    await ask(pair)
    seen = seen_by_engine(pair.p_pool)
    await pair.settle()
    assert seen[-1] == (0, 8)
    assert [free for num_outside, free in seen if not num_outside] == [8]
    await all_given_back(pair)


async def test_an_export_that_is_cancelled_while_it_is_asked_ends_once():
    pair = by_tier(p_blocks=12)
    await exported(pair, "low0", "low1")
    await ask(pair)
    assert pair.p_pool.outside.asked() == [("export", "handoff-low1")]
    pair.prefill.abort_leg(make_key("low1"), AbortCause.CANCELLED)
    pair.decode.abort_leg(make_key("low1"), AbortCause.CANCELLED)
    await pair.settle()
    assert pair.prefill.outbox.counts["gave_way"] == 0
    await pair.step_prefill()
    assert pair.p_engine.scheduler.num_waiting == 0
    assert is_open(pair, "low0")
    pair.start_decode("high", priority="high", **LONG)
    await pair.run_dry()
    assert pair.d_sink.output(make_key("high")) == expected_tokens("high", MAX_TOKENS)
    pair.assert_idle()


async def test_nobody_is_asked_any_more_for_one_that_has_left():
    pair = by_tier(p_blocks=12)
    await exported(pair, "low0", "low1")
    await ask(pair)
    assert pair.p_pool.outside.asked()
    pair.prefill.abort_leg(make_key("high"), AbortCause.CANCELLED)
    pair.p_engine.step()
    assert pair.p_pool.outside.asked() == []
    await pair.settle()
    assert is_open(pair, "low0")
    assert is_open(pair, "low1")
    await pair.run_dry()
    for name in ("low0", "low1"):
        assert pair.d_sink.output(make_key(name)) == expected_tokens(name, MAX_TOKENS)
    pair.assert_idle()


@pytest.mark.parametrize("is_taken", [False, True], ids=["asked", "taken"])
async def test_a_worker_that_dies_while_exports_are_taken_ends_each_leg_once(is_taken):
    pair = by_tier(p_blocks=12)
    await exported(pair, "low0", "low1")
    await ask(pair)
    if is_taken:
        await pair.settle()
        assert not is_open(pair, "low1")
    await all_given_back(pair)
    assert {key.request_id for key in pair.p_sink.ends} == {"low0", "low1", "high"}


async def test_a_link_that_breaks_while_its_export_is_asked_changes_nothing():
    """It waits for a redirect then, and may be taken as before."""
    pair = by_tier(p_blocks=12)
    await exported(pair, "low0", "low1")
    await ask(pair)
    pair.wire.cut()
    await pair.settle()
    assert [key.request_id for key in pair.p_sink.ends] == ["low1"]
    assert [told.key.request_id for told in pair.p_sink.waiting] == ["low0"]
    await pair.step_prefill()
    assert pair.p_engine.scheduler.num_waiting == 0
    await all_given_back(pair)


async def test_no_export_is_taken_twice_and_none_too_many():
    """P-15: two that come at once take the two youngest."""
    pair = by_tier(p_blocks=16)
    await exported(pair, "low0", "low1", "low2")
    for name in ("h0", "h1"):
        pair.start_prefill(name, priority="high", **LONG)
    for _ in range(4):
        await pair.step_prefill()
    ended = [name for name in ("low0", "low1", "low2") if not is_open(pair, name)]
    assert ended == ["low1", "low2"]
    assert pair.prefill.outbox.counts["gave_way"] == 2
    assert pair.p_pool.outside.asked() == []
    await all_given_back(pair)


async def test_an_export_whose_credit_comes_meanwhile_is_let_go_on():
    """Its bytes are not torn: its blocks come free with the COMMIT."""
    pair = by_tier(p_blocks=8)
    pair.wire.hold = {Credit}
    pair.start("low", priority="low", **LONG)
    await pair.prefill_all()
    await ask(pair)
    assert pair.p_pool.outside.asked() == [("export", "handoff-low")]
    pair.wire.let_go()
    pair.wire.deliver()
    await pair.settle()
    assert pair.prefill.outbox.counts["gave_way"] == 0
    assert pair.p_sink.ends[make_key("low")].error is None
    pair.start_decode("high", priority="high", **LONG)
    await pair.run_dry()
    for name in ("low", "high"):
        assert pair.d_sink.output(make_key(name)) == expected_tokens(name, MAX_TOKENS)
    pair.assert_idle()


@pytest.mark.parametrize("waits", ["offered", "refused", "redirected"])
async def test_a_request_of_a_higher_tier_takes_the_blocks_of_an_export_that_waits(waits):
    """P-15: which is computed again, goes on behind its token, and was preempted once."""
    pair = by_tier(p_blocks=8)
    pair.wire.hold = {Offer}
    if waits != "offered":
        pair.wire.hold = set()
        pair.d_pool.allocate(pair.d_pool.num_free, "another")
    pair.start("low", priority="low", **LONG)
    await pair.prefill_all()
    if waits != "offered":
        pair.pass_time(PATIENCE_S)
        await pair.settle()
        pair.d_pool.release("another")
    if waits == "redirected":
        pair.add_decode("e").wire.hold = {Offer}
        pair.redirect("e", "low", priority="low", **LONG)
        await pair.settle()
    key = make_key("low")
    assert is_open(pair, "low")
    await ask(pair)
    await pair.settle()
    end = pair.p_sink.ends.pop(key)
    assert isinstance(end.error, HandoffFailed)
    assert end.error.is_retryable
    assert pair.p_sink.num_preemptions[key] == 1
    await pair.step_prefill()
    assert pair.p_engine.scheduler.num_waiting == 0, "its blocks are high's"
    pair.start_decode("high", priority="high", **LONG)
    await pair.run_dry()
    assert pair.d_sink.output(make_key("high")) == expected_tokens("high", MAX_TOKENS)
    # The router tries again: under another attempt, with what is out.
    (first,) = pair.p_sink.output(key)
    again = {
        "key": make_key("low", attempt=1), "prompt_ids": make_prompt(20, "low"),
        "output_ids": (first,), "handoff_id": "again", "num_preemptions": 1, "priority": "low",
    }  # fmt: skip
    pair.start("low", **again)
    await pair.run_dry()
    outputs = [pair.p_sink.output(key), pair.d_sink.output(again["key"])]
    assert [first, *outputs[1]] == expected_tokens("low", MAX_TOKENS)
    pair.assert_idle()


@pytest.mark.parametrize("kept_by", ["tier", "age", "count"])
async def test_exports_of_equals_and_those_that_have_aged_or_given_way_often_keep_theirs(kept_by):
    """P-16: whoever comes waits for their blocks."""
    pair = by_tier(p_blocks=8)
    priority = "high" if kept_by == "tier" else "low"
    spared = BY_TIER.max_preemptions if kept_by == "count" else 0
    await exported(pair, "first", priority=priority, num_preemptions=spared)
    if kept_by == "age":
        pair.clock.advance(BY_TIER.ordering.aging_s)
    await ask(pair)
    await pair.settle()
    assert pair.p_pool.outside.asked() == []
    assert is_open(pair, "first")
    assert pair.p_engine.scheduler.num_waiting == 1
    pair.start_decode("high", priority="high", **LONG)
    await pair.run_dry()
    for name in ("first", "high"):
        assert pair.d_sink.output(make_key(name)) == expected_tokens(name, MAX_TOKENS)
    pair.assert_idle()


async def test_the_lowest_tiers_youngest_gives_whether_it_is_computed_or_waits():
    """P-15: the engine's own are of a higher tier, or older, than what waits outside."""
    pair = by_tier(p_blocks=22)
    await exported(pair, "low0", "low1")
    pair.clock.advance(1.0)
    pair.start_prefill("normal", priority="normal", num_prompt_tokens=40)
    await pair.step_prefill()
    pair.clock.advance(1.0)
    await ask(pair)
    await pair.settle()
    assert [is_open(pair, name) for name in ("low0", "low1", "normal")] == [True, False, True]
    assert pair.p_engine.scheduler.num_preemptions == 0
    pair.clock.advance(1.0)
    pair.start_prefill("h2", priority="high", num_prompt_tokens=36)
    await pair.step_prefill(3)
    assert not is_open(pair, "low0")
    assert pair.p_engine.scheduler.num_preemptions == 1, "then the normal one's"
    await all_given_back(pair)


async def test_without_tiers_that_take_exports_give_nothing():
    pair = Pair(p_blocks=8, p_rules=Rules(tiers=TIERS))
    await exported(pair, "low")
    await ask(pair)
    await pair.settle()
    assert is_open(pair, "low")
    pair.start_decode("high", priority="high", **LONG)
    await pair.run_dry()
    pair.assert_idle()


# ---- imports


async def reserved(pair: Pair, name: str = "low", **fields) -> None:
    """One whose prompt is still being computed, its decode blocks waiting for it."""
    pair.start(name, priority="low", num_prompt_tokens=40, **fields)
    await pair.step_prefill()
    assert pair.d_pool.importing(f"handoff-{name}") is not None


async def high_import(pair: Pair) -> None:
    """It waits for the blocks of the import before it, and the engine has asked for them."""
    pair.start("high", priority="high", **LONG)
    while pair.decode.inbox.num_waiting == 0:
        assert pair.p_engine.step()
        await pair.settle()
    pair.d_engine.step()
    assert pair.d_pool.outside.asked() == [("import", "handoff-low")]


@pytest.mark.parametrize("stands", ["reserved", "not landed"])
async def test_an_import_gives_its_reservation_to_one_of_a_higher_tier(stands):
    """P-15: its KV waits where it is then, and goes on to wherever there is room."""
    pair = by_tier(d_blocks=12)
    if stands == "not landed":
        pair.wire.holds_landing = True
    await reserved(pair)
    await high_import(pair)
    await pair.settle()
    assert pair.decode.inbox.counts["gave_way"] == 1
    assert pair.d_sink.num_preemptions[make_key("low")] == 1
    assert isinstance(pair.d_sink.ends[make_key("low")].error, HandoffFailed)
    assert pair.d_pool.importing("handoff-high") is not None
    (told,) = pair.p_sink.waiting
    assert (told.key.request_id, told.lease_s) == ("low", LEASE_S)
    await pair.run_dry()
    assert pair.d_sink.output(make_key("high")) == expected_tokens("high", MAX_TOKENS)
    pair.redirect("d", "low", priority="low", num_prompt_tokens=40, num_preemptions=1)
    await pair.run_dry()
    assert pair.d_sink.output(make_key("low")) == expected_tokens("low", MAX_TOKENS)
    assert pair.p_sink.ends[make_key("low")].times.num_computed_tokens == 40
    pair.assert_idle()


async def test_the_blocks_of_an_import_are_free_before_it_leaves():
    pair = by_tier(d_blocks=12)
    await reserved(pair)
    await high_import(pair)
    seen = seen_by_engine(pair.d_pool)
    pair.decode.inbox._giving.give()
    assert seen[-1] == (0, 12)
    assert [free for num_outside, free in seen if not num_outside] == [12]
    await all_given_back(pair)


async def test_an_import_gives_nothing_where_it_could_not_go_on():
    """Without resume: its stream may have begun, and would end with its export's lease."""
    pair = by_tier(d_blocks=12, imports_give=False)
    await reserved(pair)
    pair.start("high", priority="high", **LONG)
    while pair.decode.inbox.num_waiting == 0:
        await pair.step_prefill()
    await pair.step_decode()
    assert pair.d_pool.outside.asked() == []
    await pair.run_dry()
    for name in ("low", "high"):
        assert pair.d_sink.output(make_key(name)) == expected_tokens(name, MAX_TOKENS)
    assert pair.decode.inbox.counts["gave_way"] == 0
    pair.assert_idle()


async def test_a_prompt_whose_import_gave_way_is_under_no_lease_until_it_is_computed():
    pair = by_tier(d_blocks=12)
    await reserved(pair)
    await high_import(pair)
    await pair.settle()
    assert pair.prefill.outbox.num_waiting == 1
    assert pair.p_sink.output(make_key("low")) == []
    pair.pass_time(LEASE_S)
    await pair.prefill_all()
    assert is_open(pair, "low")
    pair.pass_time(LEASE_S)
    assert not is_open(pair, "low")
    await pair.run_dry()
    pair.assert_idle()


@pytest.mark.parametrize("gone", ["low", "high", "link", "worker"])
async def test_whatever_is_lost_while_a_reservation_is_asked_for_leaves_nothing(gone):
    pair = by_tier(d_blocks=12)
    pair.wire.holds_landing = True
    await reserved(pair)
    await high_import(pair)
    if gone == "link":
        pair.wire.cut()
    elif gone == "worker":
        pair.stop_decode()
    else:
        pair.decode.abort_leg(make_key(gone), AbortCause.CANCELLED)
        pair.prefill.abort_leg(make_key(gone), AbortCause.CANCELLED)
    await pair.run_dry()
    assert pair.d_pool.outside.asked() == []
    assert pair.d_pool.demand is None
    if gone == "low":
        assert pair.decode.inbox.counts["gave_way"] == 0
        assert pair.d_sink.output(make_key("high")) == expected_tokens("high", MAX_TOKENS)
    await all_given_back(pair)


async def test_one_that_both_prefills_and_decodes_there_takes_a_reservation_too():
    """And no lower import that waits has the blocks in between."""
    pair = by_tier(d_blocks=12)
    await reserved(pair)
    pair.start("late", priority="low", **LONG)
    await pair.prefill_all()
    assert pair.decode.inbox.num_waiting == 1
    pair.start_local("high", priority="high", **LONG)
    pair.d_engine.step()
    await pair.settle()
    assert pair.decode.inbox.counts["gave_way"] == 0, "it has its KV, and gave way in the engine"
    await pair.run_dry()
    for name in ("low", "late", "high"):
        assert pair.d_sink.output(make_key(name)) == expected_tokens(name, MAX_TOKENS)
    pair.assert_idle()
