"""Links whose transfers must not overlap: two senders and two receivers that share GPUs."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from cluster.handoff import Commit
from cluster.transport.base import PeerLost, TransferTimeout, TransportError
from cluster.transport.loopback import LoopbackTransport
from cluster.transport.transfer_lock import TransferLock
from tests.factories_link import (
    LIMITS,
    LONG_S,
    Half,
    Importer,
    MakeWorld,
    gather_from,
    make_export,
    make_manifest,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.transport.base import Channel, Transport


class LockedTransport(LoopbackTransport):
    """Loopback that behaves like a GPU: whoever overlaps on it has lost."""

    def __init__(self, hub: LoopbackTransport) -> None:
        super().__init__()
        self.hub = hub
        self.lock = TransferLock()
        self.overlaps = 0
        self.num_at_once = 0
        self.counting = threading.Lock()

    def open(self, **arguments) -> Channel:
        channel = self.hub.open(**arguments)
        channel.transfer_lock = self.lock
        channel._send = self.counted(channel._send)
        channel._recv = self.counted(channel._recv)
        return channel

    def counted(self, operate: Callable[..., None]) -> Callable[..., None]:
        def run(data_B: torch.Tensor, timeout_s: float) -> None:
            with self.counting:
                self.num_at_once += 1
                self.overlaps += self.num_at_once > 1
            operate(data_B, timeout_s)
            with self.counting:
                self.num_at_once -= 1

        return run


def make_gpus(count: int) -> list[Transport]:
    hub = LoopbackTransport()
    return [LockedTransport(hub) for _ in range(count)]


async def test_transfers_of_two_senders_to_two_receivers_all_arrive_and_never_overlap(
    make_world: MakeWorld,
):
    gpus = make_gpus(4)
    worlds = [await make_world((gpus[0], gpu)) for gpu in gpus[2:]]
    importers = [Importer(world.receiver) for world in worlds]
    halves, sendings = [], []
    for index, gpu in enumerate(gpus[:2]):
        half = Half()
        halves.append(half)
        for world in worlds:
            name = f"p{index}"
            dialer = world.dialer(half, worker_id=name, incarnation=name, transport=gpu)
            link = await dialer.link_to(world.peer, LONG_S)
            sendings += [
                link.send_export(make_manifest(20, f"{name}-{i}"), gather_from(make_export(2)))
                for i in range(10)
            ]
    await asyncio.wait_for(asyncio.gather(*sendings), LONG_S)
    for half in halves:
        await half.until(lambda half=half: len(half.messages) == 20)
        assert all(isinstance(message, Commit) for message in half.messages)
    for importer in importers:
        assert len(importer.imported) == 20
        assert all(torch.equal(blocks, make_export(2)) for blocks in importer.imported)
    assert [gpu.overlaps for gpu in gpus] == [0] * 4
    await asyncio.gather(*(task for importer in importers for task in importer.tasks))
    await until_free(gpus)


async def test_a_link_that_is_lost_while_it_waits_frees_both_gpus(make_world: MakeWorld):
    gpus = make_gpus(2)
    world, half = await make_world((gpus[0], gpus[1])), Half()
    link = await world.dialer(half).link_to(world.peer, LONG_S)
    assert gpus[1].lock.try_take("another transfer")
    sending = asyncio.create_task(link.send_export(make_manifest(20), gather_from(make_export(2))))
    Importer(world.receiver)
    await world.receiver.until(lambda: len(world.receiver.messages) == 1)
    assert not sending.done()
    link.close("on purpose")
    with pytest.raises(PeerLost):
        await sending
    gpus[1].lock.give_back("another transfer")
    await until_free(gpus)


async def test_a_turn_that_does_not_come_loses_the_link(make_world: MakeWorld):
    gpus = make_gpus(2)
    world, half = await make_world((gpus[0], gpus[1])), Half()
    dialer = world.dialer(half, limits=replace(LIMITS, turn_s=0.1))
    link = await dialer.link_to(world.peer, LONG_S)
    assert gpus[0].lock.try_take("another transfer")
    with pytest.raises(TransferTimeout, match="not free in time"):
        await link.send_export(make_manifest(20), gather_from(make_export(2)))
    await half.until(lambda: len(half.lost) == 1)
    gpus[0].lock.give_back("another transfer")
    await until_free(gpus)


async def test_a_failed_transfer_frees_both_gpus(make_world: MakeWorld):
    gpus = make_gpus(2)
    world, half = await make_world((gpus[0], gpus[1])), Half()
    importer = Importer(world.receiver)
    link = await world.dialer(half).link_to(world.peer, LONG_S)

    def gather(start: int, num_blocks: int, out_B: torch.Tensor) -> None:
        raise TransportError("the blocks were given back", stage="transfer")

    with pytest.raises(TransportError, match="given back"):
        await link.send_export(make_manifest(20), gather)
    await half.until(lambda: len(half.lost) == 1)
    await world.receiver.until(lambda: len(world.receiver.lost) == 1)
    await asyncio.gather(*importer.tasks, return_exceptions=True)
    await until_free(gpus)


async def until_free(gpus: list[Transport]) -> None:
    """Wait until the last words of links' threads have come to the event loop."""
    async with asyncio.timeout(LONG_S):
        while any(gpu.lock.is_taken for gpu in gpus):
            await asyncio.to_thread(lambda: None)
