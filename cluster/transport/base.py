"""The contract of moving bytes between two workers: one channel per link, one direction, in order.

A channel is opened by both ends of a link at the same time. They find one another through a
``Rendezvous``, a small key/value exchange that the link's signalling stream carries, so that no
store listens anywhere. After any failure a channel is dead for ever: half a message may have
moved, and nobody can say which half. Whoever wants to go on opens a new link with a new epoch.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from cluster.errors import HandoffFailed

if TYPE_CHECKING:
    from torch import Tensor

    from cluster.config import TransportKind
    from cluster.transport.transfer_lock import TransferLock

SENDER = 0
"""Rank of the end that sends: the prefill worker."""
RECEIVER = 1
"""Rank of the end that receives: the decode worker."""


class TransportError(HandoffFailed):
    """The bytes did not move; the channel that raised this is dead for ever."""


class PeerLost(TransportError):
    """The other end is gone, or closed the channel."""


class TransferTimeout(TransportError):
    """The other end did not do its part in time."""


class ChannelClosed(TransportError):
    """This end was closed before, or died of an earlier failure."""


class CorruptPayload(HandoffFailed):
    """All bytes came, and they are not those that were sent; the channel is whole.

    The copy at the sender is not to be trusted either: where the bytes changed is unknown.
    """


class Rendezvous(ABC):
    """Key/value exchange between the two ends of one link while they open their channel.

    Blocking; called on the link's thread. Each key is set once, by one of the two ends.
    """

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Publish ``value`` to the other end."""

    @abstractmethod
    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for what the other end set; raises TransferTimeout or PeerLost."""


class Channel(ABC):
    """One direction of bytes between two workers: FIFO, used by one thread at a time.

    Tensors are contiguous uint8 on the transport's device. A message is received into a tensor
    of exactly its length: both ends derive it from the manifest, for a transport may notice a
    difference badly (gloo takes a shorter message without a word, and a longer one ends the
    process).
    """

    kind: TransportKind | None = None
    """What moves the bytes, where the transport that opened it chose for this link."""
    piece_bytes: int | None = None
    """The most that a message should have, where smaller ones let both ends work at once."""
    transfer_lock: TransferLock | None = None
    """Of the GPU whose transfers must not overlap; None where they may."""

    def __init__(self) -> None:
        self._death: str | None = None
        self._state = threading.Lock()
        self._is_busy = False
        self._is_released = False

    def send(self, data_B: Tensor, timeout_s: float) -> None:
        """Send one message; the tensor may be reused on return. Raises TransportError."""
        self._operate(data_B, timeout_s, is_send=True)

    def recv(self, into_B: Tensor, timeout_s: float) -> None:
        """Receive one message of exactly this length. Raises TransportError.

        A longer one may overwrite what lies behind ``into_B`` in the same buffer.
        """
        self._operate(into_B, timeout_s, is_send=False)

    def close(self) -> None:
        """Let go of this end; idempotent, from any thread, never waits for a running operation.

        An operation that is blocked in another thread ends when its peer does its part or goes
        away, or at its timeout; what it holds is released then.
        """
        with self._state:
            self._death = self._death or "closed"
            must_release = not self._is_busy and not self._is_released
            self._is_released |= must_release
        self._interrupt()
        if must_release:
            self._release()

    def condemn(self) -> None:
        """End a running operation early, where that can be done; from any thread, never waits.

        Nothing is let go of but by it: ``close`` is still due.
        """
        with self._state:
            self._death = self._death or "closed"
        self._interrupt()

    @property
    def is_dead(self) -> bool:
        """Whether it was closed or has failed."""
        return self._death is not None

    def _operate(self, data_B: Tensor, timeout_s: float, *, is_send: bool) -> None:
        with self._state:
            if self._death is not None:
                raise ChannelClosed(f"channel is dead: {self._death}", stage="transfer")
            self._is_busy = True
        try:
            (self._send if is_send else self._recv)(data_B, timeout_s)
        except BaseException as error:
            self._death = self._death or str(error)
            raise
        finally:
            with self._state:
                self._is_busy = False
                must_release = self._death is not None and not self._is_released
                self._is_released |= must_release
            if must_release:
                self._release()

    @abstractmethod
    def _send(self, data_B: Tensor, timeout_s: float) -> None: ...

    @abstractmethod
    def _recv(self, into_B: Tensor, timeout_s: float) -> None: ...

    def _interrupt(self) -> None:  # noqa: B027 (most transports cannot interrupt a wait)
        """Wake an operation that is blocked in another thread, where that can be done."""

    @abstractmethod
    def _release(self) -> None:
        """Free what the channel holds; called once, with no operation running."""


class Transport(ABC):
    """Opens channels; one per worker process."""

    kind: TransportKind
    device: str
    """Where the tensors of its channels live, as torch names it."""

    @abstractmethod
    def open(self, *, link_id: str, rank: int, rendezvous: Rendezvous, timeout_s: float) -> Channel:
        """Open one end of a link; blocks until the other end is there. Raises TransportError.

        ``link_id`` carries the link's epoch and is never used twice. Rank 0 sends, rank 1
        receives.
        """
