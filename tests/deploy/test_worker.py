"""Whole workers in one process: real servers, links, step threads and control plane, fake model."""

import asyncio
import contextlib
import threading

import pytest
import torch

from cluster.clock import SystemClock
from cluster.config import DeployConfig, ModelConfig, PoolConfig, Role, TransportKind
from cluster.control.server import ControlServer
from cluster.control.status import get_cluster
from cluster.errors import EngineFault, InvalidRequest, QueueFull, StartupError, WorkerLost
from cluster.handoff import AbortCause
from cluster.kv.layout import KVLayout
from cluster.request import FinishReason, Leg, LegKind
from cluster.transport.loopback import LoopbackTransport
from deploy import worker as worker_module
from deploy.worker import Worker
from deploy.worker_parts import StepSpeed, WorkerParts
from tests.factories import (
    BLOCK_SIZE,
    EOS_ID,
    FakeRunner,
    expected_tokens,
    make_key,
    make_params,
    make_prompt,
)

LAYOUT = KVLayout(
    num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="fp32",
    model_fingerprint="fake",
)  # fmt: skip
NUM_BLOCKS = 32
KEY = make_key()


class ByteCache:
    """Blocks of bytes; the runner is told which of them it no longer knows."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.blocks = torch.zeros(NUM_BLOCKS, LAYOUT.block_bytes, dtype=torch.uint8)

    def export_blocks(self, block_ids, out_B) -> None:
        out_B.copy_(self.blocks[list(block_ids)].reshape(-1))

    def import_blocks(self, block_ids, staged_B) -> None:
        self.blocks[list(block_ids)] = staged_B.view(len(block_ids), -1)
        for block in block_ids:
            for i in range(BLOCK_SIZE):
                self.runner._slots.pop((block, i), None)


class Sink:
    def __init__(self) -> None:
        self.tokens = []
        self.ends = {}
        self.changed = asyncio.Event()

    def emit(self, tokens, ends) -> None:
        self.tokens.extend(tokens)
        for end in ends:
            assert end.key not in self.ends
            self.ends[end.key] = end
        self.changed.set()

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition(self):
                self.changed.clear()
                await self.changed.wait()

    async def end_of(self, key):
        await self.until(lambda sink: key in sink.ends)
        return self.ends[key]

    def output(self, key=KEY):
        return [t.token_id for t in sorted(self.tokens, key=lambda t: t.output_index)]


class World:
    def __init__(self, config, control, address) -> None:
        self.config = config
        self.control = control
        self.address = address
        self.transport = LoopbackTransport()
        self.workers = []

    def make(self, pool: str, worker_id: str, runner=None) -> Worker:
        runner = runner or FakeRunner(kv_of_others=True)
        parts = WorkerParts(
            layout=LAYOUT,
            max_model_len=256,
            vocab_size=30_001,
            eos_ids=frozenset({EOS_ID}),
            cache=ByteCache(runner),
            runner=runner,
            speed=StepSpeed(base_s=0.01, per_seq_s=0.001, prefill_per_token_s=0.0001),
            transport=self.transport,
            pin=lambda: None,
        )
        worker = Worker(
            self.config, self.config.pool(pool), parts, worker_id=worker_id,
            control_address=self.address,
        )  # fmt: skip
        self.workers.append(worker)
        return worker

    async def start(self, pool: str, worker_id: str, runner=None) -> Worker:
        worker = self.make(pool, worker_id, runner)
        await worker.start()
        return worker

    async def reports(self, until):
        async with asyncio.timeout(10):
            while True:
                view = await get_cluster(self.address, timeout_s=5.0)
                reports = {view.worker.worker_id: view.report for view in view.workers}
                if until(reports):
                    return reports
                await asyncio.sleep(0.02)


@pytest.fixture
async def world():
    def pool(name, role):
        return PoolConfig(
            name=name, role=role, block_size=BLOCK_SIZE, kv_tokens=NUM_BLOCKS * BLOCK_SIZE,
            token_budget=64,
        )  # fmt: skip

    config = DeployConfig(
        pools=(pool("p", Role.PREFILL), pool("d", Role.DECODE), pool("m", Role.MIXED)),
        model=ModelConfig(max_model_len=256),
        transport=TransportKind.LOOPBACK,
    )
    control = ControlServer(config, SystemClock())
    world = World(config, control, await control.start("127.0.0.1", 0))
    yield world
    for worker in world.workers:
        await worker.stop(0.0)
        worker._pool.check()
        assert worker._pool.num_free == NUM_BLOCKS
        assert worker.num_open_legs == 0
    await control.stop()


def make_leg(kind: LegKind, request_id: str = "r", peer=None, **fields) -> Leg:
    defaults = {
        "key": make_key(request_id),
        "kind": kind,
        "prompt_ids": make_prompt(19, request_id),
        "params": make_params(6),
        "remaining_s": 60.0,
        "grant_id": f"grant-{request_id}",
        "handoff_id": "" if kind is LegKind.LOCAL else f"handoff-{request_id}",
        "peer": peer,
    }
    return Leg(**{**defaults, **fields})


def blocked_runner():
    """A runner whose steps wait until the test lets them go."""
    entered, go = threading.Event(), threading.Event()

    def on_run(_plan):
        entered.set()
        assert go.wait(10)

    return FakeRunner(kv_of_others=True, on_run=on_run), entered, go


async def test_a_request_goes_through_two_workers(world):
    prefill, decode = await world.start("p", "p-0"), await world.start("d", "d-0")
    p_sink, d_sink = Sink(), Sink()
    prefill.start_leg(make_leg(LegKind.PREFILL, peer=decode.me), p_sink)
    decode.start_leg(make_leg(LegKind.DECODE), d_sink)
    p_end, d_end = await p_sink.end_of(KEY), await d_sink.end_of(KEY)
    assert (p_end.error, p_end.finish_reason) == (None, None)
    assert d_end.finish_reason is FinishReason.LENGTH
    assert p_sink.output() == expected_tokens("r", 1)
    assert d_sink.output() == expected_tokens("r", 6)
    assert p_end.times.transfer_bytes == 5 * LAYOUT.block_bytes


async def test_a_mixed_worker_serves_both_sides_of_other_handoffs(world):
    """CASES P-29: legs, transfers and tokens add up over workers, each counted once."""
    one, two = await world.start("m", "m-0"), await world.start("m", "m-1")
    sinks = {}
    for request_id, (sender, receiver) in {"a": (one, two), "b": (two, one)}.items():
        sinks[request_id] = Sink()
        sender.start_leg(make_leg(LegKind.PREFILL, request_id, receiver.me), Sink())
        receiver.start_leg(make_leg(LegKind.DECODE, request_id), sinks[request_id])
    sinks["c"] = Sink()
    one.start_leg(make_leg(LegKind.LOCAL, "c"), sinks["c"])
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
    worker.start_leg(make_leg(LegKind.LOCAL), sink)
    worker.start_leg(make_leg(LegKind.DECODE, "waits"), sink)
    await asyncio.to_thread(entered.wait, 10)
    runner.draw = lambda share: 1 / 0
    go.set()
    error = await asyncio.wait_for(asyncio.shield(worker.fault), 10)
    assert isinstance(error, ZeroDivisionError)
    for request_id in ("r", "waits"):
        end = await sink.end_of(make_key(request_id))
        assert isinstance(end.error, EngineFault)
    worker.start_leg(make_leg(LegKind.LOCAL, "late"), sink)
    assert isinstance(sink.ends[make_key("late")].error, EngineFault)
    await world.reports(lambda reports: not reports)
    assert "engine fault" in caplog.text


async def test_stopping_ends_open_legs_with_worker_lost(world):
    """CASES P-27: at once when there is no grace; a second stop does nothing."""
    runner, entered, go = blocked_runner()
    worker = await world.start("m", "m-0", runner)
    sink = Sink()
    worker.start_leg(make_leg(LegKind.LOCAL), sink)
    worker.start_leg(make_leg(LegKind.DECODE, "waits"), sink)
    await asyncio.to_thread(entered.wait, 10)
    stopping = asyncio.ensure_future(worker.stop(0.0))
    await sink.end_of(make_key("waits"))
    go.set()
    await stopping
    await worker.stop(0.0)
    for request_id in ("r", "waits"):
        assert isinstance(sink.ends[make_key(request_id)].error, WorkerLost)
    worker.start_leg(make_leg(LegKind.LOCAL, "late"), sink)
    assert isinstance(sink.ends[make_key("late")].error, WorkerLost)


async def test_stopping_with_grace_lets_legs_end(world):
    worker = await world.start("m", "m-0")
    sink = Sink()
    worker.start_leg(make_leg(LegKind.LOCAL), sink)
    await worker.stop(10.0)
    assert sink.ends[KEY].finish_reason is FinishReason.LENGTH


async def test_a_leg_that_is_open_is_not_opened_twice(world):
    runner, _, go = blocked_runner()
    worker = await world.start("m", "m-0", runner)
    sink, stranger = Sink(), Sink()
    worker.start_leg(make_leg(LegKind.LOCAL), sink)
    worker.start_leg(make_leg(LegKind.LOCAL), sink)
    worker.start_leg(make_leg(LegKind.DECODE), stranger)
    assert isinstance(stranger.ends[KEY].error, InvalidRequest)
    go.set()
    assert (await sink.end_of(KEY)).finish_reason is FinishReason.LENGTH
    assert sink.output() == expected_tokens("r", 6)


async def test_what_cannot_be_served_is_refused_by_name(world, monkeypatch):
    worker = await world.start("p", "p-0")
    sink = Sink()
    worker.start_leg(make_leg(LegKind.LOCAL, "kind"), sink)
    worker.start_leg(make_leg(LegKind.PREFILL, "empty", worker.me, prompt_ids=()), sink)
    worker.start_leg(make_leg(LegKind.PREFILL, "self", worker.me), sink)
    fields = [sink.ends[make_key(r)].error.field for r in ("kind", "empty", "self")]
    assert fields == ["kind", "prompt_ids", "peer"]
    monkeypatch.setattr(worker_module, "MAX_OPEN_LEGS", 0)
    worker.start_leg(make_leg(LegKind.PREFILL, "full", worker.me), sink)
    assert isinstance(sink.ends[make_key("full")].error, QueueFull)
    assert worker.num_open_legs == 0


async def test_a_grant_that_is_taken_back_ends_its_legs(world):
    worker = await world.start("d", "d-0")
    sink = Sink()
    worker.start_leg(make_leg(LegKind.DECODE, "mine"), sink)
    worker.start_leg(make_leg(LegKind.DECODE, "other"), sink)
    await world.reports(lambda reports: len(reports["d-0"].held_grants) == 2)
    worker._abort_grant("grant-mine")
    assert set(sink.ends) == {make_key("mine")}
    worker.abort_leg(make_key("other"), AbortCause.CANCELLED)
    await world.reports(lambda reports: not reports["d-0"].held_grants)


async def test_a_deadline_passes_without_any_step(world):
    """CASES P-12: clean-up does not depend on progress elsewhere."""
    worker = await world.start("d", "d-0")
    sink = Sink()
    worker.start_leg(make_leg(LegKind.DECODE, remaining_s=0.05), sink)
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
