"""Whole workers in one process: real servers, links, step threads and control plane, fake model."""

import asyncio
import contextlib
import dataclasses

import pytest

from cluster.config import DeployConfig, Policy, PoolConfig, Role
from cluster.control.status import get_cluster
from cluster.engine import loop as loop_module
from cluster.engine.plan import SequenceEnd, StepEvents
from cluster.engine.snapshot import EngineSnapshot
from cluster.engine.victims import Holdings
from cluster.errors import (
    IN_STEP,
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    QueueFull,
    StartupError,
    WorkerLost,
)
from cluster.handoff import AbortCause
from cluster.kv.outside import Outsider
from cluster.request import (
    MAX_PREEMPTIONS,
    FinishReason,
    LegKind,
    Peer,
    PromptPrefix,
    Redirect,
)
from deploy import worker_legs, worker_life, worker_watch
from router.metrics import RouterMetrics
from tests.deploy.world import (
    KEY,
    LAYOUT,
    NUM_BLOCKS,
    Sink,
    blocked_runner,
    make_leg,
)
from tests.factories import (
    BLOCK_SIZE,
    expected_tokens,
    make_key,
    make_prompt,
)


async def test_a_request_goes_through_two_workers(world):
    prefill, decode = await world.start("p", "p-0"), await world.start("d", "d-0")
    p_sink, d_sink = Sink(), Sink()
    prefill.legs.start_leg(make_leg(LegKind.PREFILL, peer=decode.me), p_sink)
    decode.legs.start_leg(make_leg(LegKind.DECODE), d_sink)
    p_end, d_end = await p_sink.end_of(KEY), await d_sink.end_of(KEY)
    assert (p_end.error, p_end.finish_reason) == (None, None)
    assert d_end.finish_reason is FinishReason.LENGTH
    assert p_sink.output() == expected_tokens("r", 1)
    assert d_sink.output() == expected_tokens("r", 6)
    assert p_end.times.transfer_bytes == 5 * LAYOUT.block_bytes


async def test_a_refused_export_is_redirected_and_its_leg_stays_its_grants(world):
    """CASES P-20: over real links and threads; nothing is computed twice."""
    prefill = await world.start("p", "p-0")
    full, other = await world.start("d", "d-0"), await world.start("d", "d-1")
    full._pool.allocate(full._pool.num_free, "someone")
    p_sink, full_sink, d_sink = Sink(), Sink(), Sink()
    prefill.legs.start_leg(make_leg(LegKind.PREFILL, peer=full.me), p_sink)
    full.legs.start_leg(make_leg(LegKind.DECODE), full_sink)
    await p_sink.until(lambda sink: sink.waiting)
    assert isinstance((await full_sink.end_of(KEY)).error, HandoffFailed)
    full._pool.release("someone")
    ids = {"handoff_id": "handoff-2", "grant_id": "grant-2"}
    other.legs.start_leg(make_leg(LegKind.DECODE, **ids), d_sink)
    prefill.legs.redirect_leg(Redirect(key=KEY, peer=other.me, handoff_id="handoff-2"))
    assert (await p_sink.end_of(KEY)).error is None
    assert (await d_sink.end_of(KEY)).finish_reason is FinishReason.LENGTH
    assert d_sink.output() == expected_tokens("r", 6)
    assert p_sink.ends[KEY].times.num_computed_tokens == 19
    await world.reports(lambda reports: not reports["p-0"].held_grants)


async def test_a_redirect_that_cannot_be_followed_ends_its_leg(world):
    prefill = await world.start("p", "p-0")
    nobody = Peer(worker_id="gone", incarnation="gone-1", address="127.0.0.1:1")
    bad = (
        {"handoff_id": "", "peer": nobody},
        {"handoff_id": "h", "peer": prefill.me},
        {"handoff_id": "h" * 200, "peer": nobody},
        {"handoff_id": "h", "peer": nobody, "num_preemptions": MAX_PREEMPTIONS + 1},
    )
    for number, fields in enumerate(bad):
        sink, key = Sink(), make_key(f"r{number}")
        prefill.legs.start_leg(make_leg(LegKind.PREFILL, key.request_id, nobody), sink)
        await sink.until(lambda sink: sink.waiting)
        prefill.legs.redirect_leg(Redirect(key=key, **fields))
        assert isinstance((await sink.end_of(key)).error, HandoffFailed)
    prefill.legs.redirect_leg(Redirect(key=KEY, handoff_id="h", peer=nobody))


