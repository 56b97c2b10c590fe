"""A prefill half and decode halves with real pools and schedulers; all around them is fake."""

from __future__ import annotations

import asyncio

from cluster.engine.rules import Rules
from cluster.errors import WorkerLost
from cluster.handoff import AbortCause
from cluster.kv.block_pool import BlockPool
from cluster.request import Leg, LegKind, Redirect
from cluster.rpc.errands import Errands
from decode_worker.inbox import Inbox
from decode_worker.streams import DecodeHalf
from prefill_worker.intake import PrefillHalf
from prefill_worker.outbox import Outbox
from tests.factories import EOS_ID, FakeClock, FakeRunner, make_key, make_params, make_prompt
from tests.lifecycle.fakes import (
    CHUNK,
    LAYOUT,
    FakeCache,
    FakeDialer,
    FakeEngine,
    FakeSink,
    FakeWire,
    make_peer,
)

__all__ = ["CHUNK", "LAYOUT", "Pair"]

LEASE_S = 10.0
PATIENCE_S = 1.0
DEADLINE_S = 60.0
NUM_PROMPT_TOKENS = 19
MAX_TOKENS = 6


class DecodeSide:
    """One decode worker, and the stream on which the router hears of it."""

    def __init__(self, pair: Pair, worker_id: str, num_blocks: int, script) -> None:
        self.worker_id = worker_id
        self.pair = pair
        self.pool = BlockPool(num_blocks)
        self.runner = FakeRunner(script=script)
        self.engine = FakeEngine(self.pool, self.runner, pair.clock, pair.rules)
        inbox = Inbox(
            pool=self.pool, cache=FakeCache(self.runner), patience_s=PATIENCE_S,
            tier_of=pair.rules.taking_tier, needs_all=pair.rules.needs_all,
            gives=pair.imports_give, **pair.common,
        )  # fmt: skip
        self.half = DecodeHalf(
            engine=self.engine,
            inbox=inbox,
            clock=pair.clock,
            eos_ids=frozenset({EOS_ID}),
            errands=pair.common["errands"],
        )
        self.engine.on_step = self.half.on_step
        self.sink = FakeSink()
        self.new_wire()

    def new_wire(self) -> None:
        self.wire = FakeWire(self.pair.prefill.outbox.sender, self.half.inbox, self.worker_id)
        self.pair.dialer.wires[self.worker_id] = self.wire
        self.pair.wires.append(self.wire)

    def start(self, leg: Leg) -> None:
        # What was computed elsewhere is checked here as if it had been computed here.
        for position, token_id in enumerate((*leg.prompt_ids, *leg.output_ids)):
            self.runner._token_at.setdefault(self.runner._place(leg.key, position), token_id)
        self.half.start_leg(leg, self.sink)


