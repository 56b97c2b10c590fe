"""Orders, preemption by tier, reservations and batching of one engine, as stories."""

from dataclasses import replace

import pytest

from cluster.config import Batching, Policy
from cluster.engine.rules import Rules
from cluster.policy.batching import SETTLE_S
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from tests.factories import BLOCK_SIZE, Engine, expected_tokens

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


class TestBatching:
    def test_a_static_batch_runs_to_its_last_member(self):
        rules = Rules(batching=Batching.STATIC, batch_size=2, preempts=False)
        engine = Engine(max_num_seqs=4, rules=rules)
        lengths = {"a": 2, "b": 6, "c": 3, "d": 3}
        for name, length in lengths.items():
            engine.add(name, num_prompt_tokens=8, max_tokens=length)
        batches = [running(engine.step()) for _ in range(9)]
        assert batches[:6] == [{"a", "b"}] * 2 + [{"b"}] * 4, "its slot stays empty"
        assert batches[6:] == [{"c", "d"}] * 3
        engine.assert_idle()

    def test_a_static_batch_forms_from_what_waits(self):
        rules = Rules(batching=Batching.STATIC, batch_size=4, preempts=False)
        engine = Engine(rules=rules)
        engine.add("alone", max_tokens=3)
        engine.clock.advance(SETTLE_S)
        assert engine.step() is None, "nobody had looked before, so it may just have come"
        engine.clock.advance(SETTLE_S)
        assert running(engine.step()) == {"alone"}
        engine.add("late", max_tokens=3)
        assert running(engine.step()) == {"alone"}

    def test_those_that_come_at_once_are_one_static_batch(self):
        """One by one, as the network brings them: to an idle worker, and when a batch has ended."""
        rules = Rules(batching=Batching.STATIC, batch_size=8, preempts=False)
        engine = Engine(rules=rules)
        for batch in "ab":
            names = {f"{batch}{i}" for i in range(7)}
            for name in sorted(names):
                engine.add(name, max_tokens=3)
                assert engine.step() is None
                assert engine.scheduler.next_instant == engine.clock.now() + SETTLE_S
                engine.clock.advance(SETTLE_S / 2)
            engine.clock.advance(SETTLE_S)
            assert [running(engine.step()) for _ in range(3)] == [names] * 3
        for index in range(8):
            engine.add(f"c{index}", max_tokens=1)
        assert len(engine.step().shares) == 8, "a full one waits for nobody"
        engine.assert_idle()

    def test_an_abort_or_a_deadline_ends_a_member_and_not_its_batch(self):
        rules = Rules(batching=Batching.STATIC, batch_size=3, preempts=False)
        engine = Engine(rules=rules)
        aborted = engine.add("aborted", max_tokens=20)
        engine.add("late", max_tokens=20, deadline=engine.clock.now() + 0.025)
        engine.add("stays", max_tokens=20)
        engine.step()
        engine.abort(aborted)
        engine.add("next", max_tokens=2)
        assert running(engine.step()) == {"late", "stays"}
        engine.step()
        assert running(engine.step()) == {"stays"}
        engine.run_to_end()
        engine.clock.advance(SETTLE_S)
        engine.run_to_end()
        assert len(engine.log.ends) == 4
        engine.assert_idle()

    def test_a_dynamic_batch_collects_for_a_window(self):
        rules = Rules(batching=Batching.DYNAMIC, batch_size=3, batch_window_s=0.02, preempts=False)
        engine = Engine(rules=rules)
        engine.add("a", max_tokens=2)
        assert engine.step() is None
        assert engine.scheduler.next_instant == pytest.approx(engine.clock.now() + 0.02)
        engine.clock.advance(0.01)
        engine.add("b", max_tokens=2)
        assert engine.step() is None
        engine.clock.advance(0.01)
        assert running(engine.step()) == {"a", "b"}
        engine.add("c", max_tokens=2)
        assert running(engine.step()) == {"a", "b"}
        assert engine.step() is None, "a batch of its own"
        engine.clock.advance(0.02)
        assert running(engine.step()) == {"c"}

    def test_a_full_dynamic_batch_waits_for_nothing(self):
        rules = Rules(batching=Batching.DYNAMIC, batch_size=2, batch_window_s=9.0, preempts=False)
        engine = Engine(rules=rules)
        for name in "ab":
            engine.add(name, max_tokens=2)
        assert running(engine.step()) == {"a", "b"}