async def test_a_decode_leg_goes_on_by_another_handoff_until_it_has_its_kv(world):
    """Its export was redirected to where it had been meant to go; another router cannot do so."""
    prefill, decode = await world.start("p", "p-0"), await world.start("d", "d-0")
    nobody = Peer(worker_id="d-0", incarnation="gone-1", address="127.0.0.1:1")
    p_sink, d_sink, stranger = Sink(), Sink(), Sink()
    prefill.legs.start_leg(make_leg(LegKind.PREFILL, peer=nobody), p_sink)
    decode.legs.start_leg(make_leg(LegKind.DECODE), d_sink)
    await p_sink.until(lambda sink: sink.waiting)
    ids = {"handoff_id": "handoff-2", "grant_id": "grant-2"}
    decode.legs.start_leg(make_leg(LegKind.DECODE, **ids), stranger)
    assert isinstance(stranger.ends[KEY].error, InvalidRequest)
    decode.legs.start_leg(make_leg(LegKind.DECODE, **ids), d_sink)
    prefill.legs.redirect_leg(Redirect(key=KEY, peer=decode.me, handoff_id="handoff-2"))
    assert (await d_sink.end_of(KEY)).finish_reason is FinishReason.LENGTH
    assert d_sink.output() == expected_tokens("r", 6)
    assert (await p_sink.end_of(KEY)).error is None
    assert decode.legs.decode.book.counts["received"] == 1


async def test_legs_that_have_aged_are_reported_as_firm_before_the_engine_has_them(world):
    """P-16: the control plane grants nobody what they wait for."""
    scheduling = dataclasses.replace(world.config.scheduling, policy=Policy.PRIORITY)
    world.config = dataclasses.replace(world.config, scheduling=scheduling)
    decode = await world.start("d", "d-0")
    for name, waited_s in (("young", 0.0), ("aged", scheduling.aging_s)):
        decode.legs.start_leg(make_leg(LegKind.DECODE, name, waited_s=waited_s), Sink())
    report = decode._reporter.report()
    assert report.held_grants == report.unreserved_grants == ("grant-aged", "grant-young")
    assert report.firm_grants == ("grant-aged",)


async def test_an_import_that_gave_way_too_often_is_firm_once_it_has_its_blocks(world):
    """P-15: the control plane grants nobody what it keeps."""
    scheduling = dataclasses.replace(world.config.scheduling, policy=Policy.PRIORITY)
    world.config = dataclasses.replace(world.config, scheduling=scheduling)
    decode = await world.start("d", "d-0")
    for name, num_before in (("young", 0), ("spared", scheduling.max_preemptions)):
        leg = make_leg(LegKind.DECODE, name, num_preemptions=num_before)
        decode.legs.start_leg(leg, Sink())
    assert decode._reporter.report().firm_grants == ()
    for name in ("young", "spared"):
        decode._pool.reserve(5, f"handoff-{name}", make_key(name))
    assert decode._reporter.report().firm_grants == ("grant-spared",)
    for name in ("young", "spared"):
        decode._pool.cancel(f"handoff-{name}")


@pytest.mark.parametrize("resume", [True, False])
async def test_imports_give_way_only_where_streams_that_have_begun_go_on(world, resume):
    scheduling = dataclasses.replace(world.config.scheduling, policy=Policy.PRIORITY)
    router = dataclasses.replace(world.config.router, resume=resume)
    world.config = dataclasses.replace(world.config, scheduling=scheduling, router=router)
    decode = await world.start("d", "d-0")
    assert decode.legs.decode.inbox.gives == resume


async def test_what_lower_tiers_would_give_up_is_reported_but_not_of_those_that_have_aged(
    world, monkeypatch
):
    """What low ones share among themselves is free when both give way, what others have is not."""
    scheduling = dataclasses.replace(world.config.scheduling, policy=Policy.PRIORITY)
    world.config = dataclasses.replace(world.config, scheduling=scheduling)
    decode = await world.start("d", "d-0")
    pool, keys = decode._pool, [make_key(name) for name in ("l1", "l2", "n", "aged")]
    l1, l2, normal, aged = keys
    mine, lows, everybodys, exported = pool.allocate(4, l1)
    pool.share(l1, [lows, everybodys], l2)
    pool.share(l1, [everybodys], normal)
    pool.share(l1, [exported], ("export", "h"))
    pool.allocate(2, normal)
    pool.allocate(5, aged)
    waited_s = scheduling.aging_s
    decode.legs.start_leg(make_leg(LegKind.DECODE, "aged", waited_s=waited_s), Sink())
    # The engine's last word of it is from when it was young.
    holdings = Holdings(giving=((1, normal), (0, l1), (0, aged), (0, l2)))
    snapshot = EngineSnapshot(holdings=holdings)
    monkeypatch.setattr(decode._engine, "snapshot", lambda: snapshot)
    report = decode._reporter.report()
    assert report.takable_blocks == (2, 3), f"{mine} and {lows}; {everybodys} and two more"
    assert report.firm_grants == ("grant-aged",)
    for holder in (*keys, ("export", "h")):
        pool.release(holder)


