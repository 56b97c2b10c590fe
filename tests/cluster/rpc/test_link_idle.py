"""Links that nobody uses are closed by their sender, and dialled anew when they are needed."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cluster.config import TransportKind
from cluster.handoff import AbortCause, AbortHandoff, Commit, Offer
from cluster.transport.auto import AutoTransport
from tests.factories_link import (
    KEY,
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
    from cluster.rpc.link import Link

SHORT = replace(LIMITS, idle_s=0.05)


def make_offer(handoff_id: str) -> Offer:
    return Offer(handoff_id=handoff_id, key=KEY, num_blocks=2, num_tokens=20)


async def hand_over(link: Link, half: Half, handoff_id: str) -> None:
    """One handoff from its offer to its commit."""
    num_before = len(half.messages)
    link.signal(make_offer(handoff_id))
    await link.send_export(make_manifest(20, handoff_id), gather_from(make_export(2)))
    await half.until(lambda: len(half.messages) > num_before)
    assert half.messages[-1] == Commit(handoff_id=handoff_id)


async def test_an_idle_link_is_closed_and_the_next_handoff_gets_a_new_one(make_world: MakeWorld):
    world, half = await make_world(), Half()
    importer = Importer(world.receiver)
    dialer = world.dialer(half, limits=SHORT)
    link = await dialer.link_to(world.peer, LONG_S)
    await hand_over(link, half, "h1")
    await half.until(lambda: half.lost == [(link, "idle")])
    await world.receiver.until(lambda: len(world.receiver.lost) == 1)
    assert dialer.states == world.acceptor.states == ()
    again = await dialer.link_to(world.peer, LONG_S)
    assert again.epoch > link.epoch
    await hand_over(again, half, "h2")
    assert len(importer.imported) == 2


async def test_a_link_with_a_handoff_under_way_is_not_idle(make_world: MakeWorld):
    world, half = await make_world(), Half()
    dialer = world.dialer(half, limits=SHORT)
    link = await dialer.link_to(world.peer, LONG_S)
    for handoff_id in ("h1", "h2"):
        link.signal(make_offer(handoff_id))
    await world.receiver.until(lambda: len(world.receiver.messages) == 2)
    other_end = world.receiver.signals[0][0]
    other_end.signal(AbortHandoff(handoff_id="h1", cause=AbortCause.REFUSED))
    await half.until(lambda: len(half.messages) == 1)
    # It has been left alone for long, and would be closed at the next look.
    link._used_at -= 1000
    assert link.idle_s == 0.0
    dialer._close_when_idle(link)
    assert link.is_open
    link.signal(AbortHandoff(handoff_id="h2", cause=AbortCause.CANCELLED))
    await half.until(lambda: half.lost == [(link, "idle")])


async def test_a_link_that_was_just_given_out_is_not_closed_before_its_offer(
    make_world: MakeWorld,
):
    world, half = await make_world(), Half()
    dialer = world.dialer(half)
    link = await dialer.link_to(world.peer, LONG_S)
    link._used_at -= 1000
    assert link.idle_s > LIMITS.idle_s
    assert await dialer.link_to(world.peer, LONG_S) is link
    dialer._close_when_idle(link)
    assert link.is_open
    link.signal(make_offer("h1"))
    await world.receiver.until(lambda: len(world.receiver.messages) == 1)


async def test_handoffs_that_begin_while_links_go_idle_all_arrive(make_world: MakeWorld):
    """Offers meet links that are open, about to be closed, and closed: none is lost."""
    world, half = await make_world(), Half()
    importer = Importer(world.receiver)
    dialer = world.dialer(half, limits=replace(LIMITS, idle_s=0.01))
    epochs = set()
    for index in range(30):
        link = await dialer.link_to(world.peer, LONG_S)
        epochs.add(link.epoch)
        await hand_over(link, half, f"h{index}")
        if index % 3 == 2:
            await half.until(lambda link=link: not link.is_open)
        elif index % 3 == 1:
            await asyncio.to_thread(lambda: None)  # a moment, on one side of the limit or another
    assert len(importer.imported) == 30
    assert len(epochs) >= 10


async def test_a_dialer_that_closes_forgets_its_looks(make_world: MakeWorld):
    world = await make_world()
    dialer = world.dialer()
    await dialer.link_to(world.peer, LONG_S)
    assert len(dialer._looks) == 1
    await dialer.close()
    assert not dialer._looks


async def test_an_open_link_says_what_moves_its_bytes(make_world: MakeWorld):
    world, half = await make_world((AutoTransport(), AutoTransport())), Half()
    importer = Importer(world.receiver)
    dialer = world.dialer(half)
    link = await dialer.link_to(world.peer, LONG_S)
    await hand_over(link, half, "h1")
    assert torch.equal(importer.imported[0], make_export(2))
    [ours], [theirs] = dialer.states, world.acceptor.states
    assert (ours.peer_worker_id, theirs.peer_worker_id) == ("d", "p")
    assert ours.epoch == theirs.epoch == link.epoch
    assert ours.transport is theirs.transport is TransportKind.SHM


async def test_what_was_announced_is_moving_to_its_end_whatever_became_of_its_handoff(
    make_world: MakeWorld,
):
    world, half, go = await make_world(), Half(), threading.Event()
    dialer, importer = world.dialer(half), Importer(world.receiver)
    link = await dialer.link_to(world.peer, LONG_S)
    assert not dialer.is_moving

    def gather(start: int, num_blocks: int, out_B: torch.Tensor) -> None:
        assert go.wait(LONG_S)

    link.signal(make_offer("h1"))
    sending = asyncio.create_task(link.send_export(make_manifest(20, "h1"), gather))
    await world.receiver.until(lambda: len(importer.imported) == 1)
    link.signal(AbortHandoff(handoff_id="h1", cause=AbortCause.CANCELLED))
    await world.receiver.until(lambda: len(world.receiver.messages) == 3)
    assert dialer.is_moving
    assert world.acceptor.is_moving
    go.set()
    await sending
    await half.until(lambda: len(half.messages) == 1)
    assert not dialer.is_moving
    assert not world.acceptor.is_moving
