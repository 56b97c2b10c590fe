"""The step thread: woken by events, from many threads, and what it tells."""

import subprocess
import sys
import threading

import pytest

from cluster.engine.loop import EngineLoop
from cluster.engine.scheduler import StepScheduler
from cluster.engine.sequence import StoredLayers
from cluster.errors import IN_STEP, Cancelled, DeadlineExceeded, InvalidRequest
from cluster.kv.block_pool import BlockPool
from cluster.request import FinishReason
from tests.cluster.engine.loop_world import WAIT_S, Gate, Told
from tests.factories import (
    BLOCK_SIZE,
    FakeRunner,
    expected_tokens,
    make_sequence,
)


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
