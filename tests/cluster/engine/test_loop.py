"""The step thread: woken by events, one end for each sequence, also when a step fails."""

import subprocess
import sys
import threading

import pytest

from cluster.engine.loop import EngineLoop
from cluster.engine.scheduler import StepScheduler
from cluster.engine.sequence import StoredLayers
from cluster.engine.step_model import StepModel
from cluster.errors import IN_STEP, Cancelled, DeadlineExceeded, InvalidRequest, WorkerLost
from cluster.kv.block_pool import BlockPool
from cluster.kv.swap_buffer import SwapBuffer
from cluster.request import FinishReason
from tests.factories import (
    BLOCK_SIZE,
    EventLog,
    FakeClock,
    FakeRunner,
    expected_tokens,
    make_key,
    make_sequence,
)

WAIT_S = 10.0


class Told(EventLog):
    """An event log that other threads can wait on."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()
        self.faults: list[BaseException] = []
        self.threads: set[str] = set()

    def take(self, events) -> None:
        with self.changed:
            super().take(events)
            self.threads.add(threading.current_thread().name)
            self.changed.notify_all()

    def on_fault(self, error: BaseException) -> None:
        with self.changed:
            self.faults.append(error)
            self.changed.notify_all()

    def wait_for(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), "it never happened"

    def wait_for_end(self, sequence):
        self.wait_for(lambda: sequence.key in self.ends)
        return self.ends[sequence.key]


class Gate:
    """Holds the runner inside a step until the test lets it go on."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, plan) -> None:
        self.entered.set()
        assert self.opened.wait(WAIT_S)


class World:
    """A loop with everything around it."""

    def __init__(
        self, *, num_blocks=100, max_num_seqs=8, on_run=None, pin=None, script=None, swap_slots=0
    ):
        self.clock = FakeClock()
        swap = SwapBuffer(swap_slots) if swap_slots else None
        self.pool = BlockPool(num_blocks, swap=swap)
        self.scheduler = StepScheduler(self.pool, BLOCK_SIZE, max_num_seqs, 1000, 0, 1000)
        self.runner = FakeRunner(clock=self.clock, step_s=0.01, on_run=on_run, script=script)
        self.told = Told()
        self.loop = EngineLoop(
            scheduler=self.scheduler,
            runner=self.runner,
            clock=self.clock,
            on_events=self.told.take,
            on_fault=self.told.on_fault,
            pin=pin,
            copier=self.runner,
        )
        self.clock.on_advance(self.loop.wake)

    def add(self, request_id="r", **fields):
        fields.setdefault("arrived", self.clock.now())
        sequence = make_sequence(request_id, **fields)
        self.loop.add(sequence)
        return sequence


@pytest.fixture
def make_world():
    worlds = []

    def make(**settings) -> World:
        worlds.append(World(**settings))
        return worlds[-1]

    yield make
    for world in worlds:
        world.loop.stop(WAIT_S)
        world.pool.check()
        assert world.pool.counts().held == 0
        swap = world.pool.swap
        assert swap is None or swap.num_free == swap.num_slots
        assert world.scheduler.num_running == world.scheduler.num_waiting == 0


