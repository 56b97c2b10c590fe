"""Whole workers in one process, fake model: faults, books that are wrong, starts that fail."""

import asyncio
import contextlib

import pytest

from cluster.config import DeployConfig, PoolConfig, Role
from cluster.control.status import get_cluster
from cluster.engine import loop as loop_module
from cluster.engine.plan import SequenceEnd, StepEvents
from cluster.errors import (
    IN_STEP,
    StartupError,
    WorkerLost,
)
from cluster.request import (
    LegKind,
)
from deploy import worker_watch
from router.metrics import RouterMetrics
from tests.deploy.world import (
    KEY,
    Sink,
    blocked_runner,
    make_leg,
)
from tests.factories import (
    make_key,
)


async def test_an_engine_fault_ends_every_leg_and_deregisters(world, caplog):
    """CASES P-26: the process is told to end; nothing more is accepted."""
    runner, entered, go = blocked_runner()
    worker = await world.start("m", "m-0", runner)
    sink = Sink()
    worker.legs.start_leg(make_leg(LegKind.LOCAL), sink)
    worker.legs.start_leg(make_leg(LegKind.DECODE, "waits"), sink)
    await asyncio.to_thread(entered.wait, 10)
    runner.draw = lambda share: 1 / 0
    go.set()
    error = await asyncio.wait_for(asyncio.shield(worker.fault), 10)
    assert isinstance(error, ZeroDivisionError)
    # Another worker can have all of them; only the first may be what this one died of.
    first = (await sink.end_of(KEY)).error
    assert isinstance(first, WorkerLost)
    assert first.stage == IN_STEP
    assert isinstance((await sink.end_of(make_key("waits"))).error, WorkerLost)
    worker.legs.start_leg(make_leg(LegKind.LOCAL, "late"), sink)
    assert isinstance(sink.ends[make_key("late")].error, WorkerLost)
    await world.reports(lambda reports: not reports)
    assert "m-0 fault" in caplog.text


async def fault_of(worker):
    return await asyncio.wait_for(asyncio.shield(worker.fault), 10)


async def test_a_step_that_is_stuck_is_a_fault(world, monkeypatch):
    """Its process must be replaced: nothing else ends the legs that wait for the step."""
    monkeypatch.setattr(loop_module, "_STALL_FLOOR_S", 0.2)
    runner, entered, go = blocked_runner()
    worker = await world.start("m", "m-0", runner)
    worker.legs.start_leg(make_leg(LegKind.LOCAL), Sink())
    assert await asyncio.to_thread(entered.wait, 10)
    assert "stuck" in str(await fault_of(worker))
    await world.reports(lambda reports: not reports)
    go.set()


async def test_a_bug_in_a_callback_of_the_engine_is_a_fault(world, monkeypatch, caplog):
    worker = await world.start("m", "m-0")
    monkeypatch.setattr(worker.legs.decode, "on_step", lambda events: 1 / 0)
    worker.legs.start_leg(make_leg(LegKind.LOCAL), Sink())
    assert isinstance(await fault_of(worker), ZeroDivisionError)
    assert "m-0 fault" in caplog.text
    monkeypatch.undo()
    worker.legs.decode.on_step(StepEvents(ends=(SequenceEnd(key=KEY, error=WorkerLost("x")),)))


async def test_a_bug_in_a_tick_is_a_fault(world, monkeypatch):
    worker = await world.start("m", "m-0")
    sink = Sink()
    worker.legs.start_leg(make_leg(LegKind.DECODE), sink)
    monkeypatch.setattr(worker.legs.prefill, "expire", lambda now: 1 / 0)
    assert isinstance(await fault_of(worker), ZeroDivisionError)
    assert isinstance((await sink.end_of(KEY)).error, WorkerLost)


async def test_a_half_that_cannot_be_closed_does_not_keep_the_other_one_open(world, monkeypatch):
    worker = await world.start("m", "m-0")
    sink = Sink()
    worker.legs.start_leg(make_leg(LegKind.DECODE), sink)
    monkeypatch.setattr(worker.legs.prefill, "close", lambda cause, error: 1 / 0)
    worker._fail(ValueError("bug"))
    assert isinstance(sink.ends[KEY].error, WorkerLost)
    await world.reports(lambda reports: not reports)


