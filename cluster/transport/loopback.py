"""Transport between two workers of one process: the receiver copies out of the sender's tensor.

The one-process mode runs on it. Both workers are given the same ``LoopbackTransport``.
"""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING

from cluster.config import TransportKind
from cluster.transport.base import (
    SENDER,
    Channel,
    PeerLost,
    Rendezvous,
    TransferTimeout,
    Transport,
    TransportError,
)

if TYPE_CHECKING:
    from torch import Tensor


class _Pipe:
    """What the two ends share: at most one message, lent by the sender until it is copied."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.lent_B: Tensor | None = None
        self.is_closed = False


class LoopbackTransport(Transport):
    """Hands out the two ends of in-process pipes; see the module."""

    kind = TransportKind.LOOPBACK

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._hub_id = uuid.uuid4().bytes
        self._lock = threading.Lock()
        self._half_open: dict[str, _Pipe] = {}

    def open(self, *, link_id: str, rank: int, rendezvous: Rendezvous, timeout_s: float) -> Channel:
        """Open one end; refuses a peer in another process, whose tensors cannot be reached."""
        rendezvous.set(f"loopback/{rank}", self._hub_id)
        theirs = rendezvous.get(f"loopback/{1 - rank}", timeout_s)
        if theirs != self._hub_id:
            raise TransportError("loopback cannot leave the process", stage="link")
        with self._lock:
            pipe = self._half_open.pop(link_id, None)
            if pipe is None:
                pipe = self._half_open[link_id] = _Pipe()
        return _LoopbackChannel(pipe, rank)


class _LoopbackChannel(Channel):
    def __init__(self, pipe: _Pipe, rank: int) -> None:
        super().__init__()
        self._pipe = pipe
        self._rank = rank

    def _send(self, data_B: Tensor, timeout_s: float) -> None:
        if self._rank != SENDER:
            raise TransportError("the receiving end cannot send", stage="transfer")
        pipe = self._pipe
        with pipe.changed:
            if pipe.is_closed:
                raise PeerLost("the receiver closed the channel", stage="transfer")
            pipe.lent_B = data_B
            pipe.changed.notify_all()
            done = pipe.changed.wait_for(lambda: pipe.lent_B is None or pipe.is_closed, timeout_s)
            was_taken, pipe.lent_B = pipe.lent_B is None, None
        self._judge(done=done, is_moved=was_taken)

    def _recv(self, into_B: Tensor, timeout_s: float) -> None:
        if self._rank == SENDER:
            raise TransportError("the sending end cannot receive", stage="transfer")
        pipe = self._pipe
        with pipe.changed:
            done = pipe.changed.wait_for(
                lambda: pipe.lent_B is not None or pipe.is_closed, timeout_s
            )
            lent_B = None if pipe.is_closed else pipe.lent_B
            if lent_B is not None:
                if lent_B.numel() != into_B.numel():
                    raise TransportError(
                        f"message of {lent_B.numel()} bytes where {into_B.numel()} were expected",
                        stage="transfer",
                    )
                into_B.copy_(lent_B)  # under the lock: the sender cannot take its loan back
                pipe.lent_B = None
                pipe.changed.notify_all()
        self._judge(done=done, is_moved=lent_B is not None)

    @staticmethod
    def _judge(*, done: bool, is_moved: bool) -> None:
        if not done:
            raise TransferTimeout("the other end did not come in time", stage="transfer")
        if not is_moved:
            raise PeerLost("the other end closed the channel", stage="transfer")

    def _interrupt(self) -> None:
        self._release()

    def _release(self) -> None:
        with self._pipe.changed:
            self._pipe.is_closed = True
            self._pipe.changed.notify_all()
