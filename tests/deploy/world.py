"""Whole workers in one process: real servers, links, step threads and control plane, fake model."""

import asyncio
import contextlib
import threading

import torch

from cluster.clock import SystemClock
from cluster.config import DeployConfig, ModelConfig, PoolConfig, Role, TransportKind
from cluster.control.server import ControlServer
from cluster.control.status import get_cluster
from cluster.kv.layout import KVLayout
from cluster.request import ExportWaiting, Leg, LegKind
from cluster.transport.loopback import LoopbackTransport
from deploy.hosted_worker import HostedWorker
from deploy.worker import Worker
from deploy.worker_parts import StepSpeed, WorkerParts
from tests.factories import (
    BLOCK_SIZE,
    EOS_ID,
    FakeRunner,
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

    def export_blocks(self, block_ids, out_B, layers=None) -> None:
        out_B.copy_(self.blocks[list(block_ids)].reshape(-1))

    def import_blocks(self, block_ids, staged_B, layers=None) -> None:
        self.blocks[list(block_ids)] = staged_B.view(len(block_ids), -1)
        for block in block_ids:
            for i in range(BLOCK_SIZE):
                self.runner._slots.pop((block, i), None)


class Sink:
    def __init__(self) -> None:
        self.tokens = []
        self.waiting = []
        self.ends = {}
        self.changed = asyncio.Event()

    def emit(self, tokens, ends, notices=(), prompts=()) -> None:
        self.tokens.extend(tokens)
        self.waiting.extend(told for told in notices if isinstance(told, ExportWaiting))
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
        self.hosted = []

    def parts(self, runner=None) -> WorkerParts:
        runner = runner or FakeRunner(kv_of_others=True)
        return WorkerParts(
            layout=LAYOUT,
            max_model_len=256,
            vocab_size=30_001,
            eos_ids=frozenset({EOS_ID}),
            cache=ByteCache(runner),
            runner=runner,
            speed=StepSpeed(base_s=0.01, per_seq_s=0.001, prefill_per_token_s=0.0001),
            tokenizer="",
            transport=self.transport,
            pin=lambda: None,
        )

    def make(self, pool: str, worker_id: str, runner=None) -> Worker:
        worker = Worker(
            self.config, self.config.pool(pool), self.parts(runner), worker_id=worker_id,
            control_address=self.address,
        )  # fmt: skip
        self.workers.append(worker)
        return worker

    def host(self, pool: str, worker_id: str, runner=None) -> HostedWorker:
        """A worker that takes orders; not started yet."""
        hosted = HostedWorker(
            self.config, self.config.pool(pool), self.parts(runner), worker_id=worker_id,
            control_address=self.address,
        )  # fmt: skip
        self.hosted.append(hosted)
        return hosted

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


@contextlib.asynccontextmanager
async def making_world():
    """A control plane, and workers of three pools that are stopped and checked in the end."""

    def pool(name, role):
        return PoolConfig(
            name=name, role=role, block_size=BLOCK_SIZE, kv_tokens=NUM_BLOCKS * BLOCK_SIZE,
            token_budget=64, chunk_tokens=64,
        )  # fmt: skip

    config = DeployConfig(
        pools=(pool("p", Role.PREFILL), pool("d", Role.DECODE), pool("m", Role.MIXED)),
        model=ModelConfig(max_model_len=256),
        transport=TransportKind.LOOPBACK,
    )
    control = ControlServer(config, SystemClock())
    world = World(config, control, await control.start("127.0.0.1", 0))
    yield world
    for hosted in world.hosted:
        await hosted.end(0.0)
        world.workers.append(hosted.worker)
    for worker in world.workers:
        await worker.stop(0.0)
    # What is left open here would fail whatever test runs when it is collected.
    await control.stop()
    for worker in world.workers:
        worker._pool.check()
        assert worker._pool.num_free == NUM_BLOCKS
        assert len(worker.legs) == 0


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
