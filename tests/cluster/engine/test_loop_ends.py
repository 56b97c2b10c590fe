"""The step thread: aborts, steps that fail or stall, and its own end."""

import threading

import pytest

from cluster.engine.step_model import StepModel
from cluster.errors import IN_STEP, Cancelled, WorkerLost
from tests.cluster.engine.loop_world import WAIT_S, Gate
from tests.factories import (
    expected_tokens,
    make_key,
)


class TestAbort:
    def test_inside_the_running_step_drops_its_token(self, make_world):
        gate = Gate()
        world = make_world(on_run=gate)
        world.loop.start()
        sequence = world.add()
        assert gate.entered.wait(WAIT_S)
        world.loop.abort(sequence.key, Cancelled("left"))
        gate.opened.set()
        assert isinstance(world.told.wait_for_end(sequence).error, Cancelled)
        assert sequence.key not in world.told.tokens
        assert len(world.runner.plans) == 1

    def test_while_it_waits_for_a_slot(self, make_world):
        gate = Gate()
        world = make_world(on_run=gate, max_num_seqs=1)
        world.loop.start()
        running = world.add("a", max_tokens=2)
        assert gate.entered.wait(WAIT_S)
        waiting = world.add("b")
        world.loop.abort(waiting.key, Cancelled("left"))
        gate.opened.set()
        assert world.told.wait_for_end(waiting).num_steps == 0
        assert world.told.wait_for_end(running).error is None

    def test_when_only_outsiders_hold_the_pool(self, make_world):
        world = make_world(num_blocks=4)
        world.pool.allocate(3, ("export", "h"))
        world.loop.start()
        sequence = world.add(num_prompt_tokens=8)
        world.loop.abort(sequence.key, Cancelled("left"))
        world.told.wait_for_end(sequence)
        world.pool.release(("export", "h"))

    def test_unknown_is_nothing(self, make_world):
        world = make_world()
        world.loop.start()
        world.loop.abort(make_key("never"), Cancelled("left"))
        assert world.told.wait_for_end(world.add(max_tokens=1)).error is None


class TestFault:
    def broken(self, plan) -> None:
        raise RuntimeError("no such kernel")

    def test_ends_everything_once_and_is_told_once(self, make_world):
        world = make_world(on_run=self.broken, max_num_seqs=1)
        sequences = [world.add(f"r{i}") for i in range(3)]
        world.loop.start()
        begun, *others = [world.told.wait_for_end(sequence).error for sequence in sequences]
        assert isinstance(begun.__cause__, RuntimeError)
        assert "no such kernel" not in begun.message
        # All can be tried elsewhere; only the first may be what it died of.
        assert all(isinstance(error, WorkerLost) for error in (begun, *others))
        assert [error.stage for error in (begun, *others)] == [IN_STEP, "queue", "queue"]
        world.told.wait_for(lambda: world.told.faults)
        # STEP: nor of what comes later, ever.
        late = world.add("late")
        assert isinstance(world.told.wait_for_end(late).error, WorkerLost)
        world.loop.stop(WAIT_S)
        assert [str(error) for error in world.told.faults] == ["no such kernel"]
        assert len(world.runner.plans) == 1
        after = world.add("after")
        assert isinstance(world.told.ends[after.key].error, WorkerLost)

    def test_in_mid_decode_frees_all_blocks(self, make_world):
        def fail_at_third(plan) -> None:
            if len(world.runner.plans) == 3:
                raise RuntimeError("third")

        world = make_world(on_run=fail_at_third)
        world.loop.start()
        sequence = world.add()
        assert world.told.wait_for_end(sequence).num_steps == 2
        assert world.told.tokens[sequence.key] == expected_tokens("r", 2)

    def test_of_a_callback_is_one_too(self, make_world):
        world = make_world()
        take = world.told.take

        def fails_on_tokens(events) -> None:
            if events.tokens:
                raise RuntimeError("callback")
            take(events)

        world.loop._on_events = fails_on_tokens
        world.loop.start()
        sequence = world.add()
        assert world.told.wait_for_end(sequence).error.stage == IN_STEP
        world.told.wait_for(lambda: world.told.faults)

    def test_of_pinning_is_one_too(self, make_world):
        def no_such_core() -> None:
            raise OSError("no such core")

        world = make_world(pin=no_such_core)
        world.loop.start()
        assert isinstance(world.told.wait_for_end(world.add()).error, WorkerLost)
        world.told.wait_for(lambda: world.told.faults)
        assert world.runner.plans == []

    @pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
    def test_is_whatever_is_raised(self, make_world, error):
        def leave(plan) -> None:
            raise error

        world = make_world(on_run=leave)
        world.loop.start()
        assert world.told.wait_for_end(world.add()).error.stage == IN_STEP
        world.told.wait_for(lambda: world.told.faults == [error])

    def test_is_told_though_the_sequences_cannot_be_ended(self, make_world, monkeypatch):
        world = make_world(on_run=self.broken)
        end = world.scheduler._end

        def fail(*args, **kwargs) -> None:
            raise ValueError("the books are wrong")

        monkeypatch.setattr(world.scheduler, "_end", fail)
        world.loop.start()
        world.add(deadline=world.clock.now() + 1)
        world.told.wait_for(lambda: world.told.faults)
        assert isinstance(world.told.faults[0], RuntimeError)
        # Its deadline passes and cannot end it either: the thread must not spin on that.
        world.clock.advance(2)
        assert world.loop._thread.is_alive()
        monkeypatch.setattr(world.scheduler, "_end", end)

    def test_a_callback_that_fails_after_it_hides_nothing(self, make_world):
        world = make_world(on_run=self.broken)

        def on_fault(error) -> None:
            world.told.on_fault(error)
            raise RuntimeError("again")

        world.loop._on_fault = on_fault
        world.loop.start()
        world.told.wait_for_end(world.add("a"))
        assert isinstance(world.told.wait_for_end(world.add("b")).error, WorkerLost)
        assert len(world.told.faults) == 1


