"""A prefill and a decode half with real pools and schedulers; time, steps and wire by hand.

Nothing moves unless the test says so: engines step when told, and messages of the kinds in
``wire.hold`` (and all behind them in their direction) stay on the wire until let go.
"""

from __future__ import annotations

import asyncio
from collections import deque

from cluster.engine.scheduler import StepScheduler
from cluster.errors import EngineFault, WorkerLost
from cluster.handoff import AbortCause, ManifestBytes
from cluster.kv.block_pool import BlockPool
from cluster.kv.layout import KVLayout
from cluster.request import Leg, LegKind, Peer
from cluster.rpc.errands import Errands
from cluster.transport.base import PeerLost
from decode_worker.inbox import Inbox
from decode_worker.streams import DecodeHalf
from prefill_worker.intake import PrefillHalf
from prefill_worker.outbox import Outbox
from tests.factories import (
    BLOCK_SIZE,
    EOS_ID,
    FakeClock,
    FakeRunner,
    make_key,
    make_params,
    make_prompt,
)

LAYOUT = KVLayout(
    num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="fp32",
    model_fingerprint="fake",
)  # fmt: skip
LEASE_S = 10.0
DEADLINE_S = 60.0
NUM_PROMPT_TOKENS = 19
MAX_TOKENS = 6
CHUNK = 8


class FakeStaging(list):
    """A list of blocks; sliced by their bytes, as a tensor is."""

    def __getitem__(self, where):
        start, rest = divmod(where.start, LAYOUT.block_bytes)
        assert rest == 0
        stop, rest = divmod(where.stop, LAYOUT.block_bytes)
        assert rest == 0
        return FakeStaging(list(self)[start:stop])


