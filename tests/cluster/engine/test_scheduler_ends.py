"""How sequences end: finished, refused, aborted, too late, or handed over."""

import pytest

from cluster.engine.plan import Outcome
from cluster.engine.scheduler import StepScheduler
from cluster.errors import Cancelled, DeadlineExceeded, EngineFault, InvalidRequest, WorkerLost
from cluster.kv.block_pool import BlockPool
from cluster.request import FinishReason
from tests.factories import (
    EOS_ID,
    Engine,
    FakeRunner,
    expected_tokens,
    make_key,
    make_params,
)


class TestFinish:
    def test_an_end_token_is_told_and_ends_with_stop(self, make_engine):
        engine = make_engine(runner=FakeRunner(script={("r", 2): EOS_ID}))
        sequence = engine.add(max_tokens=8)
        engine.run_to_end()
        assert engine.tokens(sequence) == [*expected_tokens("r", 2), EOS_ID]
        assert engine.end(sequence).finish_reason is FinishReason.STOP

    def test_a_stop_id_is_told_and_ends_with_stop(self, make_engine):
        engine = make_engine()
        stop_id = expected_tokens("r", 4)[3]
        sequence = engine.add(params=make_params(8, stop_token_ids=(stop_id,)))
        engine.run_to_end()
        assert engine.tokens(sequence) == expected_tokens("r", 4)
        assert engine.end(sequence).finish_reason is FinishReason.STOP

    def test_ignored_end_tokens_are_ordinary(self, make_engine):
        engine = make_engine(runner=FakeRunner(script={("r", 2): EOS_ID}))
        sequence = engine.add(max_tokens=5, eos_ids=frozenset())
        engine.run_to_end()
        assert len(engine.tokens(sequence)) == 5

    def test_an_end_token_at_the_limit_is_a_stop(self, make_engine):
        """P-08: a natural end that falls on max_tokens."""
        engine = make_engine(runner=FakeRunner(script={("r", 2): EOS_ID}))
        sequence = engine.add(max_tokens=3)
        engine.run_to_end()
        assert engine.end(sequence).finish_reason is FinishReason.STOP

    @pytest.mark.parametrize("max_tokens", [1, 2, 10])
    def test_max_tokens_is_exact(self, make_engine, max_tokens):
        """P-01, P-08: one token for max_tokens 1, not two."""
        engine = make_engine()
        sequence = engine.add(max_tokens=max_tokens)
        engine.run_to_end()
        assert len(engine.tokens(sequence)) == max_tokens
        assert engine.end(sequence).finish_reason is FinishReason.LENGTH

    def test_the_context_is_a_limit_too(self, make_engine):
        engine = make_engine(max_model_len=45)
        sequence = engine.add(num_prompt_tokens=40, max_tokens=100)
        engine.run_to_end()
        assert len(engine.tokens(sequence)) == 5
        assert engine.end(sequence).finish_reason is FinishReason.LENGTH

    def test_a_resumed_one_that_was_over_ends_without_a_step(self, make_engine):
        engine = make_engine()
        sequence = engine.add(max_tokens=3, output_ids=expected_tokens("r", 3))
        assert engine.step() is None
        assert engine.end(sequence).finish_reason is FinishReason.LENGTH
        assert engine.tokens(sequence) == []


