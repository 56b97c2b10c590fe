"""Bytes over a link: exports arrive whole, in order, and fail as one with the link."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
import torch

from cluster.errors import HandoffFailed
from cluster.handoff import Commit, ManifestBytes
from cluster.transport.base import CorruptPayload, TransportError
from cluster.transport.manifest import Manifest
from cluster.transport.staging import TransferLimits
from tests.factories import make_key
from tests.factories_link import (
    LAYOUT,
    LIMITS,
    LONG_S,
    Half,
    Importer,
    MakeWorld,
    gather_from,
    gloo,
    loopback,
    make_export,
    make_manifest,
    shm,
)


@pytest.mark.parametrize("make_transports", [loopback, gloo, shm], ids=lambda make: make.__name__)
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


async def test_the_tokens_alone_move_no_bytes_and_keep_their_turn(make_world: MakeWorld):
    world = await make_world(shm())
    importer, sender = Importer(world.receiver), Half()
    link = await world.dialer(sender).link_to(world.peer, LONG_S)
    export = make_export(4)

    def never(start: int, num_blocks: int, out_B: torch.Tensor) -> None:
        raise AssertionError("there is nothing to gather")

    tokens = Manifest.of(
        "h1", make_key(), LAYOUT, num_tokens=64, output_ids=(7,), blocks=range(4, 4),
        layers=range(0),
    )  # fmt: skip
    await link.send_export(make_manifest(64, "h0"), gather_from(export))
    await link.send_export(tokens, never)
    await link.send_export(make_manifest(64, "h2"), gather_from(export))
    await sender.until(lambda: len(sender.signals) == 3)
    assert torch.equal(importer.imported[-1], export)


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
    link.signal(ManifestBytes(payload=replace(make_manifest(20), layout="x=1").pack()))
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


async def test_a_corrupted_payload_is_its_handoffs_failure_and_not_the_links(
    make_world: MakeWorld,
):
    """S-13: with the digest on, changed bytes are never committed; the link goes on."""
    digested = replace(LIMITS, has_digest=True)
    world = await make_world(limits=digested)
    importer, sender = Importer(world.receiver), Half()
    link = await world.dialer(sender, limits=digested).link_to(world.peer, LONG_S)
    channel = link._staged.channel
    send, num_spoiled = channel._send, 0

    def spoil(data_B: torch.Tensor, timeout_s: float) -> None:
        nonlocal num_spoiled
        if num_spoiled == 0:
            data_B[5] ^= 1
            num_spoiled += 1
        send(data_B, timeout_s)

    channel._send = spoil
    export = make_export(9)
    await link.send_export(make_manifest(144, "h1"), gather_from(export))
    await link.send_export(make_manifest(144, "h2"), gather_from(export))
    await sender.until(lambda: sender.messages == [Commit(handoff_id="h2")])
    assert num_spoiled == 1
    corrupted = importer.tasks[0].exception()
    assert isinstance(corrupted, CorruptPayload)
    assert corrupted.is_retryable
    assert torch.equal(importer.imported[1], export)
    assert link.is_open