async def test_what_exports_and_imports_would_give_up_is_reported_too(world):
    """P-15: the control plane grants higher tiers what lower ones hold outside an engine."""
    scheduling = dataclasses.replace(world.config.scheduling, policy=Policy.PRIORITY)
    world.config = dataclasses.replace(world.config, scheduling=scheduling)
    worker, decode = await world.start("m", "m-0"), await world.start("d", "d-0")
    # STEP 1: Exports that wait for their decode legs.
    sinks = {name: Sink() for name in ("low", "normal")}
    for name, sink in sinks.items():
        leg = make_leg(LegKind.PREFILL, name, decode.me, priority=name)
        worker.legs.start_leg(leg, sink)
        await sink.until(lambda sink: sink.tokens)
    await world.reports(lambda reports: reports["m-0"].takable_blocks == (5, 5))
    # STEP 2: A reservation beside them, and one that has given way often enough.
    now, pool = worker._clock.now(), worker._pool
    for name, num_before in (("young", 0), ("spared", scheduling.max_preemptions)):
        pool.reserve(3, name, make_key(name))
        pool.outside.enter(
            Outsider(
                holder=("import", name), tier=0, arrived=now, num_preemptions=num_before,
                num_importing=3,
            )
        )  # fmt: skip
    assert worker._reporter.report().takable_blocks == (8, 5)
    for name in ("young", "spared"):
        pool.outside.leave(("import", name))
        pool.cancel(name)
    # STEP 3: One is fetched.
    decode.legs.start_leg(make_leg(LegKind.DECODE, "low", priority="low"), Sink())
    await sinks["low"].end_of(make_key("low"))
    assert worker._reporter.report().takable_blocks == (0, 5)


async def test_a_leg_whose_new_handoff_is_refused_ends_once(world, monkeypatch):
    """It is one open leg, with either handoff; a full worker has room for it."""
    decode = await world.start("d", "d-0")
    sink = Sink()
    decode.legs.start_leg(make_leg(LegKind.DECODE), sink)
    monkeypatch.setattr(worker_legs, "MAX_OPEN_LEGS", 1)
    decode.legs.start_leg(make_leg(LegKind.DECODE, handoff_id="handoff-2"), sink)
    assert sink.ends == {}
    decode.legs.start_leg(make_leg(LegKind.DECODE, handoff_id="late", remaining_s=0.0), sink)
    assert isinstance(sink.ends[KEY].error, DeadlineExceeded)
    assert len(decode.legs) == decode.legs.num_rejected == 0
    assert len(decode.legs.decode.inbox) == 0


async def test_a_mixed_worker_serves_both_sides_of_other_handoffs(world):
    """CASES P-29: legs, transfers and tokens add up over workers, each counted once."""
    one, two = await world.start("m", "m-0"), await world.start("m", "m-1")
    sinks = {}
    for request_id, (sender, receiver) in {"a": (one, two), "b": (two, one)}.items():
        sinks[request_id] = Sink()
        sender.legs.start_leg(make_leg(LegKind.PREFILL, request_id, receiver.me), Sink())
        receiver.legs.start_leg(make_leg(LegKind.DECODE, request_id), sinks[request_id])
    sinks["c"] = Sink()
    one.legs.start_leg(make_leg(LegKind.LOCAL, "c"), sinks["c"])
    for request_id, sink in sinks.items():
        await sink.end_of(make_key(request_id))
        assert sink.output() == expected_tokens(request_id, 6)
    reports = await world.reports(
        lambda reports: all(not r.held_grants and r.num_steps for r in reports.values())
    )
    counters = [report.counters for report in reports.values()]
    for each in counters:
        ended = sum(v for k, v in each.items() if k.startswith("legs_"))
        assert ended == 2 * each["legs_received"]
    assert sum(c["legs_received"] for c in counters) == 5
    assert sum(c["transfers_ok"] for c in counters) == 2
    assert sum(c["transfer_bytes"] for c in counters) == 2 * 5 * LAYOUT.block_bytes
    assert sum(c["prefilled_tokens"] for c in counters) == 3 * 19
    assert sum(c["generated_tokens"] for c in counters) == 3 * 6


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