class FakeCache:
    """Blocks are what the fake runner wrote into them; a staging buffer is a list of blocks."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner

    def export_blocks(self, block_ids, out_B) -> None:
        slots = self.runner._slots
        out_B[:] = [
            {i: slots[block, i] for i in range(BLOCK_SIZE) if (block, i) in slots}
            for block in block_ids
        ]

    def import_blocks(self, block_ids, staged_B) -> None:
        assert len(block_ids) == len(staged_B)
        for block, written in zip(block_ids, staged_B, strict=True):
            for i, value in written.items():
                self.runner._slots[block, i] = value


class FakeEngine:
    """The engine loop without its thread: the test steps it."""

    def __init__(self, pool: BlockPool, runner: FakeRunner, clock: FakeClock) -> None:
        self.scheduler = StepScheduler(pool, BLOCK_SIZE, 4, 64, CHUNK, 256)
        self.runner = runner
        self.clock = clock
        self.on_step = None
        self.num_prompt_steps = 0

    def add(self, sequence) -> None:
        self.scheduler.add(sequence)

    def abort(self, key, error) -> None:
        self.scheduler.abort(key, error, self.clock.now())

    def step(self) -> bool:
        """Make one step, or none; tell the half what happened; whether anything was computed."""
        plan = self.scheduler.schedule(self.clock.now())
        self.on_step(self.scheduler.take_events())
        if plan is None:
            return False
        self.num_prompt_steps += any(len(share.token_ids) > 1 for share in plan.shares)
        outcome = self.runner.run(plan)
        self.on_step(self.scheduler.commit(plan, outcome, self.clock.now()))
        return True

    def fail(self) -> None:
        self.scheduler.abort_all(EngineFault("a step failed"), self.clock.now())
        self.on_step(self.scheduler.take_events())


class FakeWire:
    """Carries signals between two ends in order, and bytes from sender to receiver."""

    def __init__(self, sender_events, receiver_events) -> None:
        self.hold: set[type] = set()
        self.holds_bytes = False
        self.sender = FakeLink(self, make_peer("d"), sender_events)
        self.receiver = FakeLink(self, make_peer("p"), receiver_events)
        self.sender.other, self.receiver.other = self.receiver, self.sender
        self.bytes: asyncio.Queue[list] = asyncio.Queue()
        self.released = asyncio.Event()

    def deliver(self) -> bool:
        """Deliver what is not held; whether anything was."""
        moved = False
        for end in (self.sender, self.receiver):
            while end.incoming and type(end.incoming[0]) not in self.hold and end.is_open:
                moved = True
                end.events.on_signal(end, end.incoming.popleft())
        return moved

    def let_go(self) -> None:
        self.hold.clear()
        self.holds_bytes = False
        self.released.set()

    def cut(self, reason: str = "cut") -> None:
        """Both ends lose the link; what was on its way is lost."""
        for end in (self.sender, self.receiver):
            end.close(reason)


class FakeLink:
    """One end of the wire."""

    def __init__(self, wire: FakeWire, peer: Peer, events) -> None:
        self.wire = wire
        self.peer = peer
        self.events = events
        self.other: FakeLink | None = None
        self.incoming: deque = deque()
        self.is_open = True
        self.lost = asyncio.Event()

    def signal(self, message) -> None:
        if not self.is_open:
            raise PeerLost("link lost")
        self.other.incoming.append(message)

    async def send_export(self, manifest, export, timeout_s=None) -> None:
        self.signal(ManifestBytes(payload=manifest.pack()))
        staging = FakeStaging()
        if self.wire.holds_bytes:
            await self._wait(self.wire.released.wait())
        export(0, manifest.num_blocks, staging)
        self.wire.bytes.put_nowait(staging)

    async def recv_import(self, manifest, scatter, timeout_s=None) -> None:
        staging = await self._wait(self.wire.bytes.get())
        scatter(0, manifest.num_blocks, staging)

    def close(self, reason: str) -> None:
        if self.is_open:
            self.is_open = False
            self.lost.set()
            asyncio.get_running_loop().call_soon(self.events.on_link_lost, self, reason)
            if self.other.is_open:
                self.other.close(reason)

    async def _wait(self, what):
        tasks = [asyncio.ensure_future(what), asyncio.ensure_future(self.lost.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done = tasks[0].done()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not done:
            raise PeerLost("link lost")
        return tasks[0].result()


class FakeDialer:
    """Finds the wire, once ``may_dial`` is set."""

    def __init__(self) -> None:
        self.may_dial = asyncio.Event()
        self.may_dial.set()
        self.wire: FakeWire | None = None
        self.error = None

    async def link_to(self, peer, timeout_s):
        await self.may_dial.wait()
        if self.error is not None:
            raise self.error
        return self.wire.sender


class FakeSink:
    """A router: keeps tokens by index, and sees to it that each leg ends once."""

    def __init__(self) -> None:
        self.tokens: dict[tuple, int] = {}
        self.ends: dict = {}
        self.num_messages = 0

    def emit(self, tokens, ends) -> None:
        self.num_messages += 1
        for token in tokens:
            assert token.key not in self.ends, "a token after the end"
            assert (token.key, token.output_index) not in self.tokens
            self.tokens[token.key, token.output_index] = token.token_id
        for end in ends:
            assert end.key not in self.ends, f"{end.key} ended twice"
            self.ends[end.key] = end

    def output(self, key) -> list[int]:
        mine = {index: token for (k, index), token in self.tokens.items() if k == key}
        return [mine[index] for index in sorted(mine)]


def make_peer(worker_id: str) -> Peer:
    return Peer(worker_id=worker_id, incarnation=f"{worker_id}-1", address="127.0.0.1:1")


class Pair:
    """Both halves, one wire; ``p_sink`` and ``d_sink`` are the router's two streams."""

    def __init__(self, *, p_blocks: int = 32, d_blocks: int = 32, script=None) -> None:
        self.clock = FakeClock()
        self.p_pool, self.d_pool = BlockPool(p_blocks), BlockPool(d_blocks)
        p_runner, d_runner = FakeRunner(script=script), FakeRunner(script=script)
        self.p_engine = FakeEngine(self.p_pool, p_runner, self.clock)
        self.d_engine = FakeEngine(self.d_pool, d_runner, self.clock)
        self.dialer = FakeDialer()
        self.faults: list[BaseException] = []
        errands = Errands(
            call_soon=asyncio.get_running_loop().call_soon, on_failure=self.faults.append
        )
        common = {"layout": LAYOUT, "clock": self.clock, "lease_s": LEASE_S, "errands": errands}
        outbox = Outbox(
            pool=self.p_pool, cache=FakeCache(p_runner), make_dialer=lambda _: self.dialer, **common
        )
        inbox = Inbox(
            pool=self.d_pool,
            cache=FakeCache(d_runner),
            **common,
        )
        self.prefill = PrefillHalf(
            engine=self.p_engine, pool=self.p_pool, outbox=outbox, clock=self.clock,
            eos_ids=frozenset({EOS_ID}),
        )  # fmt: skip
        self.decode = DecodeHalf(
            engine=self.d_engine, inbox=inbox, clock=self.clock, eos_ids=frozenset({EOS_ID})
        )
        self.p_engine.on_step = self.prefill.on_step
        self.d_engine.on_step = self.decode.on_step
        self.p_sink, self.d_sink = FakeSink(), FakeSink()
        self.new_wire()

    def new_wire(self) -> None:
        self.wire = FakeWire(self.prefill.outbox, self.decode.inbox)
        self.dialer.wire = self.wire

    def leg(self, kind: LegKind, request_id: str = "r", **fields) -> Leg:
        is_prefill = kind is LegKind.PREFILL
        max_tokens = fields.pop("max_tokens", MAX_TOKENS)
        num_prompt_tokens = fields.pop("num_prompt_tokens", NUM_PROMPT_TOKENS)
        defaults = {
            "key": make_key(request_id),
            "kind": kind,
            "prompt_ids": make_prompt(num_prompt_tokens, request_id),
            "params": make_params(max_tokens),
            "remaining_s": DEADLINE_S,
            "grant_id": f"grant-{request_id}",
            "handoff_id": "" if kind is LegKind.LOCAL else f"handoff-{request_id}",
            "peer": make_peer("d") if is_prefill else None,
        }
        return Leg(**{**defaults, **fields})

    def start(self, request_id: str = "r", **fields) -> None:
        self.start_prefill(request_id, **fields)
        self.start_decode(request_id, **fields)

    def start_prefill(self, request_id: str = "r", **fields) -> None:
        self.prefill.start_leg(self.leg(LegKind.PREFILL, request_id, **fields), self.p_sink)

    def start_decode(self, request_id: str = "r", **fields) -> None:
        self.decode.start_leg(self.leg(LegKind.DECODE, request_id, **fields), self.d_sink)

    async def settle(self) -> None:
        """Let tasks run and messages arrive until nothing moves."""
        quiet = 0
        while quiet < 5:
            await asyncio.sleep(0)
            quiet = 0 if self.wire.deliver() else quiet + 1

    async def step_prefill(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.p_engine.step()
            await self.settle()

    async def prefill_all(self) -> None:
        while self.p_engine.step():
            await self.settle()
        await self.settle()

    async def step_decode(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.d_engine.step()
            await self.settle()

    async def run_dry(self) -> None:
        """Let everything go and step both engines until nobody has anything to do."""
        self.dialer.may_dial.set()
        self.wire.let_go()
        quiet = 0
        while quiet < 3:
            await self.settle()
            moved = [self.p_engine.step(), self.d_engine.step()]
            quiet = 0 if any(moved) else quiet + 1

    def stop_prefill(self) -> None:
        self.prefill.close(AbortCause.FAULT, WorkerLost("the worker is stopping"))
        self.wire.cut("stopping")

    def stop_decode(self) -> None:
        self.decode.close(AbortCause.FAULT, WorkerLost("the worker is stopping"))
        self.wire.cut("stopping")

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.prefill.expire(self.clock.now())
        self.decode.expire(self.clock.now())

    def assert_idle(self) -> None:
        """Free blocks as before, nothing open, nothing remembered as under way."""
        assert len(self.prefill.book) == len(self.decode.book) == 0
        assert len(self.prefill.outbox) == len(self.decode.inbox) == 0
        assert self.decode.inbox.num_waiting == 0
        assert self.faults == []
        for pool in (self.p_pool, self.d_pool):
            pool.check()
            assert pool.num_free == pool.num_blocks, pool.counts()
