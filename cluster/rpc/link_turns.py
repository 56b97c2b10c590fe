"""Holds a link's thread until its transfer may start, where transfers must not overlap (NCCL)."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from cluster.errors import HandoffFailed
from cluster.transport.base import SENDER, PeerLost, TransferTimeout
from cluster.transport.transfer_lock import LockWord, ReceiverTurns, SenderTurns, TransferLock
from cluster.wire import worker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_WORD_TO_WIRE = {word: pb.TransferLock.Word.Value(f"WORD_{word.name}") for word in LockWord}
_WORD_FROM_WIRE = {number: word for word, number in _WORD_TO_WIRE.items()}


class LinkTurns:
    """A ``with`` on the link's thread: inside, both ends hold their GPU's lock.

    Everything else is for the event loop. Waiting ends with the link, or after ``patience_s``.
    """

    def __init__(
        self,
        *,
        rank: int,
        lock: TransferLock,
        write: Callable[[pb.LinkMessage], None],
        patience_s: float,
    ) -> None:
        turns = SenderTurns if rank == SENDER else ReceiverTurns
        self._turns = turns(lock, self._say)
        self._write = write
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._waiting: Future[None] | None = None
        self._failure: str | None = None

    def __enter__(self) -> None:
        """Wait for both locks; raises TransportError, and then holds none."""
        ready: Future[None] = Future()
        self._soon(lambda: self._want(ready))
        try:
            ready.result(self._patience_s)
        except BaseException as error:
            self._soon(self._turns.done)
            if isinstance(error, TimeoutError):
                error = TransferTimeout("the GPUs were not free in time", stage="transfer")
            raise error from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give this end's lock back."""
        self._soon(self._turns.done)

    def hear(self, word: pb.TransferLock) -> None:
        """Take the peer's word; raises HandoffFailed for one that is none."""
        known = _WORD_FROM_WIRE.get(word.word)
        if known is None:
            raise HandoffFailed(f"link message, lock.word: {word.word} is unknown", stage="link")
        if self._failure is None:
            self._turns.hear(known)

    def fail(self, reason: str) -> None:
        """The link is gone: nobody waits any longer, and nothing is held."""
        self._failure = reason
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(PeerLost(reason, stage="transfer"))

    def _want(self, ready: Future[None]) -> None:
        if self._failure is not None:
            ready.set_exception(PeerLost(self._failure, stage="transfer"))
            return
        self._waiting = ready
        self._turns.want(self._ready)

    def _ready(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _say(self, word: LockWord) -> None:
        self._write(pb.LinkMessage(lock=pb.TransferLock(word=_WORD_TO_WIRE[word])))

    def _soon(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: all links are gone
            self._loop.call_soon_threadsafe(call)
