"""Links over a real gRPC stream: opening, refusing, signals, and one fate for both parts."""

from __future__ import annotations

import asyncio
import errno
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest
import torch

from cluster.errors import HandoffFailed, WorkerLost
from cluster.handoff import AbortCause, AbortHandoff, Commit, Credit, Offer
from cluster.rpc import link as link_module
from cluster.transport.base import Channel, PeerLost, TransferTimeout, TransportError
from cluster.transport.loopback import LoopbackTransport
from cluster.wire import worker_pb2 as pb
from cluster.wire import worker_pb2_grpc
from tests.factories_link import (
    KEY,
    LAYOUT,
    LIMITS,
    LONG_S,
    Half,
    Importer,
    MakeWorld,
    gather_from,
    gloo,
    make_export,
    make_manifest,
)

if TYPE_CHECKING:
    from cluster.rpc.link import Link


async def test_signals_go_both_ways_in_order(make_world: MakeWorld):
    world = await make_world()
    sender = Half()
    link = await world.dialer(sender).link_to(world.peer, LONG_S)
    sent = [
        Offer(handoff_id=f"h{index}", key=KEY, num_blocks=2, num_tokens=20) for index in range(50)
    ]
    sent.append(AbortHandoff(handoff_id="h3", cause=AbortCause.CANCELLED, detail="left"))
    for message in sent:
        link.signal(message)
    await world.receiver.until(lambda: len(world.receiver.signals) == len(sent))
    assert world.receiver.messages == sent
    other_end = world.receiver.signals[0][0]
    assert other_end.epoch == link.epoch
    assert (other_end.peer.worker_id, link.peer.worker_id) == ("p", "d")
    for message in (Credit(handoff_id="h0"), Commit(handoff_id="h0")):
        other_end.signal(message)
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
    dialer = world.dialer(layout=replace(LAYOUT, num_layers=3))
    with pytest.raises(HandoffFailed, match="num_layers: 2 here, 3 there"):
        await dialer.link_to(world.peer, LONG_S)


async def test_another_incarnation_is_a_lost_worker(make_world: MakeWorld):
    """P-23: a worker that restarted at the same address is not the one that was meant."""
    world = await make_world()
    with pytest.raises(WorkerLost, match="d-1 is here"):
        await world.dialer().link_to(replace(world.peer, incarnation="d-0"), LONG_S)
    assert world.acceptor.num_refused == 1
    await world.dialer().link_to(world.peer, LONG_S)
    assert world.acceptor.num_refused == 1


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


class FullTransport(LoopbackTransport):
    def open(self, **arguments):
        raise OSError(errno.EMFILE, "Too many open files")


async def test_a_channel_that_finds_no_descriptor_fails_the_dial_and_no_more(
    make_world: MakeWorld,
):
    """Anything but an error of ours would be the worker's own fault, and end it."""
    world = await make_world(transports=(FullTransport(), FullTransport()))
    with pytest.raises(TransportError, match="did not open: OSError"):
        await world.dialer().link_to(world.peer, LONG_S)


async def test_a_channel_without_room_for_its_staging_buffer_is_closed(
    make_world: MakeWorld, monkeypatch
):
    world = await make_world()
    opened, real_open = [], LoopbackTransport.open

    def remembering_open(self, **arguments):
        opened.append(real_open(self, **arguments))
        return opened[-1]

    def no_room(*arguments):
        raise MemoryError

    monkeypatch.setattr(LoopbackTransport, "open", remembering_open)
    monkeypatch.setattr(link_module, "StagedChannel", no_room)
    with pytest.raises(TransportError, match="did not open: MemoryError"):
        await world.dialer().link_to(world.peer, LONG_S)
    await world.acceptor.close()  # its end fails alike, on a thread of its own
    assert opened
    assert all(channel.is_dead for channel in opened)


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


@pytest.mark.parametrize("who", ["sender", "receiver"])
async def test_either_side_ends_it_for_both_exactly_once(make_world: MakeWorld, who: str):
    world = await make_world(gloo())
    sender = Half()
    dialer = world.dialer(sender)
    link = await dialer.link_to(world.peer, LONG_S)
    link.signal(Credit(handoff_id="h"))
    await world.receiver.until(lambda: len(world.receiver.signals) == 1)
    other_end = world.receiver.signals[0][0]
    for _ in range(3):
        (link if who == "sender" else other_end).close("enough")
    await world.receiver.until(lambda: bool(world.receiver.lost))
    await sender.until(lambda: bool(sender.lost))
    with pytest.raises(PeerLost):
        link.signal(Credit(handoff_id="h"))
    with pytest.raises(PeerLost):
        await link.send_export(make_manifest(1), gather_from(make_export(1)))
    again = await dialer.link_to(world.peer, LONG_S)
    assert again.epoch > link.epoch
    again.signal(Credit(handoff_id="h"))
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


class SilentChannel(Channel):
    """Its bytes never move, whatever becomes of its peer."""

    def __init__(self) -> None:
        super().__init__()
        self._is_condemned = threading.Event()

    def _send(self, data_B: torch.Tensor, timeout_s: float) -> None:
        self._is_condemned.wait(timeout_s)
        raise PeerLost("no byte moved", stage="transfer")

    _recv = _send

    def _interrupt(self) -> None:
        self._is_condemned.set()

    def _release(self) -> None: ...


class SilentTransport(LoopbackTransport):
    def open(self, **arguments):
        return SilentChannel()


async def test_a_close_in_mid_transfer_frees_the_thread_where_that_can_be_done(
    make_world: MakeWorld,
):
    """What it holds, as a GPU's transfer lock, is not kept until the transfer's deadline."""
    world = await make_world(transports=(SilentTransport(), SilentTransport()))
    link = await world.dialer(Half()).link_to(world.peer, LONG_S)
    sending = asyncio.create_task(
        link.send_export(make_manifest(64), gather_from(make_export(4)), timeout_s=LONG_S)
    )
    await world.receiver.until(lambda: len(world.receiver.signals) == 1)
    link.close("enough")
    async with asyncio.timeout(LONG_S / 2):
        await asyncio.wait([link.ended])
        with pytest.raises(TransportError):
            await sending


async def test_a_handler_that_fails_loses_the_link_and_not_the_worker(make_world: MakeWorld):
    world = await make_world()
    sender = Half()
    dialer = world.dialer(sender)

    def fail(link: Link, message: object) -> None:
        raise ValueError("bug")

    world.receiver.on_message = fail
    (await dialer.link_to(world.peer, LONG_S)).signal(Credit(handoff_id="h"))
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
    (await dialer.link_to(world.peer, LONG_S)).signal(Credit(handoff_id="h"))
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