def test_serves_many_from_many_threads(make_world):
    world = make_world(num_blocks=24)
    world.loop.start()
    sequences = {}

    def client(name: str) -> None:
        for i in range(5):
            request_id = f"{name}-{i}"
            sequences[request_id] = world.add(request_id, num_prompt_tokens=9, max_tokens=12)

    threads = [threading.Thread(target=client, args=(f"c{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for request_id, sequence in sequences.items():
        assert world.told.wait_for_end(sequence).finish_reason is FinishReason.LENGTH
        assert world.told.tokens[sequence.key] == expected_tokens(request_id, 12)
    assert world.told.threads == {"engine-step"}


def test_a_step_that_fails_after_it_told_of_layers_ends_its_sequences(make_world, monkeypatch):
    """What left of them is worth nothing then: their ends come after it, with the fault."""
    world = make_world()

    def run(plan, on_stored=None):
        on_stored(plan.shares, 3)
        raise MemoryError

    monkeypatch.setattr(world.runner, "run", run)
    sequence = world.add(num_prompt_tokens=9, hands_over_at=1, stored=StoredLayers())
    world.loop.start()
    assert world.told.wait_for_end(sequence).error.stage == IN_STEP
    told = [events.stored for events in world.told.batches if events.stored]
    assert told == [(sequence.key,)]
    assert world.told.batches[-1].ends
    assert not any(events.computed for events in world.told.batches)


def test_stored_layers_are_forgotten_when_computed_tokens_say_the_same(make_world, monkeypatch):
    """A later step of the sequence begins with none, whatever became of its blocks."""
    world = make_world()
    run, seen = world.runner.run, []

    def tell(plan, on_stored=None):
        (share,) = plan.shares
        seen.append((share.stored.so_far, share.start))
        on_stored(plan.shares, 3)
        return run(plan)

    monkeypatch.setattr(world.runner, "run", tell)
    sequence = world.add(num_prompt_tokens=9, hands_over_at=3, stored=StoredLayers())
    world.loop.start()
    world.told.wait_for_end(sequence)
    assert seen == [((0, 0), 0), ((0, 0), 9), ((0, 0), 10)]
    world.pool.release(sequence.key)


def test_what_was_added_before_the_start_is_served(make_world):
    world = make_world()
    sequence = world.add(max_tokens=2)
    world.loop.start()
    world.told.wait_for_end(sequence)


def test_the_start_is_told_before_its_step_is_computed(make_world):
    seen = []
    world = make_world(on_run=lambda plan: seen.append(list(world.told.started)))
    world.loop.start()
    sequence = world.add(max_tokens=2)
    world.told.wait_for_end(sequence)
    assert seen[0] == [sequence.key]
    first = world.told.batches[0]
    assert (first.started, first.tokens, first.ends) == ((sequence.key,), (), ())


def test_a_refusal_is_told_though_nothing_runs(make_world):
    world = make_world(num_blocks=4)
    world.loop.start()
    end = world.told.wait_for_end(world.add(num_prompt_tokens=40))
    assert isinstance(end.error, InvalidRequest)


def test_a_key_added_twice_is_served_once(make_world):
    gate = Gate()
    world = make_world(on_run=gate)
    world.loop.start()
    sequence = world.add(max_tokens=2)
    assert gate.entered.wait(WAIT_S)
    world.add(max_tokens=5)
    gate.opened.set()
    world.told.wait_for_end(sequence)
    assert world.told.tokens[sequence.key] == expected_tokens("r", 2)
    assert world.told.faults == []


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


class TestWaking:
    def test_by_blocks_that_became_free(self, make_world):
        """P-16: an engine that waits for exports goes on when they are gone."""
        world = make_world(num_blocks=4)
        world.pool.allocate(3, ("export", "h"))
        world.loop.start()
        sequence = world.add(num_prompt_tokens=8, max_tokens=2)
        small = world.add("small", num_prompt_tokens=2, max_tokens=2)
        world.told.wait_for_end(small)
        assert world.told.started == [small.key]
        world.pool.release(("export", "h"))
        world.told.wait_for_end(sequence)

    def test_by_a_deadline_on_the_real_clock(self):
        """P-12: cleaning up must not depend on new work or on progress."""
        from cluster.clock import SystemClock

        clock, pool, told = SystemClock(), BlockPool(4), Told()
        scheduler = StepScheduler(pool, BLOCK_SIZE, 8, 1000, 0, 1000)
        loop = EngineLoop(
            scheduler=scheduler,
            runner=FakeRunner(),
            clock=clock,
            on_events=told.take,
            on_fault=told.on_fault,
        )
        pool.allocate(4, ("export", "h"))
        loop.start()
        now = clock.now()
        sequence = make_sequence(num_prompt_tokens=8, arrived=now, deadline=now + 0.05)
        loop.add(sequence)
        error = told.wait_for_end(sequence).error
        assert isinstance(error, DeadlineExceeded)
        assert error.stage == "queue"
        assert clock.now() >= now + 0.05
        loop.stop(WAIT_S)
        assert pool.release(("export", "h")) == 4
        pool.check()

    def test_by_a_fake_clock_that_moves(self, make_world):
        world = make_world(num_blocks=4)
        world.pool.allocate(4, ("export", "h"))
        world.loop.start()
        sequence = world.add(num_prompt_tokens=8, deadline=world.clock.now() + 60)
        world.clock.advance(61)
        assert isinstance(world.told.wait_for_end(sequence).error, DeadlineExceeded)
        world.pool.release(("export", "h"))

    def test_an_idle_loop_makes_no_steps(self, make_world):
        world = make_world()
        world.loop.start()
        world.told.wait_for_end(world.add(max_tokens=3))
        world.loop.stop(WAIT_S)
        assert len(world.runner.plans) == 3


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


class TestSwap:
    """Two that grow out of a pool for one and a half, and a buffer beside it."""

    def grow(self, make_world, *, swap_slots=8):
        world = make_world(num_blocks=8, swap_slots=swap_slots)
        pair = [world.add(name, num_prompt_tokens=12, max_tokens=12) for name in ("a", "b")]
        return world, pair

    def test_is_a_step_of_its_own_that_computes_nothing(self, make_world):
        world, pair = self.grow(make_world)
        world.loop.start()
        for sequence in pair:
            assert world.told.wait_for_end(sequence).num_computed_tokens == 12 + 12 - 1
            expected = expected_tokens(sequence.key.request_id, 12)
            assert world.told.tokens[sequence.key] == expected
        world.loop.stop(WAIT_S)
        snapshot = world.loop.snapshot()
        assert (snapshot.num_preemptions, snapshot.num_swapped) == (1, 1)
        assert (snapshot.num_swaps_refused, snapshot.num_blocks_swapped) == (0, 8)
        assert snapshot.num_steps == len(world.runner.plans)
        assert all(plan.shares for plan in world.runner.plans)

    @pytest.mark.parametrize("way", ["copy_out", "copy_back"])
    def test_an_abort_during_the_copy(self, make_world, monkeypatch, way):
        world, (old, young) = self.grow(make_world)
        gate, copy = Gate(), getattr(world.runner, way)

        def slow(pairs):
            if pairs:
                gate(pairs)
            copy(pairs)

        monkeypatch.setattr(world.runner, way, slow)
        world.loop.start()
        assert gate.entered.wait(WAIT_S)
        world.loop.abort(young.key, Cancelled("left"))
        gate.opened.set()
        assert isinstance(world.told.wait_for_end(young).error, Cancelled)
        world.told.wait_for_end(old)
        assert world.told.tokens[old.key] == expected_tokens("a", 12)

    @pytest.mark.parametrize("way", ["copy_out", "copy_back"])
    def test_a_copy_that_fails_is_a_fault(self, make_world, monkeypatch, way):
        world, pair = self.grow(make_world)

        def broken(pairs):
            if pairs:
                raise OSError("no such memory")

        monkeypatch.setattr(world.runner, way, broken)
        world.loop.start()
        errors = [world.told.wait_for_end(sequence).error for sequence in pair]
        # Between two steps nobody knows whose fault it was.
        assert [error and error.stage for error in errors] == (
            [IN_STEP] * 2 if way == "copy_out" else [None, IN_STEP]
        )
        assert len(world.told.faults) == 1

    def test_a_full_buffer_is_logged_and_counted(self, make_world, caplog):
        world, pair = self.grow(make_world, swap_slots=1)
        world.loop.start()
        for sequence in pair:
            world.told.wait_for_end(sequence)
        world.loop.stop(WAIT_S)
        snapshot = world.loop.snapshot()
        assert (snapshot.num_swapped, snapshot.num_swaps_refused) == (0, 1)
        assert [r.getMessage()[:16] for r in caplog.records] == ["swaps_refused=1 "]
        assert world.told.ends[pair[1].key].num_computed_tokens > 12 + 12 - 1


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


class TestSnapshot:
    def test_counts_what_was_added_and_not_yet_taken_in(self, make_world):
        gate = Gate()
        world = make_world(on_run=gate, max_num_seqs=1)
        world.loop.start()
        world.add("a", num_prompt_tokens=10, max_tokens=1)
        assert gate.entered.wait(WAIT_S)
        world.add("b", num_prompt_tokens=30, max_tokens=1)
        snapshot = world.loop.snapshot()
        assert (snapshot.num_running, snapshot.num_waiting) == (1, 1)
        assert snapshot.queued_tokens == 40
        gate.opened.set()

    def test_tells_speed_and_counts(self, make_world):
        """P-29 (the engine's part): tokens are counted once."""
        world = make_world()
        world.loop.start()
        world.told.wait_for_end(world.add("a", num_prompt_tokens=10, max_tokens=5))
        world.loop.stop(WAIT_S)
        snapshot = world.loop.snapshot()
        assert (snapshot.generated_tokens, snapshot.prefilled_tokens) == (5, 10)
        assert snapshot.num_steps == 5
        assert snapshot.prefill_per_token_s == pytest.approx(0.001)
        predicted = snapshot.step_base_s + snapshot.step_per_seq_s
        assert predicted == pytest.approx(0.01)
        assert (snapshot.num_running, snapshot.num_waiting, snapshot.queued_tokens) == (0, 0, 0)


def test_needs_no_torch():
    modules = "cluster.engine.loop, cluster.engine.scheduler, cluster.kv.block_pool"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
