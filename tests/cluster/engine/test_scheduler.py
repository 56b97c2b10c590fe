"""What a step holds, who is admitted, and who gives way."""

import pytest

from cluster.engine.rules import Rules
from cluster.request import FinishReason
from tests.factories import (
    expected_tokens,
    make_key,
)


def sizes(plan) -> list[tuple[str, int]]:
    return [(share.key.request_id, len(share.token_ids)) for share in plan.shares]


class TestOneSequence:
    def test_runs_from_prompt_to_its_last_token(self, make_engine):
        engine = make_engine()
        sequence = engine.add(num_prompt_tokens=10, max_tokens=5)
        assert engine.run_to_end() == 5
        assert engine.tokens(sequence) == expected_tokens("r", 5)
        end = engine.end(sequence)
        assert (end.finish_reason, end.error) == (FinishReason.LENGTH, None)
        assert (end.num_steps, end.num_computed_tokens) == (5, 14)
        assert end.queue_s == pytest.approx(0.0)
        assert end.compute_s == pytest.approx(0.05)
        assert engine.log.started == [sequence.key]
        engine.assert_idle()

    @pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 8, 9])
    @pytest.mark.parametrize("chunk_tokens", [0, 1, 2, 4, 5])
    def test_around_block_borders_and_chunks(self, make_engine, num_prompt_tokens, chunk_tokens):
        """P-13 (the scheduler's part): chunk size and block borders change no token."""
        engine = make_engine(chunk_tokens=chunk_tokens)
        sequence = engine.add(num_prompt_tokens=num_prompt_tokens, max_tokens=6)
        engine.run_to_end()
        assert engine.tokens(sequence) == expected_tokens("r", 6)
        assert engine.scheduler.num_prefilled_tokens == num_prompt_tokens
        engine.assert_idle()

    def test_a_prompt_longer_than_the_budget_is_cut_by_it(self, make_engine):
        engine = make_engine(token_budget=16)
        engine.add(num_prompt_tokens=40, max_tokens=1)
        assert [sizes(engine.step()) for _ in range(3)] == [[("r", 16)], [("r", 16)], [("r", 8)]]

    def test_only_the_last_chunk_is_sampled(self, make_engine):
        engine = make_engine(chunk_tokens=16)
        engine.add(num_prompt_tokens=40, max_tokens=1)
        shares = [engine.step().shares[0] for _ in range(3)]
        assert [share.is_sampled for share in shares] == [False, False, True]
        assert [share.start for share in shares] == [0, 16, 32]
        assert [len(share.block_ids) for share in shares] == [4, 8, 10]

    def test_a_resumed_one_computes_prompt_and_output_and_goes_on(self, make_engine):
        engine = make_engine()
        sequence = engine.add(
            num_prompt_tokens=10, max_tokens=5, output_ids=expected_tokens("r", 3)
        )
        assert sizes(engine.step()) == [("r", 13)]
        engine.run_to_end()
        assert engine.tokens(sequence) == expected_tokens("r", 5)[3:]
        assert engine.log.first_index[sequence.key] == 3


