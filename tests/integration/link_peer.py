"""One end of a link in a process of its own: ``receive``, ``send ADDRESS`` or ``leave ADDRESS``.

Says on stdout, a line each, what it did; reads on stdin what the test lets it do.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from typing import TYPE_CHECKING

import grpc
import torch

from cluster.handoff import Commit, ManifestBytes
from cluster.kv.layout import KVLayout
from cluster.request import LegKey, Peer
from cluster.rpc.link_acceptor import LinkAcceptor
from cluster.rpc.link_dialer import LinkDialer
from cluster.rpc.options import SERVER_OPTIONS
from cluster.transport.manifest import Manifest
from cluster.transport.staging import TransferLimits
from cluster.transport.torch_dist import TorchDistTransport
from cluster.wire import worker_pb2_grpc

if TYPE_CHECKING:
    from cluster.handoff import LinkSignal
    from cluster.rpc.link import Link

LAYOUT = KVLayout(
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    block_size=16,
    dtype="bf16",
    model_fingerprint="trial",
)
KEY = LegKey("r", 0, 0)


def make_export(num_blocks: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, LAYOUT.block_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def digest(blocks: torch.Tensor) -> str:
    return hashlib.sha256(blocks.numpy().tobytes()).hexdigest()


def make_manifest(num_blocks: int, handoff_id: str) -> Manifest:
    return Manifest.of(handoff_id, KEY, LAYOUT, num_tokens=16 * num_blocks, output_ids=(7,))


class Servicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, acceptor: LinkAcceptor) -> None:
        self.acceptor = acceptor

    async def Link(self, request_iterator, context) -> None:
        await self.acceptor.serve(request_iterator, context)


async def listen(half, limits: TransferLimits) -> tuple[grpc.aio.Server, Peer]:
    """Serve links to ``half`` on a free loopback port."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    peer = Peer(worker_id="d", incarnation="d-1", address=address)
    acceptor = LinkAcceptor(
        me=peer, layout=LAYOUT, transport=TorchDistTransport(), events=half, limits=limits
    )
    worker_pb2_grpc.add_WorkerServicer_to_server(Servicer(acceptor), server)
    await server.start()
    return server, peer


def make_dialer(half, limits: TransferLimits) -> LinkDialer:
    me = Peer(worker_id="p", incarnation="p-1", address="")
    return LinkDialer(
        me=me, layout=LAYOUT, transport=TorchDistTransport(), events=half, limits=limits
    )


class Receiver:
    """Imports all that comes; after a handoff named ``stuck`` it takes no second piece."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task] = set()

    def on_signal(self, link: Link, message: LinkSignal) -> None:
        if isinstance(message, ManifestBytes):
            task = asyncio.create_task(self.receive(link, Manifest.unpack(message.payload)))
            self.tasks.add(task)

    def on_link_lost(self, link: Link, reason: str) -> None:
        say(f"lost {reason}")

    async def receive(self, link: Link, manifest: Manifest) -> None:
        blocks = torch.zeros(manifest.num_blocks, manifest.block_bytes, dtype=torch.uint8)

        def scatter(start: int, num_blocks: int, staged_B: torch.Tensor) -> None:
            blocks[start : start + num_blocks].view(-1).copy_(staged_B)
            if manifest.handoff_id == "stuck":
                say("stuck")
                sys.stdin.readline()

        await link.recv_import(manifest, scatter)
        say(f"imported {manifest.handoff_id} {digest(blocks)}")
        link.signal(Commit(handoff_id=manifest.handoff_id))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def receive() -> None:
    server, peer = await listen(Receiver(), TransferLimits())
    say(peer.address)
    await server.wait_for_termination()


class Sender:
    def on_signal(self, link: Link, message: LinkSignal) -> None:
        say(f"heard {message}")

    def on_link_lost(self, link: Link, reason: str) -> None:
        say(f"lost {reason}")


async def send(address: str) -> None:
    """Send an export of two pieces, and get stuck before the second."""
    limits = TransferLimits(staging_bytes=32 * LAYOUT.block_bytes)
    peer = Peer(worker_id="d", incarnation="d-1", address=address)
    link = await make_dialer(Sender(), limits).link_to(peer, 20)

    def gather(start: int, num_blocks: int, out_B: torch.Tensor) -> None:
        if start > 0:
            say("stuck")
            sys.stdin.readline()

    await link.send_export(make_manifest(64, "h"), gather)


async def leave(address: str) -> None:
    """Close a link whose thread is blocked in a transfer that nobody receives."""
    dialer = make_dialer(Sender(), TransferLimits(floor_s=300))
    link = await dialer.link_to(Peer(worker_id="d", incarnation="d-1", address=address), 20)
    export = make_export(40, seed=1)

    def gather(start: int, num_blocks: int, out_B: torch.Tensor) -> None:
        out_B.copy_(export[start : start + num_blocks].view(-1))

    sending = asyncio.create_task(link.send_export(make_manifest(40, "h"), gather))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    link.close("leaving")
    (error,) = await asyncio.gather(sending, return_exceptions=True)
    say(f"failed {type(error).__name__}")
    await dialer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    roles = {"receive": receive, "send": send, "leave": leave}
    asyncio.run(roles[sys.argv[1]](*sys.argv[2:]))
