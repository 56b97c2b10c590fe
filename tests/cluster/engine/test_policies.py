"""Orders, preemption by tier, and reservations of one engine, as stories."""

from dataclasses import replace

import pytest

from cluster.config import Policy
from cluster.engine.rules import Rules
from cluster.engine.sequence import SequenceState
from cluster.engine.victims import Holdings
from cluster.kv.outside import Demand
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from tests.factories import BLOCK_SIZE, Engine, expected_tokens, make_key

TIERS = Tiers(names=("low", "normal", "high"), default="normal")
BY_TIER = Rules(ordering=Ordering(policy=Policy.PRIORITY, num_tiers=3), tiers=TIERS)
AGING_S = BY_TIER.ordering.aging_s


def by_work(**fields):
    return Rules(ordering=Ordering(policy=Policy.SJF, **fields))


def started(engine):
    return [key.request_id for key in engine.log.started]


def running(plan):
    return {share.key.request_id for share in plan.shares}


class TestOrder:
    def test_the_least_work_first(self):
        """Prompt and what is expected to follow: the hint, or max_tokens."""
        engine = Engine(max_num_seqs=1, rules=by_work())
        engine.add("runs", max_tokens=3)
        engine.step()
        engine.add("long", num_prompt_tokens=40, max_tokens=30)
        engine.add("short", num_prompt_tokens=40, max_tokens=20)
        engine.add("hinted", num_prompt_tokens=40, max_tokens=30, expected_tokens=5)
        engine.run_to_end()
        assert started(engine) == ["runs", "hinted", "short", "long"]
        engine.assert_idle()

    def test_what_a_tenants_outputs_were_like_counts(self):
        engine = Engine(max_num_seqs=1, rules=by_work())
        engine.add("known", max_tokens=2, tenant="brief")
        engine.run_to_end()
        engine.add("runs", max_tokens=3)
        engine.step()
        engine.add("other", max_tokens=30, tenant="unknown")
        engine.add("brief", max_tokens=60, tenant="brief")
        engine.run_to_end()
        assert started(engine)[2:] == ["brief", "other"]

    def test_cached_tokens_are_no_work(self):
        engine = Engine(max_num_seqs=1, rules=by_work(), has_prefix_cache=True)
        first = engine.add("first", num_prompt_tokens=80, max_tokens=2)
        engine.run_to_end()
        engine.add("runs", max_tokens=3)
        engine.step()
        engine.add("fresh", num_prompt_tokens=40, max_tokens=2)
        engine.add("cached", prompt_ids=first.prompt_ids, max_tokens=2)
        engine.run_to_end()
        assert started(engine)[2:] == ["cached", "fresh"]

    def test_an_aged_one_is_passed_no_more(self):
        """P-16: a stream of short ones holds a long one up for the aging bound, not for ever."""
        engine = Engine(max_num_seqs=1, rules=by_work(aging_s=1.0))
        engine.add("runs", max_tokens=3)
        engine.step()
        engine.add("long", num_prompt_tokens=100)
        for i in range(200):
            engine.add(f"s{i}", num_prompt_tokens=5, max_tokens=3)
            engine.step()
            engine.clock.advance(0.02)
        assert 0.9 < engine.end(engine_key(engine, "long")).queue_s < 1.3


def engine_key(engine, name):
    class Named:
        key = next(key for key in engine.log.ends if key.request_id == name)

    return Named


