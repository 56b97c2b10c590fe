"""What stands in for caches, engines, links and routers; time, steps and wire by hand.

Nothing moves unless the test says so: engines step when told, and messages of the kinds in
``wire.hold`` (and all behind them in their direction) stay on the wire until let go.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from cluster.config import TransportKind
from cluster.engine.plan import StepEvents
from cluster.engine.scheduler import StepScheduler
from cluster.errors import EngineFault
from cluster.handoff import ManifestBytes
from cluster.kv.layout import KVLayout
from cluster.request import ExportWaiting, Peer, Preempted
from cluster.rpc.link_settings import LinkState
from cluster.transport.base import PeerLost
from tests.factories import BLOCK_SIZE, FakeClock, FakeRunner

if TYPE_CHECKING:
    from cluster.engine.plan import Outcome, Plan
    from cluster.engine.rules import Rules
    from cluster.kv.block_pool import BlockPool

LAYERS = 4
LAYOUT = KVLayout(
    num_layers=LAYERS, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="fp32",
    model_fingerprint="fake",
)  # fmt: skip
CHUNK = 8


TORN = ("torn", 0)
"""What stands where the layers of a token are not all of one and the same."""


class FakeStaging(list):
    """A list of blocks; sliced by their bytes, as a tensor is."""

    def __init__(self, block_bytes: int, blocks=()) -> None:
        super().__init__(blocks)
        self.block_bytes = block_bytes

    def __getitem__(self, where):
        start, rest = divmod(where.start, self.block_bytes)
        assert rest == 0
        stop, rest = divmod(where.stop, self.block_bytes)
        assert rest == 0
        return FakeStaging(self.block_bytes, list(self)[start:stop])


class FakeCache:
    """Blocks are what the fake runner wrote into them; a staging buffer is a list of blocks.

    Layers of a token all hold the same. In ``num_stored`` are blocks of a running step, with the
    layers that it has stored of them.
    """

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.num_stored: dict[int, int] = {}
        self._layers: dict[tuple[int, int], dict[int, tuple]] = {}

    def export_blocks(self, block_ids, out_B, layers=None) -> None:
        slots = self.runner._slots
        for block in block_ids:
            assert layers.stop <= self.num_stored.get(block, LAYERS), "not computed yet"
        out_B[:] = [
            {i: slots[block, i] for i in range(BLOCK_SIZE) if (block, i) in slots}
            for block in block_ids
        ]

    def import_blocks(self, block_ids, staged_B, layers=None) -> None:
        assert len(block_ids) == len(staged_B)
        for block, written in zip(block_ids, staged_B, strict=True):
            for i, value in written.items():
                known = self._layers.setdefault((block, i), {})
                known.update(dict.fromkeys(layers, value))
                is_whole = len(known) == LAYERS and len(set(known.values())) == 1
                self.runner._slots[block, i] = value if is_whole else TORN


class FakeEngine:
    """The engine loop without its thread: the test steps it."""

    def __init__(
        self, pool: BlockPool, runner: FakeRunner, clock: FakeClock, rules: Rules | None = None
    ) -> None:
        self.scheduler = StepScheduler(pool, BLOCK_SIZE, 4, 64, CHUNK, 256, rules)
        self.runner = runner
        self.clock = clock
        self.on_step = None
        self.num_prompt_steps = 0
        self.cache: FakeCache | None = None
        """What is told how far a step is that is made in parts."""
        self.running: tuple[Plan, Outcome] | None = None
        self._aborts = []

    def add(self, sequence) -> None:
        self.scheduler.add(sequence)

    def abort(self, key, error) -> None:
        self._aborts.append((key, error))
        if self.running is None:
            self._take_aborts()

    def begin(self) -> None:
        """Begin a step, which has stored nothing yet; or none."""
        plan = self.scheduler.schedule(self.clock.now())
        self.on_step(self.scheduler.take_events())
        if plan is not None:
            self.running = plan, self.runner.run(plan)
            self._set_stored(0)

    def store(self, num_layers: int) -> None:
        """Go on until so many layers are stored, and tell of them."""
        self._set_stored(num_layers)
        plan, _ = self.running
        watched = [share for share in plan.shares if share.stored is not None]
        for share in watched:
            share.stored.so_far = (share.start + len(share.token_ids), num_layers)
        self.on_step(StepEvents(stored=tuple(share.key for share in watched)))

    def end(self) -> None:
        """End the step that was begun."""
        plan, outcome = self.running
        self.running = None
        self.cache.num_stored.clear()
        self._take_aborts()
        self.on_step(self.scheduler.commit(plan, outcome, self.clock.now()))

    def _set_stored(self, num_layers: int) -> None:
        for share in self.running[0].shares:
            for block in share.block_ids[share.start // BLOCK_SIZE :]:
                self.cache.num_stored[block] = num_layers

    def _take_aborts(self) -> None:
        aborts, self._aborts = self._aborts, []
        for key, error in aborts:
            self.scheduler.abort(key, error, self.clock.now())

    def step(self) -> bool:
        """Make one step, or none, or end the one that was begun; whether anything was computed."""
        if self.running is not None:
            self.end()
            return True
        plan = self.scheduler.schedule(self.clock.now())
        self.on_step(self.scheduler.take_events())
        if plan is None:
            return False
        self.num_prompt_steps += any(len(share.token_ids) > 1 for share in plan.shares)
        outcome = self.runner.run(plan)
        self.on_step(self.scheduler.commit(plan, outcome, self.clock.now()))
        return True

    def fail(self) -> None:
        """Fail, in the midst of a step where one was begun."""
        self.running = None
        if self.cache is not None:
            self.cache.num_stored.clear()
        self.scheduler.abort_all(EngineFault("a step failed"), self.clock.now())
        self.on_step(self.scheduler.take_events())


class FakeWire:
    """Carries signals between two ends in order, and bytes from sender to receiver.

    With ``holds_bytes`` the sender's link thread does not come to reading the blocks; with
    ``holds_landing`` the bytes are on their way, and do not arrive.
    """

    def __init__(self, sender_events, receiver_events, worker_id: str = "d") -> None:
        self.hold: set[type] = set()
        self.holds_bytes = False
        self.holds_landing = False
        self.sent: list[list] = []
        """The bytes of each segment that left."""
        self.parts: list[tuple[range, range]] = []
        """Blocks and layers of each."""
        self.sender = FakeLink(self, make_peer(worker_id), sender_events)
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
        self.holds_bytes = self.holds_landing = False
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
        self.turn = asyncio.Lock()
        self.state = LinkState(
            peer_worker_id=peer.worker_id, epoch=1, transport=TransportKind.LOOPBACK
        )

    def signal(self, message) -> None:
        if not self.is_open:
            raise PeerLost("link lost")
        self.other.incoming.append(message)

    def send_export(self, manifest, export, timeout_s=None):
        self.signal(ManifestBytes(payload=manifest.pack()))
        return self._send(manifest, export)

    async def _send(self, manifest, export) -> None:
        if not manifest.num_bytes:
            self.wire.parts.append((manifest.blocks, manifest.layers))
            return
        # The link's thread takes its jobs in their order.
        async with self.turn:
            if self.wire.holds_bytes:
                await self._wait(self.wire.released.wait())
            staging = FakeStaging(manifest.block_bytes)
            export(0, manifest.num_blocks, staging)
            self.wire.sent.append(list(staging))
            self.wire.parts.append((manifest.blocks, manifest.layers))
            self.wire.bytes.put_nowait(staging)

    async def recv_import(self, manifest, scatter, timeout_s=None) -> None:
        if not manifest.num_bytes:
            return
        async with self.turn:
            staging = await self._wait(self.wire.bytes.get())
            if self.wire.holds_landing:
                await self._wait(self.wire.released.wait())
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
    """Finds the wire to each decode worker, once ``may_dial`` is set."""

    def __init__(self) -> None:
        self.may_dial = asyncio.Event()
        self.may_dial.set()
        self.wires: dict[str, FakeWire] = {}
        self.error = None
        """Raised for the first decode worker only."""

    async def link_to(self, peer, timeout_s):
        await self.may_dial.wait()
        if self.error is not None and peer.worker_id == "d":
            raise self.error
        return self.wires[peer.worker_id].sender


class FakeSink:
    """A router: keeps tokens by index, and sees to it that each leg ends once."""

    def __init__(self) -> None:
        self.tokens: dict[tuple, int] = {}
        self.ends: dict = {}
        self.waiting: list[ExportWaiting] = []
        self.num_preemptions: dict = {}
        """Of each leg's choice, as it was told last."""
        self.num_messages = 0

    def emit(self, tokens, ends, notices=(), prompts=()) -> None:
        self.num_messages += 1
        for told in notices:
            assert told.key not in self.ends, "a notice after the end"
            if isinstance(told, Preempted):
                assert told.num_preemptions > self.num_preemptions.get(told.key, 0)
                self.num_preemptions[told.key] = told.num_preemptions
            else:
                self.waiting.append(told)
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