async def test_the_pool_is_checked_when_the_worker_is_idle_again(world, monkeypatch):
    monkeypatch.setattr(worker_watch, "_IDLE_S", 0.0)
    worker = await world.start("m", "m-0")
    await world.reports(lambda reports: reports["m-0"].counters["kv_checks"] == 0)
    sink = Sink()
    for number, request_id in enumerate(("a", "b"), start=1):
        worker.legs.start_leg(make_leg(LegKind.LOCAL, request_id), sink)
        await sink.end_of(make_key(request_id))
        await world.reports(lambda r, n=number: r["m-0"].counters["kv_checks"] == n)
    lost = worker._pool._free.pop()
    worker.legs.start_leg(make_leg(LegKind.LOCAL, "c"), sink)
    assert str(lost) in str(await fault_of(worker))
    counters = worker._reporter.report().counters
    assert (counters["kv_checks"], counters["kv_check_failures"]) == (3, 1)
    worker._pool._free.append(lost)
    # The worker goes with its own counters; what routers show has the failure all the same.
    await world.reports(lambda reports: "m-0" not in reports)
    view = await get_cluster(world.address, timeout_s=5.0)
    metrics = RouterMetrics("r")
    metrics.watch(lambda: view)
    assert b"\npdserve_control_kv_check_failures_total 1.0\n" in metrics.text()


async def test_blocks_that_are_kept_for_nobody_are_found(world, monkeypatch):
    """The books of a leak are in order: someone holds the blocks, and will do so for ever."""
    monkeypatch.setattr(worker_watch, "_IDLE_S", 0.0)
    monkeypatch.setattr(worker_watch, "_LEAK_S", 0.0)
    runner, entered, go = blocked_runner()
    worker = await world.start("m", "m-0", runner)
    sink = Sink()
    worker.legs.start_leg(make_leg(LegKind.LOCAL), sink)
    assert await asyncio.to_thread(entered.wait, 10)
    await world.reports(lambda reports: reports["m-0"].blocks.held)
    worker._watch.tick(worker._clock.now())
    go.set()
    await sink.end_of(KEY)
    await world.reports(lambda reports: reports["m-0"].counters["kv_checks"] == 1)
    assert not worker.fault.done(), "blocks of open legs are no leak"
    worker._pool.allocate(2, "nobody")
    assert "held=2" in str(await fault_of(worker))
    assert worker._reporter.report().counters["kv_check_failures"] == 1
    worker._pool.release("nobody")


async def test_a_worker_that_is_turned_away_later_does_not_blame_its_engine(world):
    worker = await world.start("m", "m-0")
    sink = Sink()
    worker.legs.start_leg(make_leg(LegKind.DECODE), sink)
    worker._report._was_refused("replaced by another incarnation")
    assert isinstance(await fault_of(worker), StartupError)
    assert isinstance(sink.ends[KEY].error, WorkerLost)
    worker.legs.start_leg(make_leg(LegKind.LOCAL, "late"), sink)
    assert isinstance(sink.ends[make_key("late")].error, WorkerLost)


async def test_a_start_without_a_control_plane_ends(world):
    world.address = "127.0.0.1:1"
    worker = world.make("m", "m-0")
    with pytest.raises(StartupError, match=r"not accepted within 0\.2 s.*127\.0\.0\.1:1"):
        await asyncio.wait_for(worker.start(timeout_s=0.2), 10)


async def test_a_fault_before_it_is_accepted_is_a_startup_error(world, monkeypatch):
    world.address = "127.0.0.1:1"
    worker = world.make("m", "m-0")
    start = worker._report.start

    async def fail_then() -> None:
        await start()
        worker._errands.soon(lambda: worker._fail(OSError("no such core")))

    monkeypatch.setattr(worker._report, "start", fail_then)
    with pytest.raises(StartupError, match="no such core"):
        await asyncio.wait_for(worker.start(), 10)


async def test_a_refused_registration_is_a_startup_error(world):
    config = world.config
    world.config = DeployConfig(pools=(PoolConfig(name="unknown", role=Role.MIXED),))
    worker = world.make("unknown", "x-0")
    world.config = config
    world.workers.remove(worker)
    with pytest.raises(StartupError):
        await asyncio.wait_for(worker.start(), 10)
    with contextlib.suppress(StartupError):
        await worker.stop(0.0)
