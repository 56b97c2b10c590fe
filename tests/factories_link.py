"""Worlds for link tests: a decode worker's acceptor behind a real gRPC server, and its dialers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cluster.handoff import Commit, ManifestBytes
from cluster.kv.layout import KVLayout
from cluster.request import LegKey, Peer
from cluster.rpc.link_acceptor import LinkAcceptor
from cluster.rpc.link_dialer import LinkDialer
from cluster.transport.base import Transport
from cluster.transport.loopback import LoopbackTransport
from cluster.transport.manifest import Manifest
from cluster.transport.shm import ShmTransport
from cluster.transport.staging import TransferLimits
from cluster.transport.torch_dist import TorchDistTransport
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


def shm() -> tuple[Transport, Transport]:
    return ShmTransport(), ShmTransport()


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
        link.signal(Commit(handoff_id=manifest.handoff_id))
