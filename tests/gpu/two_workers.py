"""Two workers of one process, each with its own KV cache, pool and end of a link.

What moves bytes is the product's own: ``Link`` with its thread, its manifests and its turns,
``StagedChannel``, and ``Landing`` in the receiver's pool. Only the stream of signals is no gRPC
call: it is a queue in each direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cluster.handoff import Commit, Credit, Handoff, HandoffState, ManifestBytes, Offer
from cluster.kv.cache import PagedCache
from cluster.request import LegKey, Peer
from cluster.rpc.link import Link
from cluster.rpc.link_settings import LinkSettings
from cluster.transport.base import RECEIVER, SENDER
from cluster.transport.manifest import Manifest
from cluster.transport.staging import TransferLimits
from decode_worker.landing import Landing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from torch import Tensor

    from cluster.handoff import LinkSignal
    from cluster.kv.block_pool import BlockPool
    from cluster.transport.base import Transport
    from cluster.wire import worker_pb2 as pb

_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What one worker has and the other shall get."""

    cache: PagedCache
    block_ids: list[int]
    num_tokens: int


class SendingHalf:
    """Offers, sends when there is credit, and waits for the commit."""

    def __init__(self, export: Export) -> None:
        self.export = export
        self._answers: asyncio.Queue[LinkSignal | str] = asyncio.Queue()

    async def send(self, link: Link, handoff_id: str, key: LegKey) -> None:
        """Hand the export over."""
        export = self.export
        manifest = Manifest.of(
            handoff_id, key, export.cache.layout, num_tokens=export.num_tokens, output_ids=(1,)
        )
        link.signal(
            Offer(
                handoff_id=handoff_id,
                key=key,
                num_blocks=manifest.num_blocks,
                num_tokens=export.num_tokens,
            )
        )
        await self._expect(Credit(handoff_id=handoff_id))

        def gather(start: int, num_blocks: int, out_B: Tensor) -> None:
            export.cache.export_blocks(export.block_ids[start : start + num_blocks], out_B)

        await link.send_export(manifest, gather)
        await self._expect(Commit(handoff_id=handoff_id))

    async def _expect(self, expected: LinkSignal) -> None:
        answer = await asyncio.wait_for(self._answers.get(), _PATIENCE_S)
        assert answer == expected, f"{answer} came, not {expected}"

    def on_signal(self, link: Link, message: LinkSignal) -> None:
        """Take the peer's answer."""
        self._answers.put_nowait(message)

    def on_link_lost(self, link: Link, reason: str) -> None:
        """End whoever waits."""
        self._answers.put_nowait(reason)


class ReceivingHalf:
    """Reserves for what is offered, and commits when every byte has landed."""

    def __init__(self, cache: PagedCache, pool: BlockPool, room_tokens: int) -> None:
        """``room_tokens``: reserved for each sequence beyond what comes."""
        self.cache = cache
        self.pool = pool
        self._room_tokens = room_tokens
        self._landings: dict[str, Landing] = {}
        self._receiving: set[asyncio.Task[None]] = set()

    def on_signal(self, link: Link, message: LinkSignal) -> None:
        """Do what a decode worker does."""
        if isinstance(message, Offer):
            self._reserve(message)
            link.signal(Credit(handoff_id=message.handoff_id))
        elif isinstance(message, ManifestBytes):
            manifest = Manifest.unpack(message.payload)
            task = asyncio.create_task(self._receive(link, manifest))
            self._receiving.add(task)
            task.add_done_callback(self._receiving.discard)

    def on_link_lost(self, link: Link, reason: str) -> None:
        """Nothing is left to do: the sender's half tells of it."""

    def _reserve(self, offer: Offer) -> None:
        layout = self.cache.layout
        num_blocks = layout.num_blocks_for(offer.num_tokens)
        room = layout.num_blocks_for(offer.num_tokens + self._room_tokens)
        assert self.pool.reserve(room, offer.handoff_id, offer.key), "the pool is full"
        handoff = Handoff(offer.handoff_id, offer.key, num_blocks)
        handoff.advance(HandoffState.RESERVED)
        self._landings[offer.handoff_id] = Landing(handoff, self.pool, self.cache, layout)

    async def _receive(self, link: Link, manifest: Manifest) -> None:
        landing = self._landings[manifest.handoff_id]
        landing.announce(manifest)

        def scatter(start: int, num_blocks: int, staged_B: Tensor) -> None:
            landing.write(manifest, start, num_blocks, staged_B)

        try:
            await link.recv_import(manifest, scatter)
        except Exception as error:
            link.close(f"not received: {type(error).__name__}: {error}")
            return
        if landing.landed(manifest) is not None:
            landing.commit()
            link.signal(Commit(handoff_id=manifest.handoff_id))


async def hand_over(
    transports: tuple[Transport, Transport],
    export: Export,
    receiver: ReceivingHalf,
    num_times: int = 2,
) -> tuple[float, list[int]]:
    """Hand an export over so many times by one link; only the last one keeps its blocks.

    Returns the seconds of the last time, and the receiver's blocks.
    """
    key, pool, device = LegKey("r", 0, 0), receiver.pool, receiver.cache.device
    sender = SendingHalf(export)
    async with _linked(transports, sender, receiver) as link:
        for number in range(num_times):
            pool.release(key)
            began = time.perf_counter()
            await sender.send(link, f"h-{number}", key)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - began
    pool.check()
    return seconds, list(pool.blocks_of(key))


@contextlib.asynccontextmanager
async def _linked(
    transports: tuple[Transport, Transport], sender: SendingHalf, receiver: ReceivingHalf
) -> AsyncIterator[Link]:
    """Open a link between the two for the time of a ``with``; yields the sender's end."""
    there: asyncio.Queue[pb.LinkMessage] = asyncio.Queue()
    back: asyncio.Queue[pb.LinkMessage] = asyncio.Queue()
    caches = (sender.export.cache, receiver.cache)
    num_bytes = max(16 << 20, *(cache.layout.block_bytes for cache in caches))
    limits = TransferLimits(staging_bytes=num_bytes, has_digest=True)
    ends = [
        Link(
            peer=Peer(worker_id=name, incarnation=f"{name}-1", address=""),
            link_id="p>d/1",
            epoch=1,
            settings=LinkSettings.of(cache.layout, transport, limits, _PATIENCE_S),
        )
        for name, cache, transport in zip("dp", caches, transports, strict=True)
    ]
    runs = [
        asyncio.create_task(ends[0].run(_stream(back), there.put, sender)),
        asyncio.create_task(ends[1].run(_stream(there), back.put, receiver)),
    ]
    try:
        await asyncio.gather(ends[0].open_channel(SENDER), ends[1].open_channel(RECEIVER))
        yield ends[0]
    finally:
        for link in ends:
            link.close("the check is over")
        await asyncio.gather(*runs)
        await asyncio.wait([link.ended for link in ends], timeout=_PATIENCE_S)


async def _stream(messages: asyncio.Queue[pb.LinkMessage]) -> AsyncIterator[pb.LinkMessage]:
    while True:
        yield await messages.get()