class TestStop:
    def test_ends_what_is_left(self, make_world):
        gate = Gate()
        world = make_world(on_run=gate, max_num_seqs=1)
        world.loop.start()
        running, waiting = world.add("a"), world.add("b")
        assert gate.entered.wait(WAIT_S)
        inbox = world.add("c")
        stopper = threading.Thread(target=world.loop.stop, args=(WAIT_S,))
        stopper.start()
        gate.opened.set()
        stopper.join()
        for sequence in (running, waiting, inbox):
            assert isinstance(world.told.ends[sequence.key].error, Cancelled)
        world.loop.stop(WAIT_S)
        after = world.add("after")
        assert isinstance(world.told.ends[after.key].error, Cancelled)

    def test_before_the_start(self, make_world):
        world = make_world()
        sequence = world.add()
        world.loop.stop(WAIT_S)
        world.loop.stop(WAIT_S)
        assert isinstance(world.told.ends[sequence.key].error, Cancelled)
        with pytest.raises(RuntimeError):
            world.loop.start()

    def test_a_step_that_outlasts_it_ends_by_itself(self, make_world):
        gate = Gate()
        world = make_world(on_run=gate)
        world.loop.start()
        sequence = world.add()
        assert gate.entered.wait(WAIT_S)
        assert not world.loop.stop(0.01), "its step goes on"
        assert sequence.key not in world.told.ends
        gate.opened.set()
        assert isinstance(world.told.wait_for_end(sequence).error, Cancelled)

    def test_from_its_own_callback(self, make_world):
        world = make_world()
        take = world.told.take

        def stop_at_first_token(events) -> None:
            take(events)
            if events.tokens:
                world.loop.stop(WAIT_S)

        world.loop._on_events = stop_at_first_token
        world.loop.start()
        assert isinstance(world.told.wait_for_end(world.add()).error, Cancelled)

    def test_gives_back_the_blocks_of_an_import_that_comes_too_late(self, make_world):
        world = make_world()
        world.loop.stop(WAIT_S)
        world.pool.allocate(2, make_key())
        sequence = world.add(num_prompt_tokens=8, num_computed_tokens=8, output_ids=[5])
        assert isinstance(world.told.ends[sequence.key].error, Cancelled)
        assert world.pool.num_free == 100

    def test_it_starts_once(self, make_world):
        world = make_world()
        world.loop.start()
        with pytest.raises(RuntimeError):
            world.loop.start()


class TestStall:
    def test_a_step_is_stuck_after_ten_seconds_and_only_while_it_runs(self, make_world):
        gate = Gate()
        world = make_world(on_run=gate)
        world.loop.start()
        sequence = world.add(num_prompt_tokens=4, max_tokens=1)
        assert gate.entered.wait(WAIT_S)
        now = world.clock.now()
        assert world.loop.beat().patience_s == 5.0
        assert not world.loop.is_stalled(now + 9.9)
        assert world.loop.is_stalled(now + 10.1)
        # The whole process stood still until a moment ago: nobody was stuck.
        assert not world.loop.is_stalled(now + 10.1, awake_since=now + 10.0)
        gate.opened.set()
        world.told.wait_for_end(sequence)
        world.loop.stop(WAIT_S)
        assert not world.loop.is_stalled(now + 100)

    def test_a_long_prompt_may_take_eight_times_what_it_should(self, make_world):
        gate = Gate()
        world = make_world(on_run=gate)
        world.loop._speed = StepModel(prefill_per_token_s=0.1)
        world.loop.start()
        world.add(num_prompt_tokens=100, max_tokens=1)
        assert gate.entered.wait(WAIT_S)
        now = world.clock.now()
        assert world.loop.beat().patience_s == pytest.approx(40.0)
        assert not world.loop.is_stalled(now + 79)
        assert world.loop.is_stalled(now + 81)
        gate.opened.set()

    def test_waiting_for_blocks_held_outside_is_none(self, make_world):
        world = make_world(num_blocks=4)
        world.pool.allocate(4, ("export", "h"))
        world.loop.start()
        sequence = world.add(num_prompt_tokens=8, max_tokens=1)
        while world.loop._published.num_waiting != 1 or world.loop._pass is not None:
            world.loop.wake()
        assert not world.loop.is_stalled(world.clock.now() + 1000)
        world.pool.release(("export", "h"))
        world.told.wait_for_end(sequence)
