"""Preemption by swap: KV waits in a bounded buffer, nothing is computed again, nothing is kept."""

import pytest

from cluster.config import Policy
from cluster.engine.rules import Rules
from cluster.engine.sequence import SequenceState
from cluster.errors import Cancelled, DeadlineExceeded, EngineFault
from cluster.kv.swap_buffer import swap_holder
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from tests.factories import Engine, expected_tokens

TIERS = Tiers(names=("low", "high"), default="low")
BY_TIER = Rules(ordering=Ordering(policy=Policy.PRIORITY, num_tiers=2), tiers=TIERS)


def num_kept(engine):
    """Blocks whose KV is in the buffer."""
    return engine.pool.swap.num_slots - engine.pool.swap.num_free


def swapped_out(engine, **fields):
    """An engine's one low sequence, in mid-output, whose slot a higher one has taken."""
    low = engine.add("low", num_prompt_tokens=10, max_tokens=12, **fields)
    for _ in range(3):
        engine.step()
    high = engine.add("high", priority="high", num_prompt_tokens=5, max_tokens=4)
    engine.step()
    assert (low.state, high.state) == (SequenceState.WAITING, SequenceState.RUNNING)
    assert low.num_swapped_tokens == 12
    return low, high


def to_copies(engine):
    """Step until copies are planned, and return that plan; they are not made yet."""
    while (plan := engine.plan()).swaps is None:
        engine.log.take(engine.scheduler.commit(plan, engine.runner.run(plan), engine.clock.now()))
    return plan


@pytest.fixture
def engine():
    engine = Engine(num_blocks=20, max_num_seqs=1, rules=BY_TIER, swap_slots=20)
    yield engine
    engine.run_to_end()
    engine.assert_idle()


class TestEnds:
    """Whatever ends a sequence frees its part of the buffer, wherever its KV is."""

    def test_abort_while_it_is_out(self, engine):
        low, high = swapped_out(engine)
        assert num_kept(engine) == 3
        engine.abort(low)
        assert num_kept(engine) == 0
        engine.run_to_end()
        assert isinstance(engine.end(low).error, Cancelled)
        assert engine.tokens(high) == expected_tokens("high", 4)

    def test_abort_while_it_is_copied_out(self, engine):
        low = engine.add("low", num_prompt_tokens=10, max_tokens=12)
        engine.step()
        high = engine.add("high", priority="high", max_tokens=4)
        plan = to_copies(engine)
        assert len(plan.swaps.out) == 3
        engine.copy(plan.swaps)
        engine.abort(low)
        engine.log.take(engine.scheduler.take_events())
        engine.scheduler.commit(plan, None, engine.clock.now())
        engine.pool.check()
        assert (engine.pool.blocks_of(swap_holder(low.key)), num_kept(engine)) == ((), 0)
        assert engine.pool.counts().held == len(high.block_ids)
        engine.run_to_end()
        assert engine.tokens(high) == expected_tokens("high", 4)

    def test_abort_while_it_is_copied_back(self, engine):
        low, high = swapped_out(engine)
        plan = to_copies(engine)
        assert (len(plan.swaps.back), low.state) == (3, SequenceState.RUNNING)
        engine.copy(plan.swaps)
        engine.abort(low)
        engine.scheduler.commit(plan, None, engine.clock.now())
        assert (engine.pool.counts().held, num_kept(engine)) == (0, 0)
        assert high.state is SequenceState.ENDED

    def test_the_deadline_while_it_is_out(self, engine):
        low, _ = swapped_out(engine, deadline=engine.clock.now() + 0.05)
        engine.clock.advance(0.05)
        engine.step()
        assert num_kept(engine) == 0
        assert isinstance(engine.end(low).error, DeadlineExceeded)

    @pytest.mark.parametrize("moment", ["out", "back"])
    def test_a_fault_in_the_midst_of_a_copy(self, engine, moment):
        """The step thread ends everything then, and nothing counts as copied."""
        low = engine.add("low", num_prompt_tokens=10, max_tokens=12)
        engine.step()
        high = engine.add("high", priority="high", max_tokens=4)
        plan = to_copies(engine)
        if moment == "back":
            engine.swap(plan)
            plan = to_copies(engine)
        assert len(getattr(plan.swaps, moment)) == 3
        engine.scheduler.abort_all(EngineFault("the copy failed"), engine.clock.now())
        engine.log.take(engine.scheduler.take_events())
        engine.assert_idle()
        assert low.state is high.state is SequenceState.ENDED

    def test_its_worker_is_lost_and_another_one_goes_on(self, engine):
        """P-15: all that another worker needs is the tokens that are out."""
        low, _ = swapped_out(engine)
        engine.scheduler.abort_all(EngineFault("gone"), engine.clock.now())
        engine.log.take(engine.scheduler.take_events())
        got = engine.tokens(low)
        assert got == expected_tokens("low", 3)
        engine.assert_idle()

        other = Engine(rules=BY_TIER, swap_slots=20)
        resumed = other.add("low", num_prompt_tokens=10, max_tokens=12, output_ids=list(got))
        other.run_to_end()
        assert got + other.tokens(resumed) == expected_tokens("low", 12)
        other.assert_idle()


