"""Transport between two workers of one host: a ring of slots in memory that both have mapped.

    sender                               receiver
    tensor ─copy─▶ slot k mod n ─────────▶ copy ─▶ tensor
           ──"k+1 written"──▶ doorbell ──▶
           ◀───────────────── doorbell ◀──"k+1 read"──

The receiver makes the memory for this one opening of the link and passes it through a Unix socket,
which then carries both counters. Waiting for the peer is waiting for the socket, so nobody spins,
the end of either process is noticed at once, and the kernel orders the counters behind the copies.

The memory has no name, and nothing is left when both ends are gone, however they went. That it is
never used for another link is the fence of this transport: whoever writes late, to a link that was
given up, writes into memory that nobody reads any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import mmap
import os
import secrets
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cluster.config import TransportKind
from cluster.transport.base import (
    RECEIVER,
    SENDER,
    Channel,
    PeerLost,
    Rendezvous,
    TransferTimeout,
    Transport,
    TransportError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

SLOT_BYTES = 512 << 10
NUM_SLOTS = 8
"""More than two let the ends work at once; 4 MiB in all stay in the caches of both cores."""
RING_BYTES = NUM_SLOTS * SLOT_BYTES
PIECE_BYTES = 2 * SLOT_BYTES - 1024
"""Two slots with a trailer: one end gathers a piece while the other one scatters that before it."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_TOKEN_BYTES = 32
_TOKEN_S = 1.0
"""Whoever connects and says nothing for so long is not our peer."""
_BELL = struct.Struct("<QQ")
"""From the sender: slots written, bytes of the message. From the receiver: slots read, 0."""
_PEER = struct.Struct("3i")
"""pid, uid and gid, as the kernel vouches for them."""


def host_id() -> str:
    """Name what two processes must have in common to reach one another's Unix sockets."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id}/{Path('/proc/self/ns/net').stat().st_ino}/{os.getuid()}"


class ShmTransport(Transport):
    """Channels through shared memory; Linux only. Tensors may be on ``device``, the ring is not."""

    kind = TransportKind.SHM

    def __init__(self, *, device: str = "cpu") -> None:
        self.device = device

    def open(self, *, link_id: str, rank: int, rendezvous: Rendezvous, timeout_s: float) -> Channel:
        """Open one end; raises TransportError where the peer is on another host."""
        deadline = time.monotonic() + timeout_s
        key = f"{link_id}/shm"
        rendezvous.set(f"{key}/host/{rank}", host_id().encode())
        theirs = rendezvous.get(f"{key}/host/{1 - rank}", timeout_s)
        if theirs != host_id().encode():
            raise TransportError("shared memory cannot leave the host", stage="link")
        try:
            if rank == RECEIVER:
                return self._open_receiver(key, rendezvous, deadline)
            return self._open_sender(key, rendezvous, deadline)
        except TimeoutError as error:
            raise TransferTimeout("the peer did not open its end", stage="link") from error
        except OSError as error:
            raise PeerLost(f"opening the channel: {error.strerror}", stage="link") from error

    def _open_receiver(self, key: str, rendezvous: Rendezvous, deadline: float) -> Channel:
        token = secrets.token_bytes(_TOKEN_BYTES)
        name = f"pdserve-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{name}")  # an abstract name: it is no file, and ends with its socket
            listener.listen(1)
            rendezvous.set(f"{key}/door", token + name.encode())
            bell = _accept(listener, token, deadline)
        with _closed_on_error(bell):
            memory = self.make_memory()
            try:
                ring_B = _map(memory)
                socket.send_fds(bell, [b"ring"], [memory])
            finally:
                os.close(memory)
        return _ShmChannel(bell, ring_B, RECEIVER)

    def _open_sender(self, key: str, rendezvous: Rendezvous, deadline: float) -> Channel:
        door = rendezvous.get(f"{key}/door", _left(deadline))
        token, name = door[:_TOKEN_BYTES], door[_TOKEN_BYTES:]
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with _closed_on_error(bell):
            bell.settimeout(_left(deadline))
            bell.connect(b"\0" + name)
            if not _is_same_user(bell):
                raise TransportError("the other end belongs to another user", stage="link")
            bell.send(token)
            memory = _receive_memory(bell)
            try:
                ring_B = _map(memory)
            finally:
                os.close(memory)
        return _ShmChannel(bell, ring_B, SENDER)

    def make_memory(self) -> int:
        """Return a descriptor of fresh memory of the ring's size, which nobody can resize."""
        memory = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(memory, RING_BYTES)
        # Touching what a peer has cut off would end this process.
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        return memory


