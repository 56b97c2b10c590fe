"""Halves, engines, caches and links with all their threads, in one process; only the model is fake.

``lifecycle`` proves each order of events by hand; here the orders are those that threads make,
while legs are aborted, exports redirected and links cut at random. The model fails on KV that is
not its sequence's own, so that a byte in a wrong place is found by the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

import grpc
import pytest
import torch

from cluster.clock import SystemClock
from cluster.engine.loop import EngineLoop
from cluster.engine.scheduler import StepScheduler
from cluster.handoff import AbortCause
from cluster.kv.block_pool import BlockPool
from cluster.kv.cache import PagedCache
from cluster.kv.layout import KVLayout
from cluster.request import Leg, LegKind, Peer, Redirect
from cluster.rpc.errands import Errands
from cluster.rpc.link_acceptor import LinkAcceptor
from cluster.rpc.link_dialer import LinkDialer
from cluster.rpc.options import SERVER_OPTIONS
from cluster.transport.shm import ShmTransport
from cluster.transport.staging import TransferLimits
from cluster.transport.torch_dist import TorchDistTransport
from cluster.wire import worker_pb2_grpc
from decode_worker import landing
from decode_worker.inbox import Inbox
from decode_worker.streams import DecodeHalf
from prefill_worker.intake import PrefillHalf
from prefill_worker.outbox import Outbox
from tests.factories import (
    EOS_ID,
    FakeRunner,
    expected_tokens,
    make_key,
    make_params,
    make_prefix_index,
    make_prompt,
)
from tests.factories_link import Servicer
from tests.lifecycle.fakes import FakeSink

if TYPE_CHECKING:
    from cluster.transport.base import Transport

RUN_S = 3.0
NUM_OPEN = 24
MAX_TOKENS = 12
CAUSES = (AbortCause.CANCELLED, AbortCause.STOPPED, AbortCause.FAULT)


def make_layout(block_size: int) -> KVLayout:
    """A token's K and V are 8 bytes each: what the fake model keeps of it."""
    return KVLayout(
        num_layers=1, num_kv_heads=1, head_dim=2, block_size=block_size, dtype="fp32",
        model_fingerprint="fake",
    )  # fmt: skip


class Slots:
    """The fake model's slots, in the bytes of a real cache."""

    def __init__(self, cache: PagedCache) -> None:
        shape = (cache.num_blocks, 2, cache.layout.block_size)
        self.words = cache._pool_NB.numpy().view("int64").reshape(shape)

    def get(self, slot: tuple[int, int]) -> tuple[int, int]:
        block, offset = slot
        return int(self.words[block, 0, offset]), int(self.words[block, 1, offset])

    def __setitem__(self, slot: tuple[int, int], written: tuple[int, int]) -> None:
        block, offset = slot
        self.words[block, 0, offset], self.words[block, 1, offset] = written


class Side:
    """One worker: both halves where it dials, else the decode half behind a server."""

    def __init__(self, world: World, worker_id: str, block_size: int, num_blocks: int) -> None:
        self.worker_id, self.num_blocks = worker_id, num_blocks
        layout, clock = make_layout(block_size), world.clock
        self.pool = BlockPool(num_blocks, make_prefix_index(block_size=block_size))
        cache = PagedCache(layout, num_blocks, torch.device("cpu"))
        self.runner = FakeRunner(block_size=block_size)
        self.runner._slots = Slots(cache)
        call_soon = asyncio.get_running_loop().call_soon_threadsafe
        errands = Errands(call_soon=call_soon, on_failure=world.faults.append)
        self.engine = EngineLoop(
            scheduler=StepScheduler(self.pool, block_size, 4, 64, 8, 256),
            runner=self.runner,
            clock=clock,
            on_events=lambda events: errands.soon(lambda: self.on_step(events)),
            on_fault=lambda error: errands.soon(lambda: world.faults.append(error)),
        )
        common = {
            "pool": self.pool, "cache": cache, "layout": layout, "clock": clock, "lease_s": 0.4,
            "errands": errands,
        }  # fmt: skip
        ends = {"engine": self.engine, "clock": clock, "eos_ids": frozenset({EOS_ID})}
        self.link = {"layout": layout, "transport": world.transport(), "limits": world.limits}
        self.outbox = Outbox(make_dialer=self.make_dialer, **common)
        self.prefill = PrefillHalf(pool=self.pool, outbox=self.outbox, **ends)
        self.inbox = Inbox(patience_s=0.05, **common)
        self.decode = DecodeHalf(inbox=self.inbox, errands=errands, **ends)
        self.halves = (self.prefill, self.decode)
        self.sink = FakeSink()

    def make_dialer(self, events) -> LinkDialer:
        me = Peer(worker_id=self.worker_id, incarnation=f"{self.worker_id}-1", address="")
        self.dialer = LinkDialer(me=me, events=events, **self.link)
        return self.dialer

    async def serve(self) -> None:
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        incarnation = f"{self.worker_id}-1"
        self.me = Peer(worker_id=self.worker_id, incarnation=incarnation, address=address)
        self.acceptor = LinkAcceptor(me=self.me, events=self.inbox, **self.link)
        worker_pb2_grpc.add_WorkerServicer_to_server(Servicer(self.acceptor), self.server)
        await self.server.start()
        self.engine.start()

    async def stop(self) -> None:
        await self.dialer.close()
        await self.acceptor.close()
        await self.server.stop(None)
        await asyncio.to_thread(self.engine.stop, 5.0)

    def on_step(self, events) -> None:
        for half in self.halves:
            half.on_step(events)