class TestSwap:
    def test_nothing_is_computed_again(self, engine):
        """P-15: each token of prompt and output once, and the same ones as undisturbed."""
        low, _ = swapped_out(engine)
        engine.run_to_end()
        end = engine.end(low)
        assert (end.num_preemptions, end.num_computed_tokens) == (1, 10 + 12 - 1)
        assert engine.tokens(low) == expected_tokens("low", 12)
        swapping = engine.scheduler.swapping
        assert (swapping.num_swapped, swapping.num_refused) == (1, 0)
        assert swapping.num_blocks_copied == 6

    def test_blocks_are_given_to_nobody_before_they_are_copied(self):
        """The fence: a block that leaves is held until the plan with its copy is committed."""
        engine = Engine(num_blocks=10, rules=BY_TIER, swap_slots=10)
        low = engine.add("low", num_prompt_tokens=32, max_tokens=4)
        engine.step()
        theirs = set(low.block_ids[:8])
        engine.add("high", priority="high", num_prompt_tokens=20, max_tokens=2)
        plan = to_copies(engine)
        assert {block for block, _ in plan.swaps.out} == theirs
        assert set(engine.pool.blocks_of(swap_holder(low.key))) == theirs
        taken = engine.pool.allocate(engine.pool.num_free, "a stranger")
        assert theirs.isdisjoint(taken)
        assert engine.pool.reserve(1, "h", ("k",)) is None
        engine.pool.release("a stranger")
        engine.swap(plan)
        assert not engine.pool.blocks_of(swap_holder(low.key))
        engine.run_to_end()
        engine.assert_idle()

    def test_imports_cannot_take_what_was_made_free_for_a_higher_tier(self):
        engine = Engine(num_blocks=10, rules=BY_TIER, swap_slots=10)
        low = engine.add("low", num_prompt_tokens=32, max_tokens=4)
        engine.step()
        high = engine.add("high", priority="high", num_prompt_tokens=28, max_tokens=2)
        engine.swap(to_copies(engine))
        assert engine.pool.reserve(6, "h", ("k",)) is None
        engine.step()
        assert high.state is SequenceState.RUNNING
        engine.run_to_end()
        assert (low.num_preemptions, engine.tokens(low)) == (1, expected_tokens("low", 4))
        engine.assert_idle()

    def test_one_that_grows_takes_the_youngests_blocks_after_the_copy(self):
        engine = Engine(num_blocks=8, swap_slots=8)
        old = engine.add("old", num_prompt_tokens=12, max_tokens=12)
        young = engine.add("young", num_prompt_tokens=12, max_tokens=12)
        engine.run_to_end()
        assert (old.num_preemptions, young.num_preemptions) == (0, 1)
        for sequence in (old, young):
            assert engine.tokens(sequence) == expected_tokens(sequence.key.request_id, 12)
            assert engine.end(sequence).num_computed_tokens == 12 + 12 - 1
        engine.assert_idle()

    def test_an_import_that_waits_keeps_its_kv_too(self):
        engine = Engine(num_blocks=8, max_num_seqs=1, swap_slots=8)
        old = engine.add("old", num_prompt_tokens=12, max_tokens=16)
        engine.step()
        imported = engine.add_imported("imported", num_prompt_tokens=16, max_tokens=4)
        engine.run_to_end()
        assert (old.num_preemptions, imported.num_preemptions) == (0, 1)
        assert engine.end(imported).num_computed_tokens == 3, "one for each token after the first"
        assert engine.tokens(imported) == expected_tokens("imported", 4)[1:]
        engine.assert_idle()

    @pytest.mark.parametrize("swap_slots", [0, 20])
    def test_a_prompt_is_preempted_between_two_chunks(self, swap_slots):
        """P-24: by either kind; with swap it goes on with its next chunk."""
        engine = Engine(max_num_seqs=1, chunk_tokens=16, rules=BY_TIER, swap_slots=swap_slots)
        low = engine.add("low", num_prompt_tokens=100, max_tokens=2)
        engine.step()
        engine.step()
        assert low.num_computed_tokens == 32
        high = engine.add("high", priority="high", num_prompt_tokens=20, max_tokens=2)
        assert [share.key.request_id for share in engine.step().shares] == ["high"]
        assert low.num_tokens_left == (68 if swap_slots else 100)
        engine.run_to_end()
        assert engine.tokens(high) == expected_tokens("high", 2)
        assert engine.tokens(low) == expected_tokens("low", 2)
        again = engine.end(low).num_computed_tokens - 101
        assert again == (0 if swap_slots else 32)
        engine.assert_idle()

    def test_an_export_goes_on_with_its_blocks_whole(self):
        """What is to be handed over is told as computed only while its blocks have it."""
        engine = Engine(max_num_seqs=1, chunk_tokens=16, rules=BY_TIER, swap_slots=20)
        low = engine.add("low", num_prompt_tokens=40, max_tokens=9, hands_over_at=1)
        engine.step()
        engine.add("high", priority="high", max_tokens=2)
        plan = to_copies(engine)
        assert (low.num_computed_tokens, engine.pool.blocks_of(low.key)) == (0, ())
        engine.swap(plan)
        plan = to_copies(engine)
        assert low.num_computed_tokens == 0, "its blocks are not written yet"
        engine.swap(plan)
        assert low.num_computed_tokens == 16
        engine.run_to_end()
        assert engine.end(low).num_computed_tokens == 40
        assert len(engine.pool.blocks_of(low.key)) == 10
        engine.pool.release(low.key)
        engine.assert_idle()

    def test_what_the_cache_still_has_is_not_copied_back(self):
        engine = Engine(
            num_blocks=20, max_num_seqs=1, rules=BY_TIER, swap_slots=20, has_prefix_cache=True
        )
        low, high = swapped_out(engine)
        while high.state is not SequenceState.ENDED:
            engine.step()
        engine.step()
        assert (low.state, num_kept(engine)) == (SequenceState.RUNNING, 0)
        engine.run_to_end()
        out, back = (sum(len(getattr(s, w)) for s in engine.swaps) for w in ("out", "back"))
        assert (out, back) == (3, 0), "12 tokens are three full blocks, found again"
        assert engine.end(low).num_cached_tokens == 0, "the client's prompt was computed here"
        assert engine.end(low).num_computed_tokens == 10 + 12 - 1
        assert engine.tokens(low) == expected_tokens("low", 12)
        engine.assert_idle()

    @pytest.mark.parametrize("is_aborted", [False, True])
    def test_what_came_back_is_found_again(self, is_aborted):
        """Its own blocks were evicted; those it has now are as good."""
        engine = Engine(
            num_blocks=10, max_num_seqs=1, rules=BY_TIER, swap_slots=20, has_prefix_cache=True
        )
        low = engine.add("low", num_prompt_tokens=16, max_tokens=3)
        engine.step()
        engine.add("high", priority="high", num_prompt_tokens=36, max_tokens=2)
        engine.swap(to_copies(engine))
        plan = to_copies(engine)
        assert len(plan.swaps.back) == 4
        engine.copy(plan.swaps)
        if is_aborted:
            engine.abort(low)
        engine.log.take(engine.scheduler.commit(plan, None, engine.clock.now()))
        engine.run_to_end()
        again = engine.add("again", prompt_ids=low.prompt_ids, max_tokens=2)
        engine.run_to_end()
        assert again.num_cached_tokens == (0 if is_aborted else 12)
        engine.assert_idle()

    @pytest.mark.parametrize("most", [1, 3])
    def test_nobody_is_swapped_more_often_than_max_preemptions(self, most):
        rules = Rules(ordering=BY_TIER.ordering, tiers=TIERS, max_preemptions=most)
        engine = Engine(max_num_seqs=1, rules=rules, swap_slots=40)
        low = engine.add("low", num_prompt_tokens=20, max_tokens=30)
        for number in range(6):
            while low.state is not SequenceState.RUNNING:
                engine.step()
            engine.step()
            engine.add(f"h{number}", priority="high", max_tokens=2)
            engine.step()
        engine.run_to_end()
        assert low.num_preemptions == engine.scheduler.swapping.num_swapped == most
        assert engine.end(low).num_computed_tokens == 20 + 30 - 1
        engine.assert_idle()