async def test_a_prompt_that_comes_again_is_found_by_its_own_tenant_only(world):
    """CASES P-17, P-18: over a whole worker, told by the leg's times and in the report."""
    worker = await world.start("m", "m-0")
    found = []
    for request_id, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")):
        sink = Sink()
        leg = make_leg(LegKind.LOCAL, request_id, prompt_ids=make_prompt(19), tenant=tenant)
        worker.legs.start_leg(leg, sink)
        times = (await sink.end_of(leg.key)).times
        assert sink.output() == expected_tokens(request_id, 6)
        assert times.num_cached_tokens + times.num_computed_tokens == 19 + 5
        found.append(times.num_cached_tokens)
    assert found == [0, 16, 0, 16]
    report = worker._reporter.report()
    assert report.counters["cached_tokens"] == 32
    assert report.counters["prefilled_tokens"] == 4 * 19 - 32
    assert report.blocks.available == report.blocks.free + report.blocks.cached == NUM_BLOCKS
    assert report.blocks.cached > 0


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


async def test_stopping_ends_open_legs_with_worker_lost(world):
    """CASES P-27: at once when there is no grace; a second stop does nothing."""
    runner, entered, go = blocked_runner()
    worker = await world.start("m", "m-0", runner)
    sink = Sink()
    worker.legs.start_leg(make_leg(LegKind.LOCAL), sink)
    worker.legs.start_leg(make_leg(LegKind.DECODE, "waits"), sink)
    await asyncio.to_thread(entered.wait, 10)
    stopping = asyncio.ensure_future(worker.stop(0.0))
    await sink.end_of(make_key("waits"))
    go.set()
    await stopping
    await worker.stop(0.0)
    for request_id in ("r", "waits"):
        assert isinstance(sink.ends[make_key(request_id)].error, WorkerLost)
    worker.legs.start_leg(make_leg(LegKind.LOCAL, "late"), sink)
    assert isinstance(sink.ends[make_key("late")].error, WorkerLost)


async def test_stopping_with_grace_lets_legs_end(world):
    """Nothing more is placed on it; what runs there ends as it would have."""
    runner, entered, go = blocked_runner()
    worker = await world.start("m", "m-0", runner)
    sink = Sink()
    worker.legs.start_leg(make_leg(LegKind.LOCAL), sink)
    await asyncio.to_thread(entered.wait, 10)
    stopping = asyncio.ensure_future(worker.stop(10.0))
    await world.reports(lambda reports: not reports)
    go.set()
    await stopping
    assert sink.ends[KEY].finish_reason is FinishReason.LENGTH


async def test_a_leg_that_is_open_is_not_opened_twice(world):
    runner, _, go = blocked_runner()
    worker = await world.start("m", "m-0", runner)
    sink, stranger = Sink(), Sink()
    worker.legs.start_leg(make_leg(LegKind.LOCAL), sink)
    worker.legs.start_leg(make_leg(LegKind.LOCAL), sink)
    worker.legs.start_leg(make_leg(LegKind.DECODE), stranger)
    assert isinstance(stranger.ends[KEY].error, InvalidRequest)
    go.set()
    assert (await sink.end_of(KEY)).finish_reason is FinishReason.LENGTH
    assert sink.output() == expected_tokens("r", 6)


async def test_what_cannot_be_served_is_refused_by_name(world, monkeypatch):
    worker = await world.start("p", "p-0")
    sink = Sink()
    worker.legs.start_leg(make_leg(LegKind.LOCAL, "kind"), sink)
    worker.legs.start_leg(make_leg(LegKind.PREFILL, "empty", worker.me, prompt_ids=()), sink)
    worker.legs.start_leg(make_leg(LegKind.PREFILL, "self", worker.me), sink)
    fields = [sink.ends[make_key(r)].error.field for r in ("kind", "empty", "self")]
    assert fields == ["kind", "prompt_ids", "peer"]
    monkeypatch.setattr(worker_legs, "MAX_OPEN_LEGS", 0)
    worker.legs.start_leg(make_leg(LegKind.PREFILL, "full", worker.me), sink)
    assert isinstance(sink.ends[make_key("full")].error, QueueFull)
    assert len(worker.legs) == 0


