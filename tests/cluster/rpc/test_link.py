"""Links over a real gRPC stream: opening, refusing, signals, bytes, and one fate for both parts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import grpc
import pytest
import torch

from cluster.errors import HandoffFailed, WorkerLost
from cluster.handoff import AbortCause, AbortHandoff, Commit, Credit, ManifestBytes, Offer
from cluster.kv.layout import KVLayout
from cluster.request import LegKey, Peer
from cluster.rpc.link_acceptor import LinkAcceptor
from cluster.rpc.link_dialer import LinkDialer
from cluster.rpc.options import SERVER_OPTIONS
from cluster.transport.base import PeerLost, TransferTimeout, Transport, TransportError
from cluster.transport.loopback import LoopbackTransport
from cluster.transport.manifest import Manifest
from cluster.transport.staging import TransferLimits
from cluster.transport.torch_dist import TorchDistTransport
from cluster.wire import worker_pb2 as pb
from cluster.wire import worker_pb2_grpc

if TYPE_CHECKING:
    from cluster.rpc.link import Link

LAYOUT = KVLayout(
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    block_size=16,
    dtype="fp32",
    model_fingerprint="tiny",
)
LIMITS = TransferLimits(staging_bytes=4 * LAYOUT.block_bytes, floor_s=10)
KEY = LegKey("r1", 0, 0)
LONG_S = 20.0


class Half:
    """Records what a half hears; ``until`` waits for it."""

    def __init__(self) -> None:
        self.signals: list[tuple[Link, object]] = []
        self.lost: list[tuple[Link, str]] = []
        self.on_message: Callable[[Link, object], None] = lambda link, message: None
        self._changed = asyncio.Event()

    def on_signal(self, link: Link, message: object) -> None:
        self.signals.append((link, message))
        self._changed.set()
        self.on_message(link, message)

    def on_link_lost(self, link: Link, reason: str) -> None:
        self.lost.append((link, reason))
        self._changed.set()

    @property
    def messages(self) -> list[object]:
        return [message for _, message in self.signals]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LONG_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


class Servicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, acceptor: LinkAcceptor) -> None:
        self.acceptor = acceptor

    async def Link(self, request_iterator, context) -> None:
        await self.acceptor.serve(request_iterator, context)


@dataclass
class World:
    """One decode worker behind a real server, and whatever dials it."""

    transports: tuple[Transport, Transport]
    acceptor: LinkAcceptor
    receiver: Half
    peer: Peer
    dialers: list[LinkDialer]

    def dialer(
        self, half: Half | None = None, *, worker_id: str = "p", incarnation: str = "p-1", **changes
    ) -> LinkDialer:
        settings = {
            "me": Peer(worker_id=worker_id, incarnation=incarnation, address=""),
            "layout": LAYOUT,
            "transport": self.transports[0],
            "events": half or Half(),
            "limits": LIMITS,
        }
        dialer = LinkDialer(**{**settings, **changes})
        self.dialers.append(dialer)
        return dialer


MakeWorld = Callable[..., Awaitable[World]]


def loopback() -> tuple[Transport, Transport]:
    both = LoopbackTransport()
    return both, both


def gloo() -> tuple[Transport, Transport]:
    return TorchDistTransport(), TorchDistTransport()


@pytest.fixture
async def make_world() -> AsyncIterator[MakeWorld]:
    worlds, servers = [], []

    async def make(transports: tuple[Transport, Transport] | None = None, **changes) -> World:
        transports = transports or loopback()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        receiver = Half()
        peer = Peer(worker_id="d", incarnation="d-1", address=address)
        settings = {
            "me": peer,
            "layout": LAYOUT,
            "transport": transports[1],
            "events": receiver,
            "limits": LIMITS,
        }
        acceptor = LinkAcceptor(**{**settings, **changes})
        worker_pb2_grpc.add_WorkerServicer_to_server(Servicer(acceptor), server)
        await server.start()
        world = World(transports, acceptor, receiver, peer, [])
        worlds.append(world)
        servers.append(server)
        return world

    yield make
    for world in worlds:
        for dialer in world.dialers:
            await dialer.close()
        await world.acceptor.close()
    for server in servers:
        await server.stop(None)


def make_manifest(num_tokens: int, handoff_id: str = "h1") -> Manifest:
    return Manifest.of(handoff_id, KEY, LAYOUT, num_tokens=num_tokens, output_ids=(7,))


def make_export(num_blocks: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, LAYOUT.block_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def gather_from(export: torch.Tensor):
    def gather(start: int, num_blocks: int, out_B: torch.Tensor) -> None:
        out_B.copy_(export[start : start + num_blocks].view(-1))

    return gather


class Importer:
    """A decode half that takes every manifest in order, as the link demands."""

    def __init__(self, half: Half) -> None:
        half.on_message = self.take
        self.imported: list[torch.Tensor] = []
        self.tasks: list[asyncio.Task] = []

    def take(self, link: Link, message: object) -> None:
        if isinstance(message, ManifestBytes):
            manifest = Manifest.unpack(message.payload)
            into = torch.zeros(manifest.num_blocks, manifest.block_bytes, dtype=torch.uint8)
            self.imported.append(into)
            self.tasks.append(asyncio.create_task(self.receive(link, manifest, into)))

    async def receive(self, link: Link, manifest: Manifest, into: torch.Tensor) -> None:
        def scatter(start: int, num_blocks: int, staged_B: torch.Tensor) -> None:
            into[start : start + num_blocks].view(-1).copy_(staged_B)

        await link.recv_import(manifest, scatter)
        await link.signal(Commit(handoff_id=manifest.handoff_id))


# ---- opening


async def test_signals_go_both_ways_in_order(make_world: MakeWorld):
    world = await make_world()
    sender = Half()
    link = await world.dialer(sender).link_to(world.peer, LONG_S)
    sent = [
        Offer(handoff_id=f"h{index}", key=KEY, num_blocks=2, num_tokens=20) for index in range(50)
    ]
    sent.append(AbortHandoff(handoff_id="h3", cause=AbortCause.CANCELLED, detail="left"))
    for message in sent:
        await link.signal(message)
    await world.receiver.until(lambda: len(world.receiver.signals) == len(sent))
    assert world.receiver.messages == sent
    other_end = world.receiver.signals[0][0]
    assert other_end.epoch == link.epoch
    assert (other_end.peer.worker_id, link.peer.worker_id) == ("p", "d")
    for message in (Credit(handoff_id="h0"), Commit(handoff_id="h0")):
        await other_end.signal(message)
    await sender.until(lambda: len(sender.signals) == 2)
    assert sender.messages == [Credit(handoff_id="h0"), Commit(handoff_id="h0")]


async def test_concurrent_callers_share_one_dial(make_world: MakeWorld):
    world = await make_world()
    dialer = world.dialer()
    links = await asyncio.gather(*(dialer.link_to(world.peer, LONG_S) for _ in range(10)))
    assert len({id(link) for link in links}) == 1
    assert await dialer.link_to(world.peer, LONG_S) is links[0]


async def test_another_layout_is_refused_with_the_field_and_both_values(make_world: MakeWorld):
    world = await make_world()
    dialer = world.dialer(layout=replace(LAYOUT, block_size=32))
    with pytest.raises(HandoffFailed, match="block_size: 16 here, 32 there"):
        await dialer.link_to(world.peer, LONG_S)


async def test_another_incarnation_is_a_lost_worker(make_world: MakeWorld):
    """P-23: a worker that restarted at the same address is not the one that was meant."""
    world = await make_world()
    with pytest.raises(WorkerLost, match="d-1 is here"):
        await world.dialer().link_to(replace(world.peer, incarnation="d-0"), LONG_S)


async def test_nobody_at_the_address_is_a_lost_worker(make_world: MakeWorld):
    world = await make_world()
    nobody = replace(world.peer, address="127.0.0.1:1")
    with pytest.raises(WorkerLost):
        await world.dialer().link_to(nobody, LONG_S)


async def test_a_caller_with_little_time_gives_up_alone(make_world: MakeWorld):
    world = await make_world()
    dialer = world.dialer()
    with pytest.raises(WorkerLost, match=r"within 0\.0 s"):
        await dialer.link_to(world.peer, 0.0)
    assert (await dialer.link_to(world.peer, LONG_S)).is_open


async def test_a_channel_that_does_not_open_fails_the_dial(make_world: MakeWorld):
    world = await make_world(transports=(LoopbackTransport(), LoopbackTransport()))
    sender = Half()
    with pytest.raises(HandoffFailed, match="cannot leave the process"):
        await world.dialer(sender).link_to(world.peer, LONG_S)
    assert sender.lost == world.receiver.lost == []


@pytest.mark.parametrize(
    "first",
    [
        pb.LinkMessage(),
        pb.LinkMessage(credit=pb.Credit(handoff_id="h")),
        pb.LinkMessage(hello=pb.LinkHello(receiver_incarnation="d-1")),
    ],
    ids=["nothing", "no hello", "empty hello"],
)
async def test_a_stream_that_begins_wrong_is_refused(make_world: MakeWorld, first: pb.LinkMessage):
    world = await make_world()
    async with grpc.aio.insecure_channel(world.peer.address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Link()
        await call.write(first)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


# ---- bytes


@pytest.mark.parametrize("make_transports", [loopback, gloo], ids=lambda make: make.__name__)
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 65, 200])
async def test_blocks_arrive_and_are_committed(
    make_world: MakeWorld, make_transports, num_tokens: int
):
    world = await make_world(make_transports())
    importer, sender = Importer(world.receiver), Half()
    link = await world.dialer(sender).link_to(world.peer, LONG_S)
    manifest = make_manifest(num_tokens)
    export = make_export(manifest.num_blocks)
    await link.send_export(manifest, gather_from(export))
    await sender.until(lambda: sender.messages == [Commit(handoff_id="h1")])
    assert torch.equal(importer.imported[0], export)


async def test_concurrent_exports_keep_their_order(make_world: MakeWorld):
    world = await make_world(gloo())
    importer, sender = Importer(world.receiver), Half()
    link = await world.dialer(sender).link_to(world.peer, LONG_S)
    exports = [make_export(1 + index % 7, seed=index) for index in range(30)]
    await asyncio.gather(
        *(
            link.send_export(make_manifest(16 * len(export), f"h{index}"), gather_from(export))
            for index, export in enumerate(exports)
        )
    )
    await sender.until(lambda: len(sender.signals) == len(exports))
    assert [message.handoff_id for message in sender.messages] == [f"h{n}" for n in range(30)]
    for imported, export in zip(importer.imported, exports, strict=True):
        assert torch.equal(imported, export)


async def test_a_cancelled_sender_still_sends_what_its_manifest_announced(make_world: MakeWorld):
    world = await make_world(gloo())
    importer, sender = Importer(world.receiver), Half()
    link = await world.dialer(sender).link_to(world.peer, LONG_S)
    may_gather, export = threading.Event(), make_export(9)

    def slow_gather(start: int, num_blocks: int, out_B: torch.Tensor) -> None:
        assert may_gather.wait(LONG_S)
        gather_from(export)(start, num_blocks, out_B)

    sending = asyncio.create_task(link.send_export(make_manifest(144), slow_gather))
    await world.receiver.until(lambda: len(world.receiver.signals) == 1)
    sending.cancel()
    may_gather.set()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await sender.until(lambda: len(sender.signals) == 1)
    assert torch.equal(importer.imported[0], export)
    assert link.is_open


async def test_a_failing_scatter_leaves_the_link_whole(make_world: MakeWorld):
    world = await make_world()
    link = await world.dialer().link_to(world.peer, LONG_S)
    export, pieces = make_export(9), []

    def scatter(start: int, num_blocks: int, staged_B: torch.Tensor) -> None:
        pieces.append(start)
        raise ValueError("no place")

    sending = asyncio.create_task(link.send_export(make_manifest(144), gather_from(export)))
    await world.receiver.until(lambda: len(world.receiver.signals) == 1)
    other_end, message = world.receiver.signals[0]
    with pytest.raises(ValueError, match="no place"):
        await other_end.recv_import(Manifest.unpack(message.payload), scatter)
    await sending
    assert pieces == [0]
    importer = Importer(world.receiver)
    await link.send_export(make_manifest(144, "h2"), gather_from(export))
    await importer.tasks[0]
    assert torch.equal(importer.imported[0], export)


async def test_a_failing_gather_loses_the_link(make_world: MakeWorld):
    world = await make_world()
    importer, sender = Importer(world.receiver), Half()
    link = await world.dialer(sender).link_to(world.peer, LONG_S)

    may_gather = threading.Event()

    def gather(start: int, num_blocks: int, out_B: torch.Tensor) -> None:
        assert may_gather.wait(LONG_S)
        raise ValueError("no blocks")

    sending = asyncio.create_task(link.send_export(make_manifest(20), gather))
    await world.receiver.until(lambda: len(world.receiver.signals) == 1)
    may_gather.set()
    with pytest.raises(ValueError, match="no blocks"):
        await sending
    await world.receiver.until(lambda: len(world.receiver.lost) == 1)
    await sender.until(lambda: len(sender.lost) == 1)
    (result,) = await asyncio.gather(*importer.tasks, return_exceptions=True)
    assert isinstance(result, TransportError)


async def test_a_manifest_of_another_layout_loses_the_link(make_world: MakeWorld):
    world = await make_world()
    sender = Half()
    link = await world.dialer(sender).link_to(world.peer, LONG_S)
    await link.signal(ManifestBytes(payload=replace(make_manifest(20), layout="x=1").pack()))
    await world.receiver.until(lambda: len(world.receiver.signals) == 1)
    other_end, message = world.receiver.signals[0]
    with pytest.raises(HandoffFailed, match="layout"):
        await other_end.recv_import(Manifest.unpack(message.payload), lambda *_: None)
    await sender.until(lambda: len(sender.lost) == 1)


async def test_a_block_bigger_than_the_staging_buffer_is_refused(make_world: MakeWorld):
    world = await make_world()
    link = await world.dialer(limits=TransferLimits(staging_bytes=64 * LAYOUT.block_bytes)).link_to(
        world.peer, LONG_S
    )
    sending = asyncio.create_task(
        link.send_export(make_manifest(16 * 20), gather_from(make_export(20)))
    )
    await world.receiver.until(lambda: len(world.receiver.signals) == 1)
    other_end, message = world.receiver.signals[0]
    with pytest.raises(TransportError, match="does not fit"):
        await other_end.recv_import(Manifest.unpack(message.payload), lambda *_: None)
    with pytest.raises(TransportError):
        await sending


# ---- the end


@pytest.mark.parametrize("who", ["sender", "receiver"])
async def test_either_side_ends_it_for_both_exactly_once(make_world: MakeWorld, who: str):
    world = await make_world(gloo())
    sender = Half()
    dialer = world.dialer(sender)
    link = await dialer.link_to(world.peer, LONG_S)
    await link.signal(Credit(handoff_id="h"))
    await world.receiver.until(lambda: len(world.receiver.signals) == 1)
    other_end = world.receiver.signals[0][0]
    for _ in range(3):
        (link if who == "sender" else other_end).close("enough")
    await world.receiver.until(lambda: bool(world.receiver.lost))
    await sender.until(lambda: bool(sender.lost))
    with pytest.raises(PeerLost):
        await link.signal(Credit(handoff_id="h"))
    with pytest.raises(PeerLost):
        await link.send_export(make_manifest(1), gather_from(make_export(1)))
    again = await dialer.link_to(world.peer, LONG_S)
    assert again.epoch > link.epoch
    await again.signal(Credit(handoff_id="h"))
    await world.receiver.until(lambda: len(world.receiver.signals) == 2)
    assert [lost for lost, _ in sender.lost] == [link]
    assert [lost for lost, _ in world.receiver.lost] == [other_end]
    assert not link.is_open
    assert again.is_open


async def test_other_links_do_not_notice(make_world: MakeWorld):
    world = await make_world(gloo())
    importer, halves = Importer(world.receiver), [Half(), Half()]
    links = [
        await world.dialer(half, worker_id=f"p{n}", incarnation=f"p{n}-1").link_to(
            world.peer, LONG_S
        )
        for n, half in enumerate(halves)
    ]
    links[0].close("enough")
    await world.receiver.until(lambda: len(world.receiver.lost) == 1)
    export = make_export(5)
    await links[1].send_export(make_manifest(80), gather_from(export))
    await halves[1].until(lambda: len(halves[1].signals) == 1)
    assert torch.equal(importer.imported[0], export)
    assert halves[1].lost == []


async def test_a_receiver_that_never_receives_is_found_by_the_timeout(make_world: MakeWorld):
    world = await make_world(gloo())
    sender = Half()
    limits = replace(LIMITS, floor_s=0.2)
    link = await world.dialer(sender, limits=limits).link_to(world.peer, LONG_S)
    with pytest.raises(TransferTimeout):
        await link.send_export(make_manifest(64), gather_from(make_export(4)))
    await sender.until(lambda: len(sender.lost) == 1)
    await world.receiver.until(lambda: len(world.receiver.lost) == 1)


async def test_a_close_in_mid_transfer_frees_the_waiting_caller_at_once(make_world: MakeWorld):
    """The thread stays in the channel until its peer goes; nobody waits for that."""
    world = await make_world(gloo())
    sender = Half()
    link = await world.dialer(sender).link_to(world.peer, LONG_S)
    sending = asyncio.create_task(
        link.send_export(make_manifest(64), gather_from(make_export(4)), timeout_s=3.0)
    )
    await world.receiver.until(lambda: len(world.receiver.signals) == 1)
    link.close("enough")
    async with asyncio.timeout(2):
        with pytest.raises(TransportError):
            await sending


async def test_a_handler_that_fails_loses_the_link_and_not_the_worker(make_world: MakeWorld):
    world = await make_world()
    sender = Half()
    dialer = world.dialer(sender)

    def fail(link: Link, message: object) -> None:
        raise ValueError("bug")

    world.receiver.on_message = fail
    await (await dialer.link_to(world.peer, LONG_S)).signal(Credit(handoff_id="h"))
    await sender.until(lambda: len(sender.lost) == 1)
    assert (await dialer.link_to(world.peer, LONG_S)).is_open


async def test_a_second_dial_of_one_incarnation_replaces_its_first_link(make_world: MakeWorld):
    world = await make_world()
    halves = [Half(), Half()]
    first, second = [await world.dialer(half).link_to(world.peer, LONG_S) for half in halves]
    await halves[0].until(lambda: len(halves[0].lost) == 1)
    assert not first.is_open
    assert second.is_open


async def test_a_stopped_dialer_dials_no_more(make_world: MakeWorld):
    world = await make_world()
    dialer = world.dialer()
    await (await dialer.link_to(world.peer, LONG_S)).signal(Credit(handoff_id="h"))
    await world.receiver.until(lambda: len(world.receiver.signals) == 1)
    await dialer.close()
    await dialer.close()
    with pytest.raises(HandoffFailed, match="stopping"):
        await dialer.link_to(world.peer, LONG_S)
    await world.receiver.until(lambda: len(world.receiver.lost) == 1)


async def test_a_stopped_acceptor_refuses(make_world: MakeWorld):
    world = await make_world()
    sender = Half()
    dialer = world.dialer(sender)
    await dialer.link_to(world.peer, LONG_S)
    await world.acceptor.close()
    await sender.until(lambda: len(sender.lost) == 1)
    with pytest.raises(WorkerLost, match="stopping"):
        await dialer.link_to(world.peer, LONG_S)