class _ShmChannel(Channel):
    """One end; ``_num_mine`` counts slots that this end is through with, for ever."""

    kind = TransportKind.SHM
    piece_bytes = PIECE_BYTES

    def __init__(self, bell: socket.socket, ring_B: Tensor, rank: int) -> None:
        super().__init__()
        self._bell = bell
        self._ring_B: Tensor | None = ring_B
        self._rank = rank
        self._num_mine = 0
        self._num_theirs = 0

    def _send(self, data_B: Tensor, timeout_s: float) -> None:
        if self._rank != SENDER:
            raise TransportError("the receiving end cannot send", stage="transfer")
        deadline = time.monotonic() + timeout_s
        num_bytes = data_B.numel()
        for start in range(0, num_bytes, SLOT_BYTES):
            while self._num_mine - self._num_theirs >= NUM_SLOTS:
                self._hear(deadline)
            part_B = data_B[start : start + SLOT_BYTES]
            self._slot(part_B.numel()).copy_(part_B)
            self._ring(num_bytes, deadline)

    def _recv(self, into_B: Tensor, timeout_s: float) -> None:
        if self._rank == SENDER:
            raise TransportError("the sending end cannot receive", stage="transfer")
        deadline = time.monotonic() + timeout_s
        num_bytes = into_B.numel()
        for start in range(0, num_bytes, SLOT_BYTES):
            announced = self._hear(deadline)
            if announced != num_bytes:
                raise TransportError(
                    f"message of {announced} bytes where {num_bytes} were expected",
                    stage="transfer",
                )
            part_B = into_B[start : start + SLOT_BYTES]
            part_B.copy_(self._slot(part_B.numel()))
            self._ring(0, deadline)

    def _slot(self, num_bytes: int) -> Tensor:
        assert self._ring_B is not None, "released while in use"
        first = self._num_mine % NUM_SLOTS * SLOT_BYTES
        return self._ring_B[first : first + num_bytes]

    def _ring(self, num_bytes: int, deadline: float) -> None:
        """Tell the peer that one more slot is written, or read."""
        self._num_mine += 1
        try:
            self._bell.settimeout(_left(deadline))
            self._bell.send(_BELL.pack(self._num_mine, num_bytes))
        except TimeoutError as error:
            raise TransferTimeout("the other end takes no word", stage="transfer") from error
        except OSError as error:
            # A sender may leave when all is written; the receiver hears of it when it wants more.
            if self._rank == SENDER:
                raise _gone(error) from error

    def _hear(self, deadline: float) -> int:
        """Wait for the peer's next word and take its counter; returns the bytes it speaks of."""
        try:
            try:
                word = self._next_word(deadline)
            except ConnectionResetError:
                # It left without hearing us out; what it had said before is still there.
                word = self._next_word(deadline)
        except TimeoutError as error:
            raise TransferTimeout("the other end did not come in time", stage="transfer") from error
        except OSError as error:
            raise _gone(error) from error
        if not word:
            raise PeerLost("the other end closed the channel", stage="transfer")
        count, num_bytes = _unpacked(word)
        # Each slot is announced once; a peer that counts otherwise is none of ours.
        if count != self._num_theirs + 1:
            raise TransportError("the other end has lost count", stage="transfer")
        self._num_theirs = count
        return num_bytes

    def _next_word(self, deadline: float) -> bytes:
        self._bell.settimeout(_left(deadline))
        return self._bell.recv(_BELL.size)

    def _interrupt(self) -> None:
        with contextlib.suppress(OSError):  # the peer has gone already
            self._bell.shutdown(socket.SHUT_RDWR)

    def _release(self) -> None:
        self._ring_B = None  # the last reference: unmaps
        self._bell.close()


def _unpacked(word: bytes) -> tuple[int, int]:
    if len(word) != _BELL.size:
        return 0, 0
    count, num_bytes = _BELL.unpack(word)
    return int(count), int(num_bytes)


def _gone(error: OSError) -> PeerLost:
    return PeerLost(f"the other end is gone: {error.strerror}", stage="transfer")


def _accept(listener: socket.socket, token: bytes, deadline: float) -> socket.socket:
    """Take the connection of whoever knows the token; anybody else is sent away."""
    while True:
        listener.settimeout(_left(deadline))
        bell, _ = listener.accept()
        with _closed_on_error(bell):
            if _knows(bell, token, min(_left(deadline), _TOKEN_S)):
                return bell
        bell.close()


def _knows(bell: socket.socket, token: bytes, patience_s: float) -> bool:
    bell.settimeout(patience_s)
    try:
        return _is_same_user(bell) and hmac.compare_digest(bell.recv(_TOKEN_BYTES), token)
    except OSError:  # it says nothing, or has gone: our peer may be behind it
        return False


def _is_same_user(bell: socket.socket) -> bool:
    packed = bell.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, uid, _ = _PEER.unpack(packed)
    return bool(uid == os.getuid())


def _receive_memory(bell: socket.socket) -> int:
    """Return the descriptor that the receiver sends, once it is what was agreed."""
    _, descriptors, _, _ = socket.recv_fds(bell, 16, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise PeerLost("the other end closed the channel", stage="link")
    memory = descriptors[0]
    try:
        # What is no memory at all has no seals to ask for: an OSError.
        is_sealed = fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        if not is_sealed or os.fstat(memory).st_size != RING_BYTES:
            raise TransportError("the other end's memory is not a ring of this size", stage="link")
    except BaseException:
        os.close(memory)
        raise
    return memory


def _map(memory: int) -> Tensor:
    """Map every page now: touching them for the first time would cost more than a transfer."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return torch.frombuffer(mmap.mmap(memory, RING_BYTES, flags=flags), dtype=torch.uint8)


def _left(deadline: float) -> float:
    """Return the seconds left, never 0, which a socket takes for "do not wait"."""
    return max(deadline - time.monotonic(), 1e-6)


@contextlib.contextmanager
def _closed_on_error(bell: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        bell.close()
        raise