class TestOneStep:
    def test_decodes_come_first_then_one_chunk_and_what_can_be_ended_beside_it(self, make_engine):
        engine = make_engine(token_budget=20, chunk_tokens=12, max_num_seqs=6)
        engine.add("a", num_prompt_tokens=3)
        engine.add("b", num_prompt_tokens=3)
        engine.step()
        engine.add("c", num_prompt_tokens=30)
        engine.add("d", num_prompt_tokens=30)
        engine.add("e", num_prompt_tokens=7)
        engine.add("f", num_prompt_tokens=6)
        assert sizes(engine.step()) == [("a", 1), ("b", 1), ("c", 11), ("e", 7)]
        assert sizes(engine.step()) == [("a", 1), ("b", 1), ("e", 1), ("c", 11), ("f", 6)]
        engine.run_to_end()

    def test_one_token_of_a_prompt_stands_among_the_decodes(self, make_engine):
        """The runner takes single tokens first, whoever they are."""
        engine = make_engine(token_budget=8, chunk_tokens=5)
        engine.add("a", num_prompt_tokens=6)
        engine.step()
        engine.add("b", num_prompt_tokens=5)
        engine.add("c", num_prompt_tokens=1)
        plan = engine.step()
        assert [len(share.token_ids) == 1 for share in plan.shares] == [True, True, False]
        engine.run_to_end()

    def test_whole_prompts_are_not_cut_beside_another_prompt(self, make_engine):
        engine = make_engine(token_budget=50)
        for name in ("a", "b", "c"):
            engine.add(name, num_prompt_tokens=20, max_tokens=1)
        engine.add("d", num_prompt_tokens=10, max_tokens=1)
        assert sizes(engine.step()) == [("a", 20), ("b", 20), ("d", 10)]
        assert sizes(engine.step()) == [("c", 20)]

    def test_the_first_prompt_of_a_step_takes_what_the_decodes_leave(self, make_engine):
        engine = make_engine(token_budget=20)
        engine.add("a", num_prompt_tokens=4)
        engine.step()
        engine.add("b", num_prompt_tokens=20)
        assert sizes(engine.step()) == [("a", 1), ("b", 19)]
        assert [share.key.request_id for share in engine.step().shares] == ["a", "b"]
        engine.run_to_end()

    def test_the_oldest_prompt_goes_first_whenever_it_was_admitted(self, make_engine):
        engine = make_engine(num_blocks=12, token_budget=8, chunk_tokens=6)
        engine.pool.allocate(8, ("export", "h"))
        engine.add("big", num_prompt_tokens=22, max_tokens=1)
        engine.clock.advance(0.01)
        engine.add("small", num_prompt_tokens=15, max_tokens=1)
        assert sizes(engine.step()) == [("small", 6)]
        engine.pool.release(("export", "h"))
        assert sizes(engine.step()) == [("big", 6)]
        engine.run_to_end()
        engine.assert_idle()

    def test_slots_bound_the_batch(self, make_engine):
        engine = make_engine(max_num_seqs=2)
        for name in ("a", "b", "c"):
            engine.add(name, num_prompt_tokens=4, max_tokens=2)
        assert sizes(engine.step()) == [("a", 4), ("b", 4)]
        assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 1)
        engine.step()
        assert sizes(engine.step()) == [("c", 4)]
        engine.run_to_end()

    def test_queued_tokens_are_those_of_prompts_to_come(self, make_engine):
        engine = make_engine(max_num_seqs=1, chunk_tokens=16)
        engine.add("a", num_prompt_tokens=40, max_tokens=2)
        engine.add("b", num_prompt_tokens=10, max_tokens=2)
        assert engine.scheduler.queued_tokens == 50
        engine.step()
        assert engine.scheduler.queued_tokens == 34
        engine.run_to_end()
        assert engine.scheduler.queued_tokens == 0


class TestAdmission:
    def test_nobody_is_admitted_who_would_be_preempted_at_once(self, make_engine):
        engine = make_engine(num_blocks=4)
        engine.add("a", num_prompt_tokens=8, max_tokens=4)  # two blocks, a third for the next token
        engine.add("b", num_prompt_tokens=4, max_tokens=4)  # would need two, and one is left
        engine.step()
        assert engine.scheduler.num_running == 1
        engine.run_to_end()
        assert engine.scheduler.num_preemptions == 0

    def test_a_head_that_does_not_fit_lets_others_pass(self, make_engine):
        engine = make_engine(num_blocks=10)
        engine.add("a", num_prompt_tokens=22, max_tokens=10)
        engine.step()
        engine.add("big", num_prompt_tokens=30, max_tokens=2)
        engine.add("small", num_prompt_tokens=5, max_tokens=2)
        assert "small" in [share.key.request_id for share in engine.step().shares]
        engine.run_to_end()

    def test_but_only_those_that_came_soon_after_it(self, make_engine):
        """P-16: passing a blocked head must not starve it."""
        engine = make_engine(num_blocks=10)
        engine.add("a", num_prompt_tokens=18, max_tokens=14)
        engine.step()
        big = engine.add("big", num_prompt_tokens=30, max_tokens=2)
        engine.clock.advance(Rules().ordering.aging_s + 1)
        late = engine.add("late", num_prompt_tokens=5, max_tokens=2)
        engine.run_to_end()
        assert engine.log.started.index(big.key) < engine.log.started.index(late.key)

    def test_imports_need_a_slot_only_and_pass_a_blocked_head(self, make_engine):
        """P-16: KV that has arrived is decoded though the queue's head waits for blocks."""
        engine = make_engine(num_blocks=10)
        engine.add("a", num_prompt_tokens=18, max_tokens=14)
        engine.step()
        engine.add("big", num_prompt_tokens=30, max_tokens=2)
        engine.clock.advance(Rules().ordering.aging_s + 1)
        imported = engine.add_imported("i", num_prompt_tokens=7, max_tokens=3)
        assert sizes(engine.step()) == [("a", 1), ("i", 1)]
        engine.run_to_end()
        assert engine.tokens(imported) == expected_tokens("i", 3)[1:]
        assert engine.log.first_index[imported.key] == 1
        assert engine.end(imported).num_computed_tokens == 2

    def test_an_import_with_its_whole_input_computed_computes_its_last_token_again(
        self, make_engine
    ):
        engine = make_engine()
        key = make_key("i")
        sequence = engine.add_imported("i", num_prompt_tokens=8, max_tokens=3)
        assert sequence.num_computed_tokens == 8
        engine.abort(sequence)
        engine.pool.allocate(2, key)
        again = engine.add("i", num_prompt_tokens=8, num_computed_tokens=8, max_tokens=1)
        assert again.num_tokens_left == 1
        engine.abort(again)

    def test_a_lone_one_waits_for_blocks_held_outside(self, make_engine):
        engine = make_engine(num_blocks=4)
        assert engine.pool.allocate(2, ("export", "h")) is not None
        sequence = engine.add(num_prompt_tokens=7, max_tokens=6)
        assert engine.run_to_end() == 2
        assert len(engine.tokens(sequence)) == 2
        assert engine.step() is None
        assert engine.scheduler.num_running == 1
        engine.pool.release(("export", "h"))
        engine.run_to_end()
        assert engine.tokens(sequence) == expected_tokens("r", 6)
        assert engine.scheduler.num_preemptions == 0


