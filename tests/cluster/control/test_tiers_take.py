"""Requests of a higher tier go where lower ones hold what they need, as stories."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import Policy, Preemption, Role
from cluster.control.facts import BlockCounts
from cluster.control.worker_entry import Charge, WorkerEntry
from tests.cluster.control.factory import (
    deaths,
    grants,
    make_pool,
    make_registration,
    make_report,
    two_pools,
)
from tests.cluster.control.story import Story

BY_TIER = {"policy": Policy.PRIORITY, "aging_s": 60.0}
NUM_BLOCKS = 1024 // 16
KINDS = ("unseen", "bare", "firm", "held")


def granted(decisions):
    return [grant.request_id for grant in grants(decisions)]


def running(story, *names, priority="low", **fields):
    """Grant these and have the decode worker report them; returns the grants."""
    legs = [g for name in names for g in grants(story.want(name, priority=priority, **fields))]
    assert [grant.request_id for grant in legs] == list(names)
    return legs


def say(story, legs, *, takable=(), used=0, **facts):
    """The decode worker reports these legs; its prefill worker is through with them."""
    held = [grant.grant_id for grant in legs]
    blocks = BlockCounts(free=NUM_BLOCKS - used, held=used)
    facts = {"num_running": min(2, len(held)), **facts}
    return story.report("prefill-0") + story.report(
        "decode-0", *held, blocks=blocks, takable_blocks=takable, **facts
    )


def full_of(story, *names, blocks_each=3, priority="low"):
    """A decode worker whose slots are taken."""
    legs = running(story, *names, priority=priority)
    used = blocks_each * len(legs)
    takable = (used,) if priority == "low" else (0, used)
    say(story, legs, takable=takable, used=used)
    return legs


def test_a_higher_tier_takes_slots_and_each_of_them_once():
    """P-15: two slots of a low tier are room for two, equals wait."""
    story = Story(*two_pools(slots=2), **BY_TIER)
    lows = full_of(story, "l1", "l2")
    assert granted(story.want("l3", priority="low")) == []
    highs = grants(story.want("h1", priority="high")) + grants(story.want("h2", priority="high"))
    assert [grant.request_id for grant in highs] == ["h1", "h2"]
    assert granted(story.want("h3", priority="high")) == []
    assert granted(story.want("n", priority="normal")) == []
    # The same once the worker has them, and the low ones wait without their blocks.
    bare = tuple(grant.grant_id for grant in lows)
    told = {"used": 6, "num_waiting": 2, "unreserved_grants": bare}
    assert granted(say(story, [*lows, *highs], takable=(0, 0, 6), **told)) == []
    story.done(lows[1])
    assert granted(say(story, [lows[0], *highs], takable=(0, 0, 6), used=6)) == []
    story.done(highs[0])
    assert granted(say(story, [lows[0], highs[1]], takable=(3, 0, 3), used=6)) == ["h3"]


def test_a_middle_tier_takes_from_the_lowest_only():
    story = Story(*two_pools(slots=2), **BY_TIER)
    (low,), (high,) = running(story, "l"), running(story, "h", priority="high")
    say(story, [low, high], takable=(3, 0, 3), used=6)
    assert granted(story.want("n1", priority="normal")) == ["n1"]
    assert granted(story.want("n2", priority="normal")) == []


def test_free_slots_are_taken_first():
    story = Story(*two_pools(slots=2), counts={"decode": 2}, **BY_TIER)
    legs = running(story, "l1", "l2", "l3")
    (empty,) = [g for g in legs if [x.decode for x in legs].count(g.decode) == 1]
    (high,) = grants(story.want("h", priority="high"))
    assert high.decode == empty.decode


@pytest.mark.parametrize(
    ("told", "is_granted"),
    [
        ({"takable": (60,)}, True),
        ({"takable": (40,)}, False),
        ({"takable": (0, 60)}, False),
        ({}, False),
    ],
    ids=["all", "too few", "of equals", "importing"],
)
def test_a_higher_tier_takes_blocks_that_sequences_would_give_up(told, is_granted):
    """What is still coming, or is of its own tier, is not there to be taken."""
    story = Story(*two_pools(slots=8), **BY_TIER)
    lows = running(story, "l1", "l2", num_prompt_tokens=400)
    say(story, lows, used=60, **told)
    assert granted(story.want("l3", priority="low", num_prompt_tokens=600)) == []
    want = {"priority": "normal", "num_prompt_tokens": 700}
    assert granted(story.want("n", **want)) == ["n"] * is_granted


@pytest.mark.parametrize(("takable", "is_granted"), [((50,), True), ((0, 50), False), ((), False)])
def test_a_higher_tier_takes_blocks_of_exports_that_wait(takable, is_granted):
    """P-15: as its prefill worker reports them; those whose bytes are moving are not there."""
    story = Story(*two_pools(slots=8), **BY_TIER)
    lows = running(story, "l1", "l2", num_prompt_tokens=400)
    held = [grant.grant_id for grant in lows]
    told = {"blocks": BlockCounts(free=NUM_BLOCKS - 50, held=50), "takable_blocks": takable}
    story.report("decode-0", *held, unreserved_grants=tuple(held))
    story.report("prefill-0", *held, **told)
    assert granted(story.want("l3", priority="low", num_prompt_tokens=300)) == []
    want = {"priority": "normal", "num_prompt_tokens": 500}
    assert granted(story.want("n1", **want)) == ["n1"] * is_granted
    assert granted(story.want("n2", **want)) == [], "they are taken once"
    story.planner.check()


def test_blocks_that_were_taken_are_not_taken_again():
    """Before and after the worker has taken them; what the low ones wait for counts for equals."""
    story = Story(*two_pools(slots=8), **BY_TIER)
    lows = running(story, "l1", "l2", num_prompt_tokens=400)
    say(story, lows, takable=(60,), used=60)
    big = {"priority": "high", "num_prompt_tokens": 500}
    (high,) = grants(story.want("h1", **big))
    assert granted(story.want("h2", **big)) == []
    bare = tuple(grant.grant_id for grant in lows)
    told = {"takable": (0, 0, 33), "used": 33, "unreserved_grants": bare}
    assert granted(say(story, [*lows, high], **told)) == []
    assert granted(story.want("h3", priority="high", num_prompt_tokens=300)) == ["h3"]
    assert granted(story.want("l3", priority="low", num_prompt_tokens=16)) == []


def test_those_that_were_preempted_often_enough_keep_their_slots():
    story = Story(*two_pools(slots=2), **BY_TIER)
    lows = running(story, "l1", "l2")
    firm = tuple(grant.grant_id for grant in lows)
    say(story, lows, used=6, firm_grants=firm)
    assert granted(story.want("h", priority="high")) == []
    assert granted(say(story, lows, used=6, takable=(3,), firm_grants=firm[:1])) == ["h"]


def test_legs_of_an_earlier_control_plane_keep_theirs():
    story = Story(*two_pools(slots=2), **BY_TIER)
    story.report("decode-0", "6-1", "6-2", num_running=2)
    assert granted(story.want("h", priority="high")) == []


@pytest.mark.parametrize(
    "rules",
    [{"policy": Policy.FCFS}, {"policy": Policy.SJF}, {**BY_TIER, "preemption": Preemption.OFF}],
    ids=["fcfs", "sjf", "off"],
)
def test_without_tiers_that_take_nobody_gives_way(rules):
    story = Story(*two_pools(slots=2), **rules)
    full_of(story, "l1", "l2")
    assert granted(story.want("h", priority="high")) == []


def test_what_a_lost_grant_took_may_be_taken_again():
    """No worker reports it in time, and the one that its room came from has it still."""
    story = Story(*two_pools(slots=2), **BY_TIER)
    lows = full_of(story, "l1", "l2")
    for name in ("h1", "h2"):
        assert granted(story.want(name, priority="high")) == [name]
    assert granted(story.want("h3", priority="high")) == []
    decisions = []
    for _ in range(6):
        story.now += 0.5
        decisions += say(story, lows, takable=(6,), used=6)
        decisions += story.planner.tick(story.now)
        story.planner.check()
    assert granted(decisions) == ["h3"]


def test_a_worker_that_dies_while_places_change_hands_takes_nothing_of_another():
    """Both that were on it come again: the higher one takes a place, the lower one waits."""
    story = Story(*two_pools(slots=1), counts={"decode": 2}, **BY_TIER)
    lows = {grant.decode.worker_id: grant for grant in running(story, "l0", "l1")}
    blocks = BlockCounts(free=NUM_BLOCKS - 3, held=3)
    told = {"num_running": 1, "blocks": blocks, "takable_blocks": (3,)}
    for worker_id, grant in lows.items():
        story.report(worker_id, grant.grant_id, **told)
    story.report("prefill-0")
    (high,) = grants(story.want("h", priority="high"))
    lost = high.decode.worker_id
    assert deaths(story.leave(lost, reason="fault")) == [lost]
    victim, other = lows.pop(lost), *lows.values()
    assert granted(story.want(victim.request_id, attempt=1, priority="low")) == []
    (again,) = grants(story.want("h", attempt=1, priority="high"))
    assert again.decode == other.decode
    story.planner.check()
    story.done(again)
    story.done(other)
    story.report("prefill-0")
    assert granted(story.report(other.decode.worker_id)) == [victim.request_id]


def test_nothing_is_taken_from_a_tier_while_a_lower_one_has_it():
    """Whatever it costs there: the other worker is much faster."""
    story = Story(*two_pools(slots=1), counts={"decode": 2}, **BY_TIER)
    (low,) = running(story, "l")
    (normal,) = running(story, "n", priority="normal")
    speeds = {"step_base_s": 0.001, "step_per_seq_s": 0.0001}
    for grant, takable, facts in ((low, (3,), {}), (normal, (0, 3), speeds)):
        blocks = BlockCounts(free=NUM_BLOCKS - 3, held=3)
        story.report(
            grant.decode.worker_id, grant.grant_id, num_running=1, blocks=blocks,
            takable_blocks=takable, **facts,
        )  # fmt: skip
    story.report("prefill-0")
    (high,) = grants(story.want("h", priority="high"))
    assert high.decode == low.decode


def test_prompts_of_a_higher_tier_do_not_wait_for_those_of_lower_ones():
    """P-24: run-ahead is bounded for each tier by what is ahead of it: itself and those above."""
    pools = two_pools(kv_tokens=1 << 14, slots=32)
    story = Story(*pools, **BY_TIER, run_ahead_tokens=1024)
    lows = running(story, "l1", "l2", num_prompt_tokens=512)
    held = [grant.grant_id for grant in lows]
    assert granted(story.want("l3", priority="low", num_prompt_tokens=512)) == []
    assert granted(story.want("h1", priority="high", num_prompt_tokens=512)) == ["h1"]
    assert granted(story.want("h2", priority="high", num_prompt_tokens=512)) == ["h2"]
    assert granted(story.want("h3", priority="high", num_prompt_tokens=512)) == []
    assert granted(story.report("prefill-0", *held, queued_tokens=1024)) == []


def test_an_aged_one_is_not_overtaken_by_taking():
    """P-16: and keeps what it was granted, before its worker has seen it and after that."""
    story = Story(*two_pools(slots=1), policy=Policy.PRIORITY, aging_s=5.0)
    (low,) = full_of(story, "l1")
    assert granted(story.want("aged", priority="low", waited_s=6.0)) == []
    assert granted(story.want("h", priority="high")) == []
    story.done(low)
    (aged,) = grants(say(story, []))
    assert aged.request_id == "aged"
    assert granted(say(story, [aged], unreserved_grants=(aged.grant_id,))) == []
    assert granted(say(story, [aged], takable=(3,), used=3)) == []
    story.planner.check()
    story.done(aged)
    assert granted(say(story, [])) == ["h"]


@pytest.mark.parametrize("is_full", [True, False], ids=["takes", "gets what is free"])
def test_a_low_flood_and_many_modest_tenants_do_not_keep_an_aged_high_request_out(is_full):
    """P-16: the flood's age brings turns of its tier, and by their shares others take them."""
    fair = {"fair_tenants": True, "tenant_queue_share": 1.0, "max_queue_requests": 1000}
    story = Story(*two_pools(slots=2), policy=Policy.PRIORITY, aging_s=5.0, **fair)
    lows = full_of(story, "l1", "l2")
    for index in range(60):
        story.want(f"flood-{index}", tenant="flood", priority="low", waited_s=12.0)
    tenants = story.planner._queue._queue.tenants(0)
    for tenant in range(50):
        story.want(f"modest-{tenant}", tenant=f"t{tenant}", priority="low")
    tenants.charge("flood", 10_000.0)
    told = {"takable": (6,), "used": 6} if is_full else {"used": 6}
    firm = () if is_full else tuple(grant.grant_id for grant in lows)
    say(story, lows, firm_grants=firm, **told)
    high = story.want("h", priority="high", waited_s=6.0)
    if not is_full:
        assert granted(high) == []
        story.done(lows.pop())
        high = say(story, lows, used=3, firm_grants=(lows[0].grant_id,))
    assert granted(high) == ["h"]


