"""Whole workers in one process: real servers, links, step threads and control plane, fake model."""

import asyncio

import pytest

from cluster.errors import (
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    QueueFull,
    WorkerLost,
)
from cluster.handoff import AbortCause
from cluster.request import (
    MAX_PREEMPTIONS,
    FinishReason,
    LegKind,
    Peer,
    PromptPrefix,
    Redirect,
)
from deploy import worker_legs, worker_life
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


async def test_blocks_that_come_back_after_their_legs_end_are_reported_at_once(world, monkeypatch):
    """CASES P-11: a link reads on when the leg is over; no beat is waited for."""
    worker = await world.start("p", "p-0")
    has_news = asyncio.Event()
    monkeypatch.setattr(worker._report, "changed", has_news.set)
    worker._pool.allocate(3, "a link")
    await asyncio.to_thread(worker._pool.release, "a link")
    await asyncio.wait_for(has_news.wait(), 5)
