"""The fence of shared memory: no epoch uses the memory of another."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from cluster.transport.base import PeerLost, TransferTimeout, Transport
from cluster.transport.shm import ShmTransport
from tests.contract.ends import LONG_S, Pair, make_bytes, running, shm


class OneRingTransport(ShmTransport):
    """What must not be: the same memory for all links."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = super().make_memory()

    def make_memory(self) -> int:
        return os.dup(self.memory)


def one_ring() -> tuple[Transport, Transport]:
    return ShmTransport(), OneRingTransport()


def carry_over_a_late_write(pair: Pair) -> torch.Tensor:
    """Return what a new link delivers of zeros while a sender of the old epoch writes late."""
    sender, receiver = pair.open("p/1")
    is_about_to_write, may_write = threading.Event(), threading.Event()
    slot, ring_B = sender._slot, sender._ring_B

    def slot_later(num_bytes: int) -> torch.Tensor:
        is_about_to_write.set()
        assert may_write.wait(LONG_S)
        return slot(num_bytes)

    sender._slot = slot_later
    late_B = make_bytes(3000)
    sending = pair.start(sender.send, late_B, LONG_S)
    assert is_about_to_write.wait(LONG_S)
    # STEP 1: the receiver gives the old link up; a new one has bytes that are not yet read.
    with pytest.raises(TransferTimeout):
        receiver.recv(torch.zeros(3000, dtype=torch.uint8), 0.1)
    new_sender, new_receiver = pair.open("p/2")
    new_sender.send(torch.zeros(5000, dtype=torch.uint8), LONG_S)
    # STEP 2: the old sender writes, and only then finds that nobody is there.
    may_write.set()
    assert isinstance(sending.exception(LONG_S), PeerLost)
    assert torch.equal(ring_B[:3000], late_B), "the late write has happened"
    into_B = make_bytes(5000, seed=9)
    new_receiver.recv(into_B, LONG_S)
    return into_B


def test_a_late_write_of_an_old_epoch_reaches_no_new_link():
    """P-21, S-13: bytes of a request that was given up never get into the next one's."""
    with running(shm()) as pair:
        assert not carry_over_a_late_write(pair).any()


def test_with_one_ring_for_all_epochs_it_would():
    """The test above can fail: without the fence the late bytes are there."""
    with running(one_ring()) as pair:
        carried_B = carry_over_a_late_write(pair)
        assert torch.equal(carried_B[:3000], make_bytes(3000))
