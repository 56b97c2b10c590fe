"""What the two ends of a shared memory take from one another, and from strangers."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cluster.transport import shm
from cluster.transport.base import PeerLost, TransportError
from cluster.transport.shm import (
    PIECE_BYTES,
    RING_BYTES,
    SLOT_BYTES,
    ShmTransport,
    _accept,
    _map,
    _receive_memory,
)
from cluster.transport.staging import TRAILER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable


def no_memory() -> int:
    return os.open("/dev/null", os.O_RDWR)


def unsealed() -> int:
    memory = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, RING_BYTES)
    return memory


def too_short() -> int:
    memory = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, RING_BYTES // 2)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    return memory


@pytest.mark.parametrize("make", [no_memory, unsealed, too_short])
def test_what_is_no_ring_is_refused_and_its_descriptor_closed(make: Callable[[], int]):
    """S-13: a peer could cut off what is not sealed, and end this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        sent = make()
        num_open = len(os.listdir("/proc/self/fd"))
        socket.send_fds(theirs, [b"ring"], [sent])
        with pytest.raises((TransportError, OSError)):
            _receive_memory(ours)
        assert len(os.listdir("/proc/self/fd")) == num_open
        os.close(sent)


def test_the_ring_is_in_memory_before_a_byte_is_written():
    """Prefaulted at either end: a transfer finds every page there."""
    memory = ShmTransport().make_memory()
    try:
        rings = [_map(memory) for _ in range(2)]
        assert [resident_bytes(ring.data_ptr()) for ring in rings] == [RING_BYTES] * 2
    finally:
        os.close(memory)


def resident_bytes(address: int) -> int:
    """Of the mapping that begins there: what this process would not have to fault in."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{address:x}-"))
    rss = next(line for line in lines if line.startswith("Rss:"))
    return int(rss.split()[1]) << 10


def test_a_peer_that_sends_no_memory_is_lost():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        theirs.close()
        with pytest.raises(PeerLost):
            _receive_memory(ours)


def test_strangers_at_the_door_do_not_keep_the_peer_out(monkeypatch):
    """S-13: a wrong word, none at all and a goodbye; the socket's name is no secret on a host."""
    monkeypatch.setattr(shm, "_TOKEN_S", 0.05)
    token = secrets.token_bytes(32)
    name = f"\0test-{secrets.token_hex(8)}"

    def caller() -> socket.socket:
        called = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        called.connect(name)
        return called

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen(8)
        with caller() as silent, caller() as wrong, caller() as leaving, caller() as peer:
            wrong.send(bytes(32))
            leaving.close()
            peer.send(token)
            with _accept(listener, token, time.monotonic() + 10) as bell:
                bell.send(b"you")
                assert peer.recv(16) == b"you"
            assert silent.recv(16) == wrong.recv(16) == b""
            with pytest.raises(TimeoutError):
                _accept(listener, token, time.monotonic() + 0.1)


def test_a_piece_with_its_trailer_wastes_no_slot():
    num_slots = -(-(PIECE_BYTES + TRAILER_BYTES) // SLOT_BYTES)
    assert num_slots * SLOT_BYTES - PIECE_BYTES <= 2048