class World:
    """A prefill worker ``p`` and two decode workers, and a router that does as it likes."""

    def __init__(self, seed: int, transport: type[Transport]) -> None:
        self.dice = random.Random(seed)
        self.clock = SystemClock()
        self.transport = transport
        self.limits = TransferLimits(
            staging_bytes=2 * make_layout(8).block_bytes, floor_s=2.0, has_digest=True, idle_s=0.3
        )
        self.faults: list[BaseException] = []
        self.p = Side(self, "p", 4, 30)
        self.ds = [Side(self, "d", 4, 26), Side(self, "e", 8, 10)]
        self.sides = [self.p, *self.ds]
        self.num_requests = self.num_handoffs = 0
        self.prompts: dict[str, tuple[int, ...]] = {}

    @property
    def num_open(self) -> int:
        return sum(len(half.book) for side in self.sides for half in side.halves)

    def start(self) -> None:
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        num_tokens = self.dice.randint(1, 30)
        num_shared = self.dice.randint(0, num_tokens)
        prompt = make_prompt(40, "shared")[:num_shared] + make_prompt(num_tokens, request_id)
        self.prompts[request_id] = prompt = prompt[:num_tokens]
        for side in self.sides:
            for position, token_id in enumerate((*prompt, *expected_tokens(request_id, 12))):
                side.runner._token_at[side.runner._place(make_key(request_id), position)] = token_id
        d, handoff_id = self.dice.choice(self.ds), self.handoff_id()
        prefill = self.leg(LegKind.PREFILL, request_id, handoff_id, d.me)
        self.p.prefill.start_leg(prefill, self.p.sink)
        d.decode.start_leg(self.leg(LegKind.DECODE, request_id, handoff_id), d.sink)

    def handoff_id(self) -> str:
        self.num_handoffs += 1
        return f"h{self.num_handoffs}"

    def leg(self, kind: LegKind, request_id: str, handoff_id: str, peer: Peer | None = None) -> Leg:
        return Leg(
            key=make_key(request_id), kind=kind, prompt_ids=self.prompts[request_id],
            params=make_params(MAX_TOKENS), remaining_s=10.0, grant_id="g",
            handoff_id=handoff_id, peer=peer,
        )  # fmt: skip

    def redirect(self, key) -> None:
        """Pass an export on, in whatever state, unless another worker streams it by now."""
        for side in self.ds:
            side.decode.abort_leg(key, AbortCause.FAULT)
        if key not in self.p.prefill.book or any(key in side.decode.book for side in self.ds):
            return
        d, handoff_id = self.dice.choice(self.ds), self.handoff_id()
        for side in self.ds:
            side.sink.ends.pop(key, None)
            for at in [at for at in side.sink.tokens if at[0] == key]:
                del side.sink.tokens[at]
        d.decode.start_leg(self.leg(LegKind.DECODE, key.request_id, handoff_id), d.sink)
        told = max(side.sink.num_preemptions.get(key, 0) for side in self.ds)
        redirect = Redirect(key=key, handoff_id=handoff_id, peer=d.me, num_preemptions=told)
        self.p.prefill.redirect_leg(redirect)

    def disturb(self) -> None:
        what = self.dice.random()
        if what < 0.15:
            half = self.dice.choice(self.dice.choice(self.sides).halves)
            for opened in half.book:
                half.abort_leg(opened.key, self.dice.choice(CAUSES))
                break
        elif what < 0.25:
            exports = [opened.key for opened in self.p.prefill.book]
            if exports:
                self.redirect(self.dice.choice(exports))
        elif what < 0.3:
            ends = [self.p.dialer._links, *(side.acceptor._links for side in self.ds)]
            for link in self.dice.choice(ends).copy().values():
                link.close("cut")

    async def run(self) -> None:
        started = looked = self.clock.now()
        while self.clock.now() < started + RUN_S and not self.faults:
            await asyncio.sleep(self.dice.choice([0, 0, 0.0003, 0.001, 0.004]))
            if self.clock.now() > looked + 0.02:
                looked = self.clock.now()
                self.expire()
            waiting, self.p.sink.waiting = self.p.sink.waiting, []
            for told in waiting:
                self.redirect(told.key)
            if self.num_open < NUM_OPEN:
                self.start()
            self.disturb()

    def expire(self) -> None:
        for side in self.sides:
            side.pool.check()
            for half in side.halves:
                half.expire(self.clock.now())

    async def come_to_rest(self) -> None:
        async with asyncio.timeout(10):
            while self.num_open and not self.faults:
                for side in self.sides:
                    for half in side.halves:
                        for opened in half.book:
                            half.abort_leg(opened.key, AbortCause.CANCELLED)
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("transport", [ShmTransport, TorchDistTransport])
async def test_whatever_threads_do_all_is_given_back_and_no_token_is_wrong(transport, monkeypatch):
    """CASES P-12, P-15, P-20, P-21, S-13."""
    monkeypatch.setattr(landing, "SLICE_BYTES", 128)
    world = World(1, transport)
    async with contextlib.AsyncExitStack() as stack:
        for side in world.sides:
            await side.serve()
            stack.push_async_callback(side.stop)
        await world.run()
        await world.come_to_rest()
    assert world.faults == []
    sent = world.p.outbox.counts
    assert min(sent["committed"], sent["failed"], sent["redirected"], sent["waited"]) > 5, sent
    for side in world.sides:
        side.pool.check()
        counts = side.pool.counts()
        assert counts.free + counts.cached == side.num_blocks, side.pool._held
    for side in world.ds:
        for (key, index), token_id in side.sink.tokens.items():
            assert token_id == expected_tokens(key.request_id, MAX_TOKENS)[index]