class Pair:
    """A prefill worker and a decode worker ``d``, and others that are added.

    ``p_sink`` and ``d_sink`` are the router's streams.
    """

    def __init__(
        self,
        *,
        p_blocks: int = 32,
        d_blocks: int = 32,
        script=None,
        streams: bool = True,
        rules: Rules | None = None,
        p_rules: Rules | None = None,
        imports_give: bool = True,
    ) -> None:
        """``rules``: of the decode workers; ``p_rules``: of the prefill worker."""
        self.rules = rules or Rules()
        self.imports_give = imports_give
        self.clock = FakeClock()
        self.faults: list[BaseException] = []
        errands = Errands(
            call_soon=asyncio.get_running_loop().call_soon, on_failure=self.faults.append
        )
        self.common = {
            "layout": LAYOUT, "clock": self.clock, "lease_s": LEASE_S, "errands": errands,
        }  # fmt: skip
        self.dialer = FakeDialer()
        self.p_pool = BlockPool(p_blocks)
        p_runner = FakeRunner(script=script)
        self.p_engine = FakeEngine(self.p_pool, p_runner, self.clock, p_rules)
        self.p_engine.cache = FakeCache(p_runner)
        outbox = Outbox(
            pool=self.p_pool, cache=self.p_engine.cache, make_dialer=lambda _: self.dialer,
            streams=streams, tier_of=p_rules.tier if p_rules is not None else None, **self.common,
        )  # fmt: skip
        self.prefill = PrefillHalf(
            engine=self.p_engine, pool=self.p_pool, outbox=outbox, clock=self.clock,
            eos_ids=frozenset({EOS_ID}),
        )  # fmt: skip
        self.p_engine.on_step = self.prefill.on_step
        self.p_sink = FakeSink()
        self.wires: list[FakeWire] = []
        self.script = script
        self.sides: dict[str, DecodeSide] = {}
        d = self.add_decode("d", d_blocks)
        self.decode, self.d_pool, self.d_engine, self.d_sink = d.half, d.pool, d.engine, d.sink
        self.num_redirects = 0

    def add_decode(self, worker_id: str, num_blocks: int = 32) -> DecodeSide:
        self.sides[worker_id] = DecodeSide(self, worker_id, num_blocks, self.script)
        return self.sides[worker_id]

    @property
    def wire(self) -> FakeWire:
        """The wire to the first decode worker."""
        return self.sides["d"].wire

    @wire.setter
    def wire(self, wire: FakeWire) -> None:
        self.sides["d"].wire = self.dialer.wires["d"] = wire

    def new_wire(self) -> None:
        self.sides["d"].new_wire()

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

    def start_decode(self, request_id: str = "r", *, on: str = "d", **fields) -> None:
        self.sides[on].start(self.leg(LegKind.DECODE, request_id, **fields))

    def start_local(self, request_id: str = "r", *, on: str = "d", **fields) -> None:
        self.sides[on].start(self.leg(LegKind.LOCAL, request_id, **fields))

    def redirect(self, to: str, request_id: str = "r", *, starts: bool = True, **fields) -> str:
        """What a router does with a new grant for a waiting export; returns the handoff's id."""
        self.num_redirects += 1
        handoff_id = f"handoff-{request_id}-{self.num_redirects}"
        grant_id = f"grant-{request_id}-{self.num_redirects}"
        key = make_key(request_id)
        self.prefill.redirect_leg(
            Redirect(
                key=key, handoff_id=handoff_id, peer=make_peer(to),
                num_preemptions=fields.get("num_preemptions", 0),
            )
        )  # fmt: skip
        if starts:
            side = self.sides[to]
            side.sink.ends.pop(key, None)  # the router has read of the old leg's end
            ids = {"handoff_id": handoff_id, "grant_id": grant_id}
            leg = self.leg(LegKind.DECODE, request_id, **ids, **fields)
            if key not in side.half.book or side.half.may_renew(leg, side.sink):
                side.start(leg)
        return handoff_id

    async def settle(self) -> None:
        """Let tasks run and messages arrive until nothing moves."""
        quiet = 0
        while quiet < 12:
            await asyncio.sleep(0)
            moved = [wire.deliver() for wire in list(self.wires)]
            quiet = 0 if any(moved) else quiet + 1

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
        """Let everything go and step all engines until nobody has anything to do."""
        self.dialer.may_dial.set()
        for wire in self.wires:
            wire.let_go()
        engines = [self.p_engine, *(side.engine for side in self.sides.values())]
        quiet = 0
        while quiet < 3:
            await self.settle()
            moved = [engine.step() for engine in engines]
            quiet = 0 if any(moved) else quiet + 1

    async def run_dry_of(self, request_id: str) -> None:
        """Step the engines until a request has ended on the first decode worker."""
        key = make_key(request_id)
        while key not in self.d_sink.ends:
            self.p_engine.step()
            await self.settle()
            await self.step_decode()

    def stop_prefill(self) -> None:
        self.prefill.close(AbortCause.FAULT, WorkerLost("the worker is stopping"))
        for wire in self.wires:
            wire.cut("stopping")

    def stop_decode(self) -> None:
        self.decode.close(AbortCause.FAULT, WorkerLost("the worker is stopping"))
        self.wire.cut("stopping")

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.prefill.expire(self.clock.now())
        for side in self.sides.values():
            side.half.expire(self.clock.now())

    def check(self) -> None:
        """Every block of every pool is in exactly one place."""
        for pool in (self.p_pool, *(side.pool for side in self.sides.values())):
            pool.check()

    def assert_idle(self) -> None:
        """Free blocks as before, nothing open, nothing remembered as under way."""
        assert self.faults == []
        assert len(self.prefill.book) == len(self.prefill.outbox) == 0
        halves = [side.half for side in self.sides.values()]
        assert [len(half.book) for half in halves] == [0] * len(halves)
        assert [len(half.inbox) for half in halves] == [0] * len(halves)
        assert [half.inbox.num_waiting for half in halves] == [0] * len(halves)
        self.check()
        for pool in (self.p_pool, *(side.pool for side in self.sides.values())):
            assert pool.num_free == pool.num_blocks, pool.counts()