class TestNoMoreThanNeeded:
    """Room that is on its way counts: nobody else gives way for it, and nobody else takes it."""

    def test_for_one_that_needs_a_slot_and_blocks(self):
        engine = Engine(num_blocks=17, max_num_seqs=2, rules=BY_TIER, swap_slots=20)
        lows = [engine.add(f"l{i}", num_prompt_tokens=30, max_tokens=2) for i in range(2)]
        engine.step()
        engine.add("high", priority="high", num_prompt_tokens=24, max_tokens=2)
        engine.run_to_end()
        assert [low.num_preemptions for low in lows] == [0, 1]
        engine.assert_idle()

    def test_its_slot_goes_to_nobody_else(self):
        engine = Engine(num_blocks=10, max_num_seqs=1, rules=BY_TIER, swap_slots=20)
        engine.add("low", num_prompt_tokens=30, max_tokens=2)
        engine.step()
        small = engine.add("small", num_prompt_tokens=2, max_tokens=2)
        engine.add("high", priority="high", num_prompt_tokens=24, max_tokens=2)
        engine.run_to_end()
        assert small.num_preemptions == 0
        engine.assert_idle()

    def test_for_two_that_grow(self):
        engine = Engine(num_blocks=16, swap_slots=20)
        lengths = {"a": 16, "b": 16, "c": 13, "d": 13}
        sequences = [
            engine.add_imported(name, num_prompt_tokens=n, max_tokens=3)
            for name, n in lengths.items()
        ]
        engine.run_to_end()
        assert [s.num_preemptions for s in sequences] == [0, 0, 0, 1]
        engine.assert_idle()


