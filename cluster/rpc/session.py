"""What a worker has for one router, over any number of streams: one attach, cut and gone on with.

    legs ──emit──▶ news ──▶ batch n, n+1, ... ──▶ tail ──▶ the stream of now
                                                   │
                          the router's next_batch ─┴▶ forgotten

All that is emitted between two writes is one batch. A batch stays in the tail until the router has
it, so that a new stream of the same router incarnation goes on where the old one was cut. Nothing
here knows gRPC; of several streams the newest one takes (``Seat``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from cluster.errors import InvalidRequest
from cluster.request import ExportWaiting, Preempted
from cluster.rpc import convert
from cluster.wire import worker_pb2 as wire

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from cluster.request import Beat, LegEnd, LegNotice, PromptLogprobs, Token

WRITE_TIMEOUT_S = 10.0
"""A router that takes nothing for so long is cut off, however little waits for it."""
MAX_QUEUED_ITEMS = 16384
"""Tokens and ends that one router doesn't have before it is cut off."""
MAX_ITEMS_PER_MESSAGE = 8192
"""Keeps a message under the size cap whatever the length of request ids."""
MAX_RUNS_PER_MESSAGE = 8
"""Runs of a prompt's log-probabilities, each of 64 positions at most, in one message."""
BEAT_S = 1.0
"""After so long without news an empty batch says that the worker is there."""
MAX_UNTOLD = 256
"""Messages taken from a router before it is told so without waiting for news or a beat."""


