"""One suite that every transport passes: what a link may rely on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from cluster.errors import HandoffFailed
from cluster.transport.base import (
    RECEIVER,
    SENDER,
    ChannelClosed,
    PeerLost,
    TransferTimeout,
    TransportError,
)
from tests.contract.ends import (
    LONG_S,
    Board,
    Pair,
    count_handles,
    gloo,
    loopback,
    make_bytes,
    nccl,
    running,
    shm,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(
    params=[loopback, gloo, shm, pytest.param(nccl, marks=[pytest.mark.gpu, TWO_GPUS])],
    ids=lambda make: make.__name__,
)
def pair(request) -> Iterator[Pair]:
    with running(request.param()) as pair:
        yield pair


@pytest.mark.parametrize(
    "num_bytes", [1, 2, 15, 4096, 65_537, 1 << 20, 11_796_480, 32 << 20], ids=str
)
def test_every_byte_arrives(pair: Pair, num_bytes: int):
    sender, receiver = pair.open()
    sent_B, into_B = make_bytes(num_bytes), torch.zeros(num_bytes, dtype=torch.uint8)
    receiving = pair.start(receiver.recv, into_B, LONG_S)
    sender.send(sent_B, LONG_S)
    receiving.result(LONG_S)
    assert torch.equal(sent_B, into_B)


def test_a_message_that_is_longer_than_asked_for_ends_no_process():
    """Gloo would end it; whoever received looks for the trailer where it should be."""
    with running(gloo()) as pair:
        sender, receiver = pair.open()
        sent_B, buffer_B = make_bytes(70_000), torch.zeros(100_000, dtype=torch.uint8)
        receiving = pair.start(receiver.recv, buffer_B[100:4196], LONG_S)
        sender.send(sent_B, LONG_S)
        receiving.result(LONG_S)
        assert torch.equal(buffer_B[100:70_100], sent_B)
        assert not buffer_B[:100].any()


def test_bf16_bits_arrive_as_they_are(pair: Pair):
    sender, receiver = pair.open()
    kv_ND = torch.randn(64, 32).to(torch.bfloat16)
    kv_ND[0, 0], kv_ND[0, 1] = float("nan"), float("-inf")
    into_ND = torch.zeros_like(kv_ND)
    receiving = pair.start(receiver.recv, into_ND.view(torch.uint8).view(-1), LONG_S)
    sender.send(kv_ND.view(torch.uint8).view(-1), LONG_S)
    receiving.result(LONG_S)
    assert torch.equal(kv_ND.view(torch.int16), into_ND.view(torch.int16))


def test_messages_come_in_the_order_of_sending(pair: Pair):
    sender, receiver = pair.open()
    sizes = [1, 70_000, 3, 1 << 20, 17, 4096] * 4
    into = [torch.zeros(size, dtype=torch.uint8) for size in sizes]

    def receive_all() -> None:
        for into_B in into:
            receiver.recv(into_B, LONG_S)

    receiving = pair.start(receive_all)
    for index, size in enumerate(sizes):
        sender.send(make_bytes(size, seed=index), LONG_S)
    receiving.result(LONG_S)
    for index, into_B in enumerate(into):
        assert torch.equal(into_B, make_bytes(into_B.numel(), seed=index)), index


def test_a_buffer_may_be_reused_when_send_returns(pair: Pair):
    sender, receiver = pair.open()
    num_bytes = 2 << 20
    into = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(8)]

    def receive_all() -> None:
        for into_B in into:
            receiver.recv(into_B, LONG_S)

    receiving = pair.start(receive_all)
    buffer_B = torch.empty(num_bytes, dtype=torch.uint8)
    for index in range(len(into)):
        buffer_B.fill_(index + 1)
        sender.send(buffer_B, LONG_S)
        buffer_B.fill_(255)
    receiving.result(LONG_S)
    for index, into_B in enumerate(into):
        assert bool((into_B == index + 1).all()), index


def test_links_of_one_pair_do_not_mix(pair: Pair):
    old, new = pair.open("p/1"), pair.open("p/2")
    into_old, into_new = (torch.zeros(1000, dtype=torch.uint8) for _ in range(2))
    receiving = [
        pair.start(new[1].recv, into_new, LONG_S),
        pair.start(old[1].recv, into_old, LONG_S),
    ]
    sending = [
        pair.start(old[0].send, torch.full((1000,), 1, dtype=torch.uint8), LONG_S),
        pair.start(new[0].send, torch.full((1000,), 2, dtype=torch.uint8), LONG_S),
    ]
    for job in receiving + sending:
        job.result(LONG_S)
    assert bool((into_old == 1).all())
    assert bool((into_new == 2).all())


def test_a_dead_link_leaves_others_alone(pair: Pair):
    broken, whole = pair.open(), pair.open()
    broken[1].close()
    with pytest.raises(TransportError):
        broken[0].send(make_bytes(8 << 20), LONG_S)
    into_B = torch.zeros(4096, dtype=torch.uint8)
    receiving = pair.start(whole[1].recv, into_B, LONG_S)
    whole[0].send(make_bytes(4096), LONG_S)
    receiving.result(LONG_S)
    assert torch.equal(into_B, make_bytes(4096))


def test_a_receiver_that_leaves_fails_the_sender_at_once(pair: Pair):
    sender, receiver = pair.open()
    sending = pair.start(sender.send, make_bytes(32 << 20), LONG_S)
    receiver.close()
    before = time.monotonic()
    assert isinstance(sending.exception(LONG_S), PeerLost)
    assert time.monotonic() - before < 5


def test_a_sender_that_leaves_fails_the_waiting_receiver_at_once(pair: Pair):
    sender, receiver = pair.open()
    receiving = pair.start(receiver.recv, torch.zeros(1 << 20, dtype=torch.uint8), LONG_S)
    sender.close()
    before = time.monotonic()
    assert isinstance(receiving.exception(LONG_S), PeerLost)
    assert time.monotonic() - before < 5


@pytest.mark.parametrize("rank", [SENDER, RECEIVER])
def test_a_timeout_kills_the_channel_for_ever(pair: Pair, rank: int):
    channel = pair.open()[rank]
    data_B = torch.zeros(8 << 20, dtype=torch.uint8)
    operate = channel.send if rank == SENDER else channel.recv
    with pytest.raises(TransferTimeout):
        operate(data_B, 0.2)
    assert channel.is_dead
    for _ in range(2):
        before = time.monotonic()
        with pytest.raises(ChannelClosed):
            operate(data_B, LONG_S)
        assert time.monotonic() - before < 1


def test_a_timeout_is_noticed_by_the_peer(pair: Pair):
    sender, receiver = pair.open()
    with pytest.raises(TransferTimeout):
        receiver.recv(torch.zeros(8, dtype=torch.uint8), 0.1)
    with pytest.raises(TransportError):
        sender.send(make_bytes(8 << 20), LONG_S)


def test_close_is_idempotent_and_final(pair: Pair):
    sender, receiver = pair.open()
    for channel in (sender, receiver, sender, receiver):
        channel.close()
    with pytest.raises(ChannelClosed):
        sender.send(make_bytes(10), LONG_S)
    with pytest.raises(ChannelClosed):
        receiver.recv(torch.zeros(10, dtype=torch.uint8), LONG_S)


def test_close_from_another_thread_returns_at_once(pair: Pair):
    _, receiver = pair.open()
    receiving = pair.start(receiver.recv, torch.zeros(1 << 20, dtype=torch.uint8), 1.0)
    before = time.monotonic()
    pair.start(receiver.close).result(LONG_S)
    assert time.monotonic() - before < 0.5
    assert isinstance(receiving.exception(LONG_S), TransportError)
    assert receiver.is_dead


@pytest.mark.parametrize("rank", [SENDER, RECEIVER])
def test_an_absent_peer_is_an_error_after_the_timeout(pair: Pair, rank: int):
    before = time.monotonic()
    with pytest.raises(HandoffFailed):
        pair.open_one("p/lonely", rank, Board(), 0.3)
    assert 0.2 < time.monotonic() - before < 5


@pytest.mark.parametrize("rank", [SENDER, RECEIVER])
def test_a_link_has_one_direction(pair: Pair, rank: int):
    channel = pair.open()[rank]
    against = channel.recv if rank == SENDER else channel.send
    with pytest.raises(TransportError, match="cannot"):
        against(torch.zeros(8, dtype=torch.uint8), LONG_S)


def test_links_that_were_closed_leave_nothing_behind(pair: Pair):
    def cycle() -> None:
        sender, receiver = pair.open()
        into_B = torch.zeros(100, dtype=torch.uint8)
        receiving = pair.start(receiver.recv, into_B, LONG_S)
        sender.send(make_bytes(100), LONG_S)
        receiving.result(LONG_S)
        sender.close()
        receiver.close()

    for _ in range(8):  # until the pool has all of its threads
        cycle()
    before = count_handles()
    for _ in range(20):
        cycle()
    assert count_handles() <= before


def test_a_new_epoch_works_after_the_old_one_died(pair: Pair):
    """P-23: nothing of a dead link stands in the way of the next one."""
    _, receiver = pair.open("p/1")
    with pytest.raises(TransferTimeout):
        receiver.recv(torch.zeros(1000, dtype=torch.uint8), 0.1)
    for epoch in (2, 3):
        sender, receiver = pair.open(f"p/{epoch}")
        into_B = torch.zeros(1000, dtype=torch.uint8)
        receiving = pair.start(receiver.recv, into_B, LONG_S)
        sender.send(make_bytes(1000, seed=epoch), LONG_S)
        receiving.result(LONG_S)
        assert torch.equal(into_B, make_bytes(1000, seed=epoch))
        sender.close()


@pytest.mark.parametrize("pair", [loopback, shm], indirect=True, ids=lambda make: make.__name__)
@pytest.mark.parametrize("num_bytes", [1, 999, 1001, 2 << 20])
def test_a_message_of_another_size_is_noticed(pair: Pair, num_bytes: int):
    """S-13. gloo cannot: there the trailer of the staging buffer does, before anything is used."""
    sender, receiver = pair.open()
    pair.start(sender.send, make_bytes(num_bytes), LONG_S)
    with pytest.raises(TransportError, match=f"{num_bytes} bytes where 1000 were expected"):
        receiver.recv(torch.zeros(1000, dtype=torch.uint8), LONG_S)
    assert receiver.is_dead


def test_a_sender_may_leave_when_all_is_sent(pair: Pair):
    sender, receiver = pair.open()
    into_B = torch.zeros(3 << 20, dtype=torch.uint8)
    receiving = pair.start(receiver.recv, into_B, LONG_S)
    sender.send(make_bytes(3 << 20), LONG_S)
    sender.close()
    receiving.result(LONG_S)
    assert torch.equal(into_B, make_bytes(3 << 20))