class TestFullBuffer:
    def test_one_that_does_not_fit_is_computed_again_and_counted(self):
        engine = Engine(num_blocks=20, max_num_seqs=1, rules=BY_TIER, swap_slots=2)
        low = engine.add("low", num_prompt_tokens=10, max_tokens=12)
        engine.step()
        engine.add("high", priority="high", max_tokens=4)
        engine.run_to_end()
        swapping = engine.scheduler.swapping
        assert (swapping.num_swapped, swapping.num_refused) == (0, 1)
        assert engine.scheduler.num_preemptions == 1
        assert engine.end(low).num_computed_tokens == 10 + 12 - 1 + 10
        assert engine.tokens(low) == expected_tokens("low", 12)
        engine.assert_idle()

    def test_the_next_one_fits_when_the_first_is_back(self):
        engine = Engine(num_blocks=100, max_num_seqs=2, rules=BY_TIER, swap_slots=4)
        lows = [engine.add(f"l{i}", num_prompt_tokens=10, max_tokens=30) for i in range(2)]
        engine.step()
        engine.add("h0", priority="high", max_tokens=3)
        engine.add("h1", priority="high", max_tokens=3)
        engine.run_to_end()
        again = [engine.end(low).num_computed_tokens - 39 for low in lows]
        assert sorted(again) == [0, 10], "room for one of them"
        engine.add("l2", num_prompt_tokens=8, max_tokens=8)
        engine.add("l3", num_prompt_tokens=8, max_tokens=8)
        engine.step()
        engine.add("h2", priority="high", max_tokens=3)
        engine.run_to_end()
        swapping = engine.scheduler.swapping
        assert (swapping.num_swapped, swapping.num_refused) == (2, 1)
        engine.assert_idle()


def test_a_prompt_without_kv_needs_no_slot():
    """Its first chunk was never computed: there is nothing to keep."""
    engine = Engine(num_blocks=20, max_num_seqs=2, token_budget=16, rules=BY_TIER, swap_slots=4)
    first = engine.add("a", num_prompt_tokens=16, max_tokens=3)
    second = engine.add("b", num_prompt_tokens=16, max_tokens=3)
    engine.step()
    assert (first.num_computed_tokens, second.num_computed_tokens) == (16, 0)
    engine.add("high", priority="high", max_tokens=3)
    engine.run_to_end()
    assert second.num_preemptions == 1
    assert engine.scheduler.swapping.num_blocks_copied == 0
    assert engine.end(second).num_computed_tokens == 18
    assert num_kept(engine) == 0
    engine.assert_idle()