class TestPreemption:
    def test_the_youngest_gives_way_and_is_computed_again(self, make_engine):
        """P-15: what was preempted draws the same tokens, none twice, none lost."""
        engine = make_engine(num_blocks=6, chunk_tokens=5)
        old = engine.add("old", num_prompt_tokens=7, max_tokens=12)
        young = engine.add("young", num_prompt_tokens=7, max_tokens=12)
        engine.run_to_end()
        assert engine.tokens(old) == expected_tokens("old", 12)
        assert engine.tokens(young) == expected_tokens("young", 12)
        assert engine.end(old).num_preemptions == 0
        assert engine.end(young).num_preemptions > 0
        assert engine.end(young).num_computed_tokens > 7 + 11
        assert engine.scheduler.num_prefilled_tokens == 14
        assert engine.log.started == [old.key, young.key]
        recomputed = [s for p in engine.runner.plans for s in p.shares if s.key == young.key]
        assert max(len(share.token_ids) for share in recomputed) <= 5
        engine.assert_idle()

    def test_six_in_a_pool_for_two_and_a_half(self, make_engine):
        """P-15: several preemptions each, imports among them, and every answer undisturbed."""
        engine = make_engine(num_blocks=20, max_num_seqs=6)
        sequences = [engine.add(f"r{i}", num_prompt_tokens=9, max_tokens=24) for i in range(4)]
        sequences += [
            engine.add_imported(f"r{i}", num_prompt_tokens=9, max_tokens=24) for i in (4, 5)
        ]
        engine.run_to_end()
        for i, sequence in enumerate(sequences):
            first = engine.log.first_index[sequence.key]
            assert engine.tokens(sequence) == expected_tokens(f"r{i}", 24)[first:]
        assert engine.scheduler.num_preemptions >= 4
        engine.assert_idle()

    def test_the_preempted_goes_to_the_front_of_the_queue(self, make_engine):
        engine = make_engine(num_blocks=6, max_num_seqs=2)
        engine.add("old", num_prompt_tokens=7, max_tokens=16)
        young = engine.add("young", num_prompt_tokens=7, max_tokens=8)
        next_one = engine.add("next", num_prompt_tokens=7, max_tokens=2)
        while not young.num_preemptions:
            engine.step()
        assert engine.scheduler.num_running == 1
        engine.run_to_end()
        assert engine.end(next_one).queue_s > engine.end(young).queue_s
        ended = list(engine.log.ends)
        assert ended.index(young.key) < ended.index(next_one.key)

    def test_an_import_that_waits_for_a_slot_gives_its_blocks_too(self, make_engine):
        """P-16: A grows, B's blocks have arrived, and neither may wait for the other."""
        engine = make_engine(num_blocks=6, max_num_seqs=1)
        growing = engine.add("a", num_prompt_tokens=7, max_tokens=16)
        imported = engine.add_imported("b", num_prompt_tokens=12, max_tokens=6)
        engine.run_to_end()
        assert engine.tokens(growing) == expected_tokens("a", 16)
        assert engine.tokens(imported) == expected_tokens("b", 6)[1:]
        assert engine.end(imported).num_preemptions == 1
        engine.assert_idle()

    def test_blocks_that_become_free_are_kept_for_the_preempted(self, make_engine):
        """P-16: new imports cannot starve a sequence that was preempted."""
        engine = make_engine(num_blocks=6)
        engine.add("old", num_prompt_tokens=7, max_tokens=12)
        young = engine.add("young", num_prompt_tokens=7, max_tokens=12)
        while not young.num_preemptions:
            engine.step()
        assert engine.pool.num_free > 0
        assert engine.pool.reserve(engine.pool.num_free, "h", make_key("new")) is None
        engine.run_to_end()
        assert engine.pool.reserve(6, "h", make_key("new")) is not None
        engine.pool.cancel("h")

    def test_the_youngest_waits_in_place_when_only_older_ones_hold_blocks(self, make_engine):
        engine = make_engine(num_blocks=6)
        old = engine.add("old", num_prompt_tokens=14, max_tokens=3)
        engine.step()
        young = engine.add_imported("young", num_prompt_tokens=8, max_tokens=3)
        assert sizes(engine.step()) == [("old", 1)]
        assert young.num_preemptions == 0
        engine.run_to_end()
        assert engine.end(old).num_preemptions == engine.end(young).num_preemptions == 0