class Seat:
    """One stream's turn to take from a session; it is left once."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.is_left = False
        self._patience: asyncio.Timeout | None = None

    def leave(self) -> None:
        """Take no more, also in the middle of a write that nobody takes."""
        self.is_left = True
        self.session.wake()
        self.hurry()

    def hurry(self) -> None:
        """Break off the write that is under way."""
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(0.0)

    async def write(self, write: Callable[[wire.TokenBatch], Awaitable[None]]) -> bool:
        """Write the next message; False where there will be none, or it was not taken."""
        batch = await self.session.next_batch(self)
        if batch is None:
            return False
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S) as self._patience:
                await write(batch)
        except TimeoutError:
            if not self.is_left:
                self.session.cut()
            return False
        finally:
            self._patience = None
        return True


class Session:
    """One router incarnation's ``LegSink``; event loop only."""

    def __init__(self, name: str, beat: Callable[[], Beat]) -> None:
        self.name = name
        self._beat = beat
        self._prompts: list[PromptLogprobs] = []
        self._tokens: list[Token] = []
        self._ends: list[LegEnd] = []
        self._notices: list[LegNotice] = []
        self._tail: deque[tuple[wire.TokenBatch, int]] = deque()  # with the items in each
        self._num_tail_items = 0
        self._num_sent = 0  # of the tail, on the stream of now
        self._next_number = 1
        self._num_taken = self._num_told = 0
        self._is_due = True  # the first message of a stream says what was taken before
        self._wake = asyncio.Event()
        self.seat: Seat | None = None
        """Of the stream that takes from here; the last one's, where it was cut."""
        self.is_closed = False
        self.is_overrun = False

    def emit(
        self,
        tokens: Sequence[Token],
        ends: Sequence[LegEnd],
        notices: Sequence[LegNotice] = (),
        prompts: Sequence[PromptLogprobs] = (),
    ) -> None:
        """Queue news; never blocks, never raises."""
        if self.is_closed:
            return
        self._prompts.extend(prompts)
        self._tokens.extend(tokens)
        self._ends.extend(ends)
        self._notices.extend(notices)
        if self._num_items > MAX_QUEUED_ITEMS:
            self.cut()
        self._wake.set()

    def taken(self) -> None:
        """Count a message of the router."""
        self._num_taken += 1
        if self._num_taken - self._num_told >= MAX_UNTOLD:
            self._is_due = True
            self._wake.set()

    def acknowledged(self, next_batch: int) -> None:
        """Forget what the router has: all batches below ``next_batch``."""
        while self._tail and self._tail[0][0].number < next_batch:
            _, num_items = self._tail.popleft()
            self._num_tail_items -= num_items
            self._num_sent = max(0, self._num_sent - 1)

    def sit(self, next_batch: int) -> Seat:
        """Give a new stream the seat, from batch ``next_batch`` on; 0: it is the first stream.

        Raises InvalidRequest where those batches are not here.
        """
        first = self._tail[0][0].number if self._tail else self._next_number
        if next_batch and not first <= next_batch <= self._next_number:
            raise InvalidRequest("that batch is not here", field="next_batch")
        self.acknowledged(next_batch)
        self._num_sent = 0
        self._is_due = True
        if self.seat is not None:
            self.seat.leave()
        self.seat = Seat(self)
        return self.seat

    def wake(self) -> None:
        """Have whoever waits for a batch look again."""
        self._wake.set()

    def cut(self) -> None:
        """Give the router up: it takes too little."""
        self.is_overrun = True
        self.close()
        self._prompts, self._tokens, self._ends, self._notices = [], [], [], []
        self._tail.clear()
        self._num_sent = self._num_tail_items = 0
        if self.seat is not None:
            self.seat.hurry()

    def close(self) -> None:
        """Take no more; what is queued is still sent."""
        self.is_closed = True
        self._wake.set()

    async def next_batch(self, seat: Seat) -> wire.TokenBatch | None:
        """Wait for the next message; None once closed and all of it taken, or the seat is left."""
        while not seat.is_left:
            if (batch := self._take()) is not None:
                return self._signed(batch)
            if self.is_closed:
                return None
            if self._is_due:
                return self._signed(wire.TokenBatch())
            self._wake.clear()
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._wake.wait()
            except TimeoutError:
                self._is_due = True
        return None

    @property
    def _num_items(self) -> int:
        news = len(self._prompts) + len(self._tokens) + len(self._ends) + len(self._notices)
        return news + self._num_tail_items

    def _take(self) -> wire.TokenBatch | None:
        """Return the next batch that was not sent on this stream, if there is one."""
        if self._num_sent == len(self._tail):
            self._pack()
        if self._num_sent == len(self._tail):
            return None
        batch, _ = self._tail[self._num_sent]
        self._num_sent += 1
        return batch

    def _pack(self) -> None:
        """Make a batch of what waits; more than fits into one stays for the next."""
        if self._prompts:
            # They are big, and a leg's end must not overtake them: a message of their own.
            runs = self._prompts[:MAX_RUNS_PER_MESSAGE]
            del self._prompts[: len(runs)]
            batch = wire.TokenBatch(prompts=[convert.prompts_to_wire(run) for run in runs])
            self._add(batch, len(runs))
        elif self._tokens or self._ends or self._notices:
            tokens = self._tokens[:MAX_ITEMS_PER_MESSAGE]
            # A leg's end must not overtake its tokens.
            is_whole = len(tokens) == len(self._tokens)
            ends = self._ends[:MAX_ITEMS_PER_MESSAGE] if is_whole else []
            notices, self._notices = self._notices, []
            del self._tokens[: len(tokens)]
            del self._ends[: len(ends)]
            batch = wire.TokenBatch(
                tokens=[convert.token_to_wire(token) for token in tokens],
                ends=[convert.end_to_wire(end) for end in ends],
                waiting=[
                    convert.waiting_to_wire(notice)
                    for notice in notices
                    if isinstance(notice, ExportWaiting)
                ],
                preempted=[
                    convert.preempted_to_wire(notice)
                    for notice in notices
                    if isinstance(notice, Preempted)
                ],
            )
            self._add(batch, len(tokens) + len(ends) + len(notices))

    def _add(self, batch: wire.TokenBatch, num_items: int) -> None:
        batch.number = self._next_number
        self._next_number += 1
        self._tail.append((batch, num_items))
        self._num_tail_items += num_items

    def _signed(self, batch: wire.TokenBatch) -> wire.TokenBatch:
        """Add how far this worker is, which goes with every message."""
        self._is_due = False
        self._num_told = batch.num_taken = self._num_taken
        beat = self._beat()
        batch.beat.num_steps, batch.beat.patience_s = beat.num_steps, beat.patience_s
        return batch