class TestPreemptionByTier:
    def test_a_higher_tier_takes_the_slot_of_the_lowest_tiers_youngest(self):
        """P-15: who gives way computes again, and draws the same."""
        engine = Engine(max_num_seqs=3, rules=BY_TIER)
        names = {"n": "normal", "l1": "low", "l2": "low"}
        sequences = [engine.add(n, priority=p, max_tokens=12) for n, p in names.items()]
        engine.step()
        sequences.append(engine.add("h", priority="high", max_tokens=12))
        assert running(engine.step()) == {"n", "l1", "h"}
        engine.run_to_end()
        assert [s.num_preemptions for s in sequences] == [0, 0, 1, 0]
        for sequence in sequences:
            assert engine.tokens(sequence) == expected_tokens(sequence.key.request_id, 12)
        engine.assert_idle()

    def test_a_higher_tier_takes_blocks(self):
        engine = Engine(num_blocks=20, rules=BY_TIER)
        low = engine.add("low", priority="low", num_prompt_tokens=60, max_tokens=8)
        engine.step()
        high = engine.add("high", priority="high", num_prompt_tokens=40, max_tokens=8)
        assert running(engine.step()) == {"high"}
        engine.run_to_end()
        assert (low.num_preemptions, high.num_preemptions) == (1, 0)
        assert engine.tokens(low) == expected_tokens("low", 8)
        engine.assert_idle()

    @pytest.mark.parametrize("swap_slots", [0, 20], ids=["recompute", "swap"])
    def test_imported_kv_of_a_higher_tier_is_not_taken_to_grow(self, swap_slots):
        """It has just come and waits for its slot, and the pool is full."""
        engine = Engine(num_blocks=20, max_num_seqs=2, rules=BY_TIER, swap_slots=swap_slots)
        lows = [
            engine.add(f"l{i}", priority="low", num_prompt_tokens=num_tokens, max_tokens=40)
            for i, num_tokens in enumerate((8, 9))
        ]
        engine.step()
        while lows[0].num_tokens <= len(lows[0].block_ids) * BLOCK_SIZE:
            engine.step()
        all_free = engine.pool.num_free * BLOCK_SIZE
        high = engine.add_imported("h", priority="high", num_prompt_tokens=all_free, max_tokens=5)
        assert "h" in running(engine.step())
        engine.run_to_end()
        assert high.num_preemptions == 0
        for low in lows:
            assert engine.tokens(low) == expected_tokens(low.key.request_id, 40)
        engine.assert_idle()

    def test_imported_kv_without_a_slot_is_taken_to_grow(self):
        """Else nobody would move: the one that runs has aged, so it keeps its slot."""
        engine = Engine(num_blocks=20, max_num_seqs=1, rules=BY_TIER)
        low = engine.add("low", priority="low", num_prompt_tokens=7, max_tokens=20)
        engine.step()
        engine.clock.advance(AGING_S)
        all_free = engine.pool.num_free * BLOCK_SIZE
        high = engine.add_imported("h", priority="high", num_prompt_tokens=all_free, max_tokens=5)
        engine.run_to_end()
        assert (low.num_preemptions, high.num_preemptions) == (0, 1)
        engine.assert_idle()

    def test_one_that_has_aged_keeps_what_it_has(self):
        """P-16: a stream of higher ones takes its place while it is young, and no more then."""
        engine = Engine(num_blocks=30, max_num_seqs=1, rules=replace(BY_TIER, max_preemptions=1000))
        low = engine.add("low", priority="low", num_prompt_tokens=20, max_tokens=30)
        came = engine.clock.now()
        engine.step()
        for i in range(2000):
            if engine.scheduler.num_waiting < 2:
                engine.add(f"h{i}", priority="high", num_prompt_tokens=8, max_tokens=3)
            engine.step()
            if low.key in engine.log.ends:
                break
        assert low.num_preemptions == 1
        assert AGING_S < engine.clock.now() - came < AGING_S + 1.0

    def test_one_that_aged_elsewhere_keeps_its_slot(self):
        """P-16: its time here is a part of what it has waited, and all that is measured here."""
        engine = Engine(max_num_seqs=1, rules=BY_TIER)
        arrived = engine.clock.now() - AGING_S
        low = engine.add("low", priority="low", arrived=arrived, waited_s=AGING_S)
        engine.step()
        assert engine.scheduler.holdings(engine.clock.now()).firm == {low.key}
        engine.add("h", priority="high", max_tokens=2)
        engine.run_to_end()
        assert started(engine) == ["low", "h"]
        assert low.num_preemptions == 0
        assert engine.end(low).queue_s < 1.0
        engine.assert_idle()

    def test_the_youngest_is_who_came_to_its_router_last(self):
        """Whoever came to this worker last may have waited longest."""
        engine = Engine(max_num_seqs=2, rules=BY_TIER)
        now = engine.clock.now()
        young = engine.add("young", priority="low", arrived=now, max_tokens=20)
        old = engine.add("old", priority="low", arrived=now - 1.0, waited_s=1.0, max_tokens=20)
        engine.step()
        engine.add("h", priority="high", max_tokens=2)
        engine.run_to_end()
        assert (young.num_preemptions, old.num_preemptions) == (1, 0)

    def test_blocks_for_growth_are_the_youngests(self):
        """In the same tier, or without any."""
        engine = Engine(num_blocks=20)
        now, sizes = engine.clock.now(), {"num_prompt_tokens": 16, "max_tokens": 50}
        young = engine.add("young", arrived=now, **sizes)
        old = engine.add("old", arrived=now - 1.0, waited_s=1.0, **sizes)
        engine.run_to_end()
        assert (young.num_preemptions, old.num_preemptions) == (1, 0)
        engine.assert_idle()

    def test_of_those_whose_blocks_a_running_one_takes_the_aged_give_last(self):
        engine = Engine(num_blocks=20, rules=BY_TIER)
        now = engine.clock.now()
        high = engine.add("high", priority="high", num_prompt_tokens=16, max_tokens=60)
        aged = engine.add("aged", priority="low", arrived=now - AGING_S, num_prompt_tokens=16)
        young = engine.add("young", priority="normal", num_prompt_tokens=28, max_tokens=50)
        engine.run_to_end()
        assert (high.num_preemptions, aged.num_preemptions) == (0, 0)
        assert young.num_preemptions > 0
        engine.assert_idle()

    def test_it_wakes_when_one_that_leaves_blocks_to_an_import_has_aged(self):
        """P-16: nobody gives any back meanwhile, and time alone lets it go on."""
        engine = Engine(num_blocks=20, rules=BY_TIER)
        engine.pool.allocate(12, "another")
        low = engine.add("low", priority="low", num_prompt_tokens=16)
        engine.pool.ask(Demand(num_blocks=9, tier=2))
        assert engine.step() is None
        assert engine.next_instant == low.arrived + AGING_S
        engine.clock.advance(engine.next_instant - engine.clock.now())
        assert running(engine.step()) == {"low"}
        assert engine.next_instant == low.deadline
        engine.run_to_end()

    def test_nobody_gives_way_for_blocks_that_others_share_with_it(self):
        """They stay with those others, so it would be in vain."""
        engine = Engine(num_blocks=20, rules=BY_TIER, has_prefix_cache=True)
        prompt_ids = tuple(range(100, 140))
        keeper = engine.add("keeper", prompt_ids=prompt_ids, priority="high", max_tokens=30)
        engine.step()
        low = engine.add("low", prompt_ids=prompt_ids, priority="low", max_tokens=30)
        engine.step()
        assert len(set(keeper.block_ids) & set(low.block_ids)) == 9
        too_many = (engine.pool.num_free + 4) * BLOCK_SIZE
        engine.add("n", priority="normal", num_prompt_tokens=too_many, max_tokens=4)
        engine.step()
        assert low.num_preemptions == 0
        engine.run_to_end()
        engine.assert_idle()

    def test_sharers_that_all_give_way_free_what_they_share(self):
        engine = Engine(num_blocks=20, rules=BY_TIER, has_prefix_cache=True)
        lows = []
        for name in ("l1", "l2"):
            prompt_ids = tuple(range(100, 140))
            lows.append(engine.add(name, prompt_ids=prompt_ids, priority="low", max_tokens=4))
            engine.step()
        engine.add("n", priority="normal", num_prompt_tokens=64, max_tokens=4)
        assert running(engine.step()) == {"n"}
        assert [low.num_preemptions for low in lows] == [1, 1]
        engine.run_to_end()
        engine.assert_idle()

    @pytest.mark.parametrize("swap_slots", [0, 20], ids=["recompute", "swap"])
    def test_an_import_of_a_higher_tier_is_made_room_for(self, swap_slots):
        """Who gave way leaves the blocks to it, and goes on once it has them."""
        engine = Engine(num_blocks=20, rules=BY_TIER, swap_slots=swap_slots)
        names = ("l1", "l2")
        lows = [engine.add(n, priority="low", num_prompt_tokens=32, max_tokens=8) for n in names]
        engine.step()
        engine.pool.ask(Demand(num_blocks=9, tier=2))
        for _ in range(3):
            assert running(engine.step()) == {"l1"}
        assert engine.pool.num_free >= 9
        assert [low.num_preemptions for low in lows] == [0, 1]
        assert engine.pool.reserve(9, "h", lows[0].key) is not None
        engine.pool.ask(None)
        for _ in range(8):
            engine.step()
        engine.pool.cancel("h")
        engine.run_to_end()
        for low in lows:
            assert engine.tokens(low) == expected_tokens(low.key.request_id, 8)
        engine.assert_idle()

    def test_imported_kv_of_a_lower_tier_leaves_an_import_what_it_waits_for(self):
        """It gets its slot, and its next block when the import has its own."""
        engine = Engine(num_blocks=20, rules=BY_TIER)
        aged = engine.add("aged", priority="low", num_prompt_tokens=33, arrived=-AGING_S)
        engine.step()
        low = engine.add_imported("l", priority="low", num_prompt_tokens=8, max_tokens=4)
        num_free = engine.pool.num_free
        engine.pool.ask(Demand(num_blocks=num_free, tier=2))
        assert running(engine.step()) == {"aged"}
        assert (low.state, len(low.block_ids)) == (SequenceState.RUNNING, 2)
        assert engine.pool.reserve(num_free, "h", aged.key) is not None
        engine.step()
        engine.pool.cancel("h")
        engine.run_to_end()
        assert engine.tokens(low) == expected_tokens("l", 4)[1:]
        engine.assert_idle()

    def test_who_would_give_way_is_told(self):
        engine = Engine(max_num_seqs=2, rules=replace(BY_TIER, max_preemptions=1))
        sequences = {
            name: engine.add(name, priority=priority, max_tokens=20)
            for name, priority in (("l", "low"), ("n", "normal"))
        }
        engine.step()

        def told():
            holdings = engine.scheduler.holdings(engine.clock.now())
            giving = {(tier, key.request_id) for tier, key in holdings.giving}
            return giving, {key.request_id for key in holdings.firm}

        assert told() == ({(0, "l"), (1, "n")}, set())
        high = engine.add("h", priority="high", max_tokens=4)
        engine.step()
        assert told() == ({(1, "n"), (2, "h")}, set()), "l waits without blocks"
        while high.state is SequenceState.RUNNING:
            engine.step()
        engine.step()
        assert told() == ({(1, "n")}, {"l"}), "it runs again, for good"
        engine.add("aged", priority="low", arrived=engine.clock.now() - AGING_S)
        assert told() == ({(1, "n")}, {"l", "aged"})
        engine.clock.advance(AGING_S)
        assert told() == (set(), {"l", "n", "aged"}), "those that run age too"
        assert Engine(rules=Rules(tiers=TIERS)).scheduler.holdings(0.0) == Holdings()
        assert sequences["l"].num_preemptions == 1

    def test_nothing_is_taken_where_it_would_not_be_enough(self):
        engine = Engine(num_blocks=20, max_num_seqs=4, rules=BY_TIER)
        engine.add("high", priority="high", num_prompt_tokens=48, max_tokens=8)
        low = engine.add("low", priority="low", num_prompt_tokens=8, max_tokens=8)
        engine.step()
        engine.add("big", priority="high", num_prompt_tokens=60, max_tokens=4)
        engine.step()
        assert low.num_preemptions == 0

    def test_equals_and_higher_ones_keep_what_they_have(self):
        engine = Engine(max_num_seqs=1, rules=BY_TIER)
        first = engine.add("a", priority="normal", max_tokens=4)
        engine.step()
        engine.add("b", priority="normal", max_tokens=4)
        engine.run_to_end()
        assert first.num_preemptions == 0

    def test_a_prompt_is_preempted_between_two_chunks(self):
        """P-24: a long prompt of a low tier waits while an urgent one is prefilled."""
        engine = Engine(max_num_seqs=1, chunk_tokens=16, rules=BY_TIER)
        low = engine.add("low", priority="low", num_prompt_tokens=100, max_tokens=2)
        engine.step()
        assert low.num_computed_tokens == 16
        high = engine.add("high", priority="high", num_prompt_tokens=20, max_tokens=2)
        assert running(engine.step()) == {"high"}
        engine.run_to_end()
        assert started(engine) == ["low", "high"]
        assert engine.tokens(high) == expected_tokens("high", 2)
        assert engine.tokens(low) == expected_tokens("low", 2)

    def test_the_chunks_of_a_higher_tier_come_first(self):
        engine = Engine(chunk_tokens=16, token_budget=16, rules=BY_TIER)
        engine.add("low", priority="low", num_prompt_tokens=64)
        engine.step()
        engine.add("high", priority="high", num_prompt_tokens=32)
        assert running(engine.step()) == {"high"}

    def test_in_a_tier_the_chunks_of_who_waited_longest_come_first(self):
        engine = Engine(chunk_tokens=16, token_budget=16, rules=BY_TIER)
        now = engine.clock.now()
        engine.add("young", arrived=now, num_prompt_tokens=64)
        engine.step()
        engine.add("old", arrived=now - 1.0, waited_s=1.0, num_prompt_tokens=32)
        assert running(engine.step()) == {"old"}

    @pytest.mark.parametrize("most", [1, 3])
    def test_nobody_is_preempted_more_often_than_that(self, most):
        engine = Engine(
            max_num_seqs=1,
            rules=Rules(
                ordering=Ordering(policy=Policy.PRIORITY, num_tiers=3),
                tiers=TIERS,
                max_preemptions=most,
            ),
        )
        low = engine.add("low", priority="low", num_prompt_tokens=20, max_tokens=30)
        for i in range(8):
            while "low" not in running(engine.step()):
                assert engine.scheduler.num_waiting < 9
            engine.add(f"h{i}", priority="high", max_tokens=2)
        engine.run_to_end()
        assert low.num_preemptions == most
        assert engine.tokens(low) == expected_tokens("low", 30)

    def test_preemptions_elsewhere_count(self):
        """P-15: one that is at the bound when it comes gives nothing, and its neighbour does."""
        engine = Engine(num_blocks=16, rules=replace(BY_TIER, max_preemptions=2))
        sizes = {"priority": "low", "num_prompt_tokens": 16, "max_tokens": 12}
        once = engine.add("once", num_preemptions_before=1, **sizes)
        spared = engine.add("spared", num_preemptions_before=2, **sizes)
        engine.step()
        assert len(spared.block_ids) == 7, "all that it may come to need"
        assert engine.scheduler.holdings(engine.clock.now()) == Holdings(
            giving=((0, once.key),), firm=frozenset({spared.key})
        )
        for name in ("h0", "h1", "h2"):
            engine.add(name, priority="high", num_prompt_tokens=20, max_tokens=4)
            engine.step()
        engine.run_to_end()
        assert (once.num_preemptions_in_all, spared.num_preemptions_in_all) == (2, 2)
        assert engine.log.preempted == {once.key: 2}
        assert engine.tokens(once) == expected_tokens("once", 12)
        assert engine.tokens(spared) == expected_tokens("spared", 12)
        engine.assert_idle()

    def test_one_that_brings_all_its_blocks_waits_for_nobody_who_lacks_some(self):
        """P-16: it holds what the one before it waits for, and gives up nothing."""
        engine = Engine(num_blocks=20, rules=replace(BY_TIER, max_preemptions=1))
        engine.pool.reserve(8, "h-late", make_key("late"))
        runs = engine.add("runs", priority="normal", num_prompt_tokens=12, max_tokens=12)
        engine.step()
        high = engine.add("high", priority="high", num_prompt_tokens=36, max_tokens=4)
        engine.step()
        assert runs.num_preemptions == 1
        while high.state is not SequenceState.ENDED:
            engine.step()
        engine.pool.allocate(8, "another")
        late = engine.add_imported(
            "late", num_prompt_tokens=12, max_tokens=20, num_preemptions_before=1
        )
        engine.step()
        assert (runs.state, late.state) == (SequenceState.WAITING, SequenceState.RUNNING)
        engine.pool.release("another")
        engine.run_to_end()
        assert engine.tokens(runs) == expected_tokens("runs", 12)
        engine.assert_idle()

    def test_tiers_have_no_say_without_the_policy(self):
        engine = Engine(max_num_seqs=1, rules=Rules(tiers=TIERS))
        low = engine.add("low", priority="low")
        engine.step()
        engine.add("high", priority="high")
        engine.run_to_end()
        assert low.num_preemptions == 0


def test_without_preemption_each_starts_with_room_for_all_that_may_come():
    engine = Engine(num_blocks=10, rules=Rules(preempts=False))
    first = engine.add("a", num_prompt_tokens=8, max_tokens=17)
    second = engine.add("b", num_prompt_tokens=8, max_tokens=17)
    assert running(engine.step()) == {"a"}, "6 + 6 of 10 blocks"
    assert len(first.block_ids) == 24 // BLOCK_SIZE
    engine.run_to_end()
    assert engine.scheduler.num_preemptions == 0
    assert engine.tokens(second) == expected_tokens("b", 17)
    engine.assert_idle()
