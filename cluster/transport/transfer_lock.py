"""One transfer at a time per GPU: locks are taken by trying, and held by nobody who waits.

NCCL's kernels wait on the GPU for their peer. Two transfers that share a GPU and start in another
order at the other ends would wait for one another for ever; with two prefill and two decode workers
that takes no more than waiting for one lock while holding another.

    sender                                     receiver
    own lock free? take it ───── ASK ────────▶ its turn, and own lock free? take it
    ◀──────────── GRANTED ──────────────────── both hold: the bytes go
    give it back ◀── BUSY ──────────────────── else: remember who asked
    ◀────────────── FREE ───────────────────── once that has changed: ask again

Between ASK and its answer the sender holds its lock, but the receiver answers at once. A lock that
is held is thus held by a transfer that can go on, or is given back as soon as the answer is there.

Nothing here does any I/O: ``say`` sends a word to the peer, in order. Event loop only.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Say = Callable[["LockWord"], None]
    OnReady = Callable[[], None]


class LockWord(enum.Enum):
    """What two ends say about the transfer that is next on their link."""

    ASK = "ask"
    GRANTED = "granted"
    BUSY = "busy"
    FREE = "free"


class TransferLock:
    """One GPU's lock; all links of a worker share it."""

    def __init__(self) -> None:
        self._holder: object | None = None
        self._waiting: list[Callable[[], None]] = []

    @property
    def is_taken(self) -> bool:
        """Whether a transfer runs on this GPU, or is about to."""
        return self._holder is not None

    def try_take(self, holder: object) -> bool:
        """Take the lock if nobody has it."""
        if self._holder is not None:
            return False
        self._holder = holder
        return True

    def give_back(self, holder: object) -> None:
        """Free the lock if ``holder`` has it, and tell those who wait, in their order."""
        if self._holder is not holder:
            return
        self._holder = None
        waiting, self._waiting = self._waiting, []
        for retry in waiting:
            retry()

    def when_free(self, retry: Callable[[], None]) -> None:
        """Call ``retry`` once when the lock is given back; it may be taken again by then."""
        if retry not in self._waiting:
            self._waiting.append(retry)


class SenderTurns:
    """The sending end of one link: takes both locks for one transfer after the other."""

    def __init__(self, lock: TransferLock, say: Say) -> None:
        self._lock = lock
        self._say = say
        self._on_ready: OnReady | None = None
        self._is_asking = False
        self._is_held_off = False
        """The receiver was busy and has not said that this is over."""

    def want(self, on_ready: OnReady) -> None:
        """Call ``on_ready`` once both locks are held; ``done`` must follow."""
        self._on_ready = on_ready
        self._try()

    def hear(self, word: LockWord) -> None:
        """Take the receiver's word."""
        if word is LockWord.GRANTED and self._is_asking:
            self._is_asking = False
            on_ready, self._on_ready = self._on_ready, None
            assert on_ready is not None, "asked for a transfer"
            on_ready()
        elif word is LockWord.BUSY and self._is_asking:
            self._is_asking, self._is_held_off = False, True
            self._lock.give_back(self)
        elif word is LockWord.FREE:
            self._is_held_off = False
            self._try()

    def done(self) -> None:
        """Give our lock back: the transfer is over, or the link is."""
        self._is_asking, self._on_ready = False, None
        self._lock.give_back(self)

    def _try(self) -> None:
        if self._on_ready is None or self._is_asking or self._is_held_off:
            return
        if self._lock.try_take(self):
            self._is_asking = True
            self._say(LockWord.ASK)
        else:
            self._lock.when_free(self._try)


class ReceiverTurns:
    """The receiving end of one link: lets the sender go when its own thread and GPU are free."""

    def __init__(self, lock: TransferLock, say: Say) -> None:
        self._lock = lock
        self._say = say
        self._on_ready: OnReady | None = None
        self._owes_word = False
        """The sender was told BUSY, and waits for FREE."""

    def want(self, on_ready: OnReady) -> None:
        """Call ``on_ready`` once both locks are held; ``done`` must follow."""
        self._on_ready = on_ready
        self._tell_free()

    def hear(self, word: LockWord) -> None:
        """Take the sender's word."""
        if word is not LockWord.ASK:
            return
        on_ready = self._on_ready
        if on_ready is not None and self._lock.try_take(self):
            self._on_ready = None
            self._say(LockWord.GRANTED)
            on_ready()
            return
        self._owes_word = True
        self._say(LockWord.BUSY)
        if on_ready is not None:
            self._lock.when_free(self._tell_free)

    def done(self) -> None:
        """Give our lock back: the transfer is over, or the link is."""
        self._on_ready = None
        self._lock.give_back(self)

    def _tell_free(self) -> None:
        if self._owes_word and self._on_ready is not None:
            self._owes_word = False
            self._say(LockWord.FREE)