class TestRefusal:
    @pytest.mark.parametrize(
        ("num_prompt_tokens", "max_tokens", "field"),
        [(41, 1, "prompt"), (60, 1, "prompt"), (40, 2, "max_tokens"), (20, 22, "max_tokens")],
    )
    def test_what_can_never_fit_ends_at_once(
        self, make_engine, num_prompt_tokens, max_tokens, field
    ):
        engine = make_engine(num_blocks=10, max_model_len=60)
        sequence = engine.add(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        assert engine.step() is None
        error = engine.end(sequence).error
        assert isinstance(error, InvalidRequest)
        assert error.field == field
        assert "KV pool holds 40" in error.message or "context holds 60" in error.message

    @pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(40, 1), (20, 21), (1, 40)])
    def test_what_just_fits_is_served(self, make_engine, num_prompt_tokens, max_tokens):
        engine = make_engine(num_blocks=10)
        sequence = engine.add(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        engine.run_to_end()
        assert len(engine.tokens(sequence)) == max_tokens
        engine.assert_idle()

    def test_a_prefill_half_needs_room_for_the_prompt_only(self, make_engine):
        engine = make_engine(num_blocks=10)
        sequence = engine.add(num_prompt_tokens=40, max_tokens=500, hands_over_at=1)
        engine.run_to_end()
        assert engine.end(sequence).error is None
        assert engine.pool.release(sequence.key) == 10

    def test_empty_work_is_refused(self, make_engine):
        engine = make_engine()
        no_prompt = engine.add("a", num_prompt_tokens=0)
        no_tokens = engine.add("b", max_tokens=-1)
        engine.step()
        assert engine.end(no_prompt).error.field == "prompt"
        assert engine.end(no_tokens).error.field == "max_tokens"

    def test_a_refused_import_gives_its_blocks_back(self, make_engine):
        engine = make_engine(num_blocks=10)
        engine.add_imported(num_prompt_tokens=20, max_tokens=500)
        engine.assert_idle()

    def test_an_import_without_its_blocks_is_our_fault(self, make_engine):
        engine = make_engine()
        sequence = engine.add(num_prompt_tokens=8, num_computed_tokens=8, output_ids=[5])
        engine.step()
        assert isinstance(engine.end(sequence).error, EngineFault)

    def test_a_key_is_in_the_engine_once(self, make_engine):
        engine = make_engine()
        first = engine.add(max_tokens=2)
        with pytest.raises(ValueError, match="already"):
            engine.add(max_tokens=2)
        engine.run_to_end()
        assert engine.tokens(first) == expected_tokens("r", 2)

    def test_a_budget_below_the_slots_is_refused(self):
        with pytest.raises(ValueError, match="token_budget"):
            StepScheduler(BlockPool(1), 4, 8, 7, 0, 100)


class TestAbort:
    def test_waiting(self, make_engine):
        engine = make_engine(max_num_seqs=1)
        engine.add("a", max_tokens=2)
        waiting = engine.add("b")
        engine.step()
        engine.abort(waiting)
        engine.run_to_end()
        end = engine.end(waiting)
        assert isinstance(end.error, Cancelled)
        assert (end.num_steps, end.compute_s) == (0, 0.0)
        engine.assert_idle()

    @pytest.mark.parametrize("num_steps", [1, 2, 4])
    def test_running_between_steps(self, make_engine, num_steps):
        engine = make_engine(chunk_tokens=16)
        sequence = engine.add(num_prompt_tokens=40)
        for _ in range(num_steps):
            engine.step()
        engine.abort(sequence)
        engine.assert_idle()
        assert engine.step() is None
        assert engine.end(sequence).num_steps == num_steps

    @pytest.mark.parametrize("chunk_tokens", [0, 16])
    def test_inside_the_running_step_drops_its_token(self, make_engine, chunk_tokens):
        engine = make_engine(chunk_tokens=chunk_tokens)
        sequence = engine.add("a", num_prompt_tokens=40)
        other = engine.add("b", num_prompt_tokens=5, max_tokens=3)
        engine.step(before_commit=lambda: engine.abort(sequence))
        assert engine.tokens(sequence) == []
        assert isinstance(engine.end(sequence).error, Cancelled)
        engine.run_to_end()
        assert engine.tokens(other) == expected_tokens("b", 3)
        engine.assert_idle()

    def test_while_preempted(self, make_engine):
        engine = make_engine(num_blocks=6)
        engine.add("old", num_prompt_tokens=7, max_tokens=12)
        young = engine.add("young", num_prompt_tokens=7, max_tokens=12)
        while not young.num_preemptions:
            engine.step()
        engine.abort(young)
        engine.run_to_end()
        engine.assert_idle()

    def test_an_import_that_waits_for_its_slot(self, make_engine):
        engine = make_engine(max_num_seqs=1)
        engine.add("a", max_tokens=2)
        imported = engine.add_imported("i")
        engine.abort(imported)
        engine.run_to_end()
        assert engine.tokens(imported) == []
        engine.assert_idle()

    def test_unknown_or_ended_is_nothing(self, make_engine):
        engine = make_engine()
        sequence = engine.add(max_tokens=1)
        engine.run_to_end()
        engine.abort(sequence)
        engine.scheduler.abort(make_key("never"), Cancelled("left"), 0.0)
        assert engine.step() is None
        assert engine.end(sequence).finish_reason is FinishReason.LENGTH

    def test_all(self, make_engine):
        engine = make_engine(max_num_seqs=1)
        for name in ("a", "b"):
            engine.add(name)
        engine.step()
        engine.scheduler.abort_all(EngineFault("broken"), engine.clock.now())
        engine.step()
        assert [type(end.error) for end in engine.log.ends.values()] == [EngineFault, EngineFault]

    def test_all_at_once_tells_those_that_no_step_computed_another_error(self):
        engine = Engine(max_num_seqs=1)
        begun, waiting = engine.add("a"), engine.add("b")
        engine.step()
        broken, lost = EngineFault("broken"), WorkerLost("broken")
        engine.scheduler.abort_all(broken, engine.clock.now(), others=lost)
        engine.log.take(engine.scheduler.take_events())
        assert engine.log.ends[begun.key].error is broken
        assert engine.log.ends[waiting.key].error is lost
        engine.assert_idle()

    @pytest.mark.parametrize("fails_in", ["run", "commit"])
    def test_all_in_mid_step_tells_those_that_it_left_out_another_error(self, fails_in):
        """The younger one was begun as well, and gave its blocks up before the step that fails."""
        engine = Engine(num_blocks=4)
        computed, left_out = (engine.add(name, num_prompt_tokens=4) for name in "ab")
        engine.step()
        while not engine.scheduler.num_waiting:
            engine.step()
        plan = engine.scheduler.schedule(engine.clock.now())
        assert [share.key for share in plan.shares] == [computed.key]
        if fails_in == "commit":
            with pytest.raises(KeyError):
                engine.scheduler.commit(plan, Outcome({}), engine.clock.now())
        broken, lost = WorkerLost("broken"), WorkerLost("lost")
        engine.scheduler.abort_all(broken, engine.clock.now(), others=lost)
        engine.log.take(engine.scheduler.take_events())
        assert engine.log.ends[computed.key].error is broken
        assert engine.log.ends[left_out.key].error is lost
        engine.assert_idle()


class TestDeadline:
    def test_in_the_queue(self, make_engine):
        engine = make_engine(max_num_seqs=1)
        engine.add("a", max_tokens=5)
        waiting = engine.add("b", deadline=engine.clock.now() + 0.015)
        engine.run_to_end()
        error = engine.end(waiting).error
        assert isinstance(error, DeadlineExceeded)
        assert error.stage == "queue"
        engine.assert_idle()

    @pytest.mark.parametrize(
        ("num_prompt_tokens", "chunk_tokens", "stage"), [(40, 4, "prefill"), (4, 4, "decode")]
    )
    def test_while_running(self, make_engine, num_prompt_tokens, chunk_tokens, stage):
        engine = make_engine(chunk_tokens=chunk_tokens)
        sequence = engine.add(
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=100,
            deadline=engine.clock.now() + 0.025,
        )
        assert engine.run_to_end() == 3
        assert engine.end(sequence).error.stage == stage
        engine.assert_idle()

    def test_of_an_import_in_the_decode_queue(self, make_engine):
        engine = make_engine(max_num_seqs=1)
        engine.add("a", max_tokens=5)
        imported = engine.add_imported("i", deadline=engine.clock.now() + 0.01)
        engine.run_to_end()
        assert engine.end(imported).error.stage == "decode queue"
        engine.assert_idle()

    def test_the_next_one_is_known(self, make_engine):
        engine = make_engine()
        assert engine.next_instant is None
        sequences = [engine.add(f"r{i}", deadline=200.0 + i) for i in range(3)]
        assert engine.next_instant == 200.0
        for sequence in sequences:
            engine.abort(sequence)


class TestHandover:
    def test_leaves_with_its_blocks_held_under_its_key(self, make_engine):
        engine = make_engine()
        sequence = engine.add(num_prompt_tokens=10, max_tokens=8, hands_over_at=1)
        assert engine.run_to_end() == 1
        end = engine.end(sequence)
        assert (end.finish_reason, end.error) == (None, None)
        assert engine.tokens(sequence) == expected_tokens("r", 1)
        assert len(engine.pool.blocks_of(sequence.key)) == 3
        engine.pool.rename(sequence.key, ("export", "h"))
        engine.pool.release(("export", "h"))
        engine.assert_idle()

    def test_tells_each_step_how_much_is_computed(self, make_engine):
        engine = make_engine(chunk_tokens=8)
        sequence = engine.add(num_prompt_tokens=19, hands_over_at=1)
        other = engine.add("stays", num_prompt_tokens=19, max_tokens=2)
        engine.run_to_end()
        told = [pair for events in engine.log.batches for pair in events.computed]
        assert told == [(sequence.key, 8), (sequence.key, 16), (sequence.key, 19)]
        assert engine.tokens(other)
        engine.pool.release(sequence.key)

    def test_one_that_also_finishes_is_not_handed_over(self, make_engine):
        engine = make_engine(runner=FakeRunner(script={("eos", 0): EOS_ID}))
        by_eos = engine.add("eos", max_tokens=8, hands_over_at=1)
        by_length = engine.add("one", max_tokens=1, hands_over_at=1)
        engine.run_to_end()
        assert engine.end(by_eos).finish_reason is FinishReason.STOP
        assert engine.end(by_length).finish_reason is FinishReason.LENGTH
        engine.assert_idle()

    def test_of_a_resumed_choice_comes_after_its_next_token(self, make_engine):
        engine = make_engine()
        output_ids = expected_tokens("r", 3)
        sequence = engine.add(max_tokens=8, output_ids=output_ids, hands_over_at=4)
        engine.run_to_end()
        assert engine.log.first_index[sequence.key] == 3
        assert engine.tokens(sequence) == expected_tokens("r", 4)[3:]
        assert engine.pool.release(sequence.key) == 11

    def test_aborted_before_it_gives_everything_back(self, make_engine):
        engine = make_engine(chunk_tokens=8)
        sequence = engine.add(hands_over_at=1)
        engine.step()
        engine.abort(sequence)
        engine.assert_idle()


def test_an_outcome_without_its_token_is_an_error(make_engine):
    engine = make_engine()
    engine.runner.draw = lambda share: None
    sequence = engine.add()
    plan = engine.plan()
    outcome = type(engine.runner.run(plan))({})
    with pytest.raises(KeyError):
        engine.scheduler.commit(plan, outcome, engine.clock.now())
    engine.abort(sequence)