async def test_a_grant_that_is_taken_back_ends_its_legs(world):
    runner, _, go = blocked_runner()
    worker = await world.start("d", "d-0", runner)
    sink = Sink()
    worker.legs.start_leg(make_leg(LegKind.DECODE, "mine"), sink)
    worker.legs.start_leg(make_leg(LegKind.DECODE, "other"), sink)
    await world.reports(lambda reports: len(reports["d-0"].unreserved_grants) == 2)
    worker.legs.start_leg(make_leg(LegKind.LOCAL, "running"), sink)
    await world.reports(lambda reports: "grant-running" in reports["d-0"].held_grants)
    await world.reports(lambda reports: "grant-running" not in reports["d-0"].unreserved_grants)
    go.set()
    worker.legs.abort_leg(make_key("running"), AbortCause.CANCELLED, "grant-running", sink)
    await sink.end_of(make_key("running"))
    sink.ends.clear()
    worker.legs.abort_grant("grant-mine")
    assert set(sink.ends) == {make_key("mine")}
    worker.legs.abort_leg(make_key("other"), AbortCause.CANCELLED, "grant-other", sink)
    await world.reports(lambda reports: not reports["d-0"].held_grants)


@pytest.mark.parametrize("gone", ["client", "router", "grant"])
async def test_a_drain_ends_with_the_request_whose_kv_nobody_fetches(gone, world, monkeypatch):
    """CASES P-27: not with the lease of its export, whoever says that the request is gone."""
    monkeypatch.setattr(worker_life, "LAST_GRANTS_S", 0.01)
    worker, sink = await world.start("p", "p-0"), Sink()
    nobody = Peer(worker_id="d-0", incarnation="gone", address=worker.me.address)
    worker.legs.start_leg(make_leg(LegKind.PREFILL, "r", nobody), sink)
    await sink.until(lambda sink: sink.waiting)
    drained = asyncio.create_task(worker.drain(60.0))
    await world.reports(lambda reports: reports["p-0"].is_draining)
    assert not drained.done(), "its KV may still be fetched, and its router is told nothing"
    assert sink.ends == {}
    if gone == "client":
        worker.legs.abort_leg(KEY, AbortCause.CANCELLED, "grant-r", sink)
    elif gone == "router":
        worker.legs.router_lost(sink)
    else:
        worker.legs.abort_grant("grant-r")
    await asyncio.wait_for(drained, 5)
    assert worker._pool.num_free == NUM_BLOCKS


async def test_the_control_plane_stops_counting_what_a_cache_has_lost_or_never_got(world):
    """P-17, P-18: over the real report stream; by its own names, of which nothing can be told."""
    worker = await world.start("m", "m-0")
    prefixes = world.control._desk._planner._ledger.prefixes
    named = PromptPrefix(stride_tokens=2 * BLOCK_SIZE, names=(1, 2))
    never = PromptPrefix(stride_tokens=2 * BLOCK_SIZE, names=(1, 2, 8, 9))
    sink = Sink()

    async def counted(num_tokens):
        await world.reports(lambda _: prefixes.holders(never).get("m-0", 0) == num_tokens)

    async def serve(request_id, num_tokens, **fields):
        prompt_ids = make_prompt(num_tokens, fields.pop("prompt", request_id))
        leg = make_leg(LegKind.LOCAL, request_id, prompt_ids=prompt_ids, **fields)
        worker.legs.start_leg(leg, sink)
        return await sink.end_of(leg.key)

    prefixes.learn("m-0", NUM_BLOCKS * BLOCK_SIZE, named)
    await serve("a", 19, prefix=named)
    prefixes.learn("m-0", NUM_BLOCKS * BLOCK_SIZE, never)
    late = await serve("b", 36, prompt="a", prefix=never, remaining_s=1e-9)
    assert late.error is not None
    await counted(2 * 2 * BLOCK_SIZE)
    await serve("c", 4 * NUM_BLOCKS - 12)
    await counted(0)


async def test_a_deadline_passes_without_any_step(world):
    """CASES P-12: clean-up does not depend on progress elsewhere."""
    worker = await world.start("d", "d-0")
    sink = Sink()
    worker.legs.start_leg(make_leg(LegKind.DECODE, remaining_s=0.05), sink)
    assert (await sink.end_of(KEY)).error.code == "deadline_exceeded"


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


async def test_blocks_that_come_back_after_their_legs_end_are_reported_at_once(world, monkeypatch):
    """CASES P-11: a link reads on when the leg is over; no beat is waited for."""
    worker = await world.start("p", "p-0")
    has_news = asyncio.Event()
    monkeypatch.setattr(worker._report, "changed", has_news.set)
    worker._pool.allocate(3, "a link")
    await asyncio.to_thread(worker._pool.release, "a link")
    await asyncio.wait_for(has_news.wait(), 5)