@given(
    legs=st.lists(
        st.tuples(
            st.integers(0, 2),  # tier
            st.integers(0, 12),  # blocks charged
            st.integers(0, 40),  # prompt tokens
            st.integers(0, 12),  # blocks that it has
            st.sampled_from(KINDS),
        ),
        max_size=8,
    ),
    queued_tokens=st.integers(0, 200),
)
@settings(max_examples=150, deadline=None)
def test_nobody_counts_on_more_than_lower_tiers_have(legs, queued_tokens):
    """What a tier may take besides what is free is lower tiers' own, and rises with the tier."""
    registration = make_registration(make_pool("decode", Role.DECODE))
    entry = WorkerEntry(registration, make_report(registration), 0.0, set())
    has, takable = 0, [0, 0, 0]
    for index, (tier, blocks, tokens, own, kind) in enumerate(legs):
        charge = Charge(blocks=blocks, prompt_tokens=tokens, tier=tier)
        entry.charge(f"g{index}", charge, 0.0)
        if kind in ("firm", "held"):
            own = min(own, registration.num_blocks - has)
            has += own
            takable[tier] += own if kind == "held" else 0
    names = {kind: [f"g{i}" for i, leg in enumerate(legs) if leg[4] == kind] for kind in KINDS}
    report = make_report(
        registration, *names["bare"], *names["firm"], *names["held"],
        blocks=BlockCounts(free=registration.num_blocks - has, held=has),
        unreserved_grants=tuple(names["bare"]), firm_grants=tuple(names["firm"]),
        takable_blocks=tuple(takable), queued_tokens=queued_tokens,
    )  # fmt: skip
    entry.take(report, 0.0)
    before, *higher = entry.taken(3)
    assert before.slots == entry.num_slots_used
    assert before.blocks == registration.num_blocks - entry.num_blocks_free
    for tier, after in enumerate(higher, start=1):
        giving = [leg for leg in legs if leg[0] < tier and leg[4] != "firm"]
        assert before.slots - after.slots == len(giving)
        most = sum(takable[:tier]) + sum(leg[1] for leg in giving)
        assert 0 <= before.blocks - after.blocks <= most
        most = queued_tokens + sum(leg[2] for leg in giving)
        assert 0 <= before.run_ahead_tokens - after.run_ahead_tokens <= most
