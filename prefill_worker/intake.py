"""The half of a worker that takes prompts and hands their KV over.

The life of a PREFILL leg, as queues; each line names what moves it on:

 1. the engine's queue    ``start_leg`` makes a sequence that leaves after its first token
 2. being computed        ``_started``: its first chunk is about to run, so ``Outbox.offer``
 3. first token           ``on_step``: to the router at once, whatever the transfer does
 4. exported              ``_left_engine``: ``Outbox.export`` renames its blocks to the handoff's
 5. credited              ``Outbox.on_signal``: may have come before 4
 6. being sent            ``Outbox._send``: one staging buffer, the link's thread
 7. over                  ``on_handoff_over``: blocks given back, LegEnd with the times

It ends early where its first token is its last (``_left_engine``: the receiver is told
ABORTED(finished)), where its router aborts it or goes away (``abort_leg``), at its deadline
(the engine's up to 4, ``expire``'s after that), and where link or receiver fail
(``on_handoff_over`` with a cause). In 1 to 3 the engine gives the blocks back, later the outbox.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cluster.errors import Cancelled, InvalidRequest, PdserveError
from cluster.rpc.legs import (
    LegBook,
    LegEngine,
    LegSink,
    OpenLeg,
    abort_cause,
    abort_error,
    times_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.clock import Clock
    from cluster.engine.plan import SequenceEnd, StepEvents
    from cluster.handoff import AbortCause
    from cluster.kv.block_pool import BlockPool
    from cluster.lifetime import LegTimes
    from cluster.request import Leg, LegKey
    from prefill_worker.outbox import Outbox

logger = logging.getLogger(__name__)

STAGE = "prefill"


class PrefillHalf:
    """Serves PREFILL legs. Event loop only; every leg ends once, every block is given back."""

    def __init__(
        self,
        *,
        engine: LegEngine,
        pool: BlockPool,
        outbox: Outbox,
        clock: Clock,
        eos_ids: frozenset[int],
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._clock = clock
        self._eos_ids = eos_ids
        self.outbox = outbox
        self.book = LegBook(on_change)
        self._in_engine: dict[LegKey, list[int]] = {}
        """Legs that the engine has, with the tokens they drew."""
        outbox.report_to(self)

    def start_leg(self, leg: Leg, sink: LegSink) -> None:
        """Take a checked PREFILL leg; its handoff must be new."""
        now = self._clock.now()
        opened = self.book.open(leg, sink, now)
        if leg.handoff_id and self._has_handoff(opened):
            error = InvalidRequest("this handoff is under way", field="handoff_id", stage=STAGE)
            self.book.end(opened, error=error)
            self.book.flush()
            return
        sequence = opened.sequence(self._eos_ids, now)
        if leg.handoff_id:
            sequence.hands_over_at = len(leg.output_ids) + 1
        self._in_engine[leg.key] = []
        self._engine.add(sequence)

    def abort_leg(self, key: LegKey, cause: AbortCause) -> None:
        """Give a leg up, in whatever state; its receiver hears of it at once."""
        opened = self.book.get(key)
        if opened is not None and opened.aborted is None:
            self._give_up(opened, cause, abort_error(cause, STAGE))

    def router_lost(self, sink: LegSink, cause: AbortCause) -> None:
        """Give up all legs of a router that is gone."""
        for opened in self.book.answering_to(sink):
            self.abort_leg(opened.key, cause)

    def close(self, cause: AbortCause, error: PdserveError) -> None:
        """Give up everything; what the engine has ends by its events."""
        for opened in self.book:
            if opened.aborted is None:
                self._give_up(opened, cause, error)

    def expire(self, now: float) -> None:
        """End what outlived its deadline or lease outside the engine."""
        self.outbox.expire(now)

    def on_step(self, events: StepEvents) -> None:
        """Take what the engine says about this half's legs; others' keys are left alone."""
        for key in events.started:
            self._started(key)
        for token in events.tokens:
            opened = self.book.get(token.key)
            if opened is not None and token.key in self._in_engine:
                self._in_engine[token.key].append(token.token_id)
                self.book.token(opened, token)
        for end in events.ends:
            if end.key in self._in_engine:
                self._left_engine(end)
        self.book.flush()

    def on_handoff_over(
        self, opened: OpenLeg, cause: AbortCause | None, error: PdserveError | None, times: LegTimes
    ) -> None:
        """End a leg with its handoff; one that the engine still has ends when that let go."""
        if opened.key in self._in_engine:
            assert cause is not None, "nothing commits before it was computed"
            opened.give_up(cause, error)
            self._engine.abort(opened.key, error or Cancelled("given up", stage=STAGE))
            return
        self.book.end(opened, error=error, times=times)
        self.book.flush()

    def _has_handoff(self, new: OpenLeg) -> bool:
        handoff_id = new.leg.handoff_id
        return any(o is not new and o.leg.handoff_id == handoff_id for o in self.book)

    def _started(self, key: LegKey) -> None:
        opened = self.book.get(key)
        if opened is None or opened.aborted is not None or key not in self._in_engine:
            return
        handoff_id = opened.leg.handoff_id
        if handoff_id and handoff_id not in self.outbox:
            self.outbox.offer(opened)

    def _left_engine(self, end: SequenceEnd) -> None:
        drawn = self._in_engine.pop(end.key)
        opened = self.book.get(end.key)
        assert opened is not None, "a leg stays open while the engine has it"
        handoff_id, times = opened.leg.handoff_id, times_of(end)
        if end.error is not None or end.finish_reason is not None:
            error = opened.error if opened.aborted is not None and end.error else end.error
            self.outbox.abort(handoff_id, abort_cause(error))
            self.book.end(opened, finish_reason=end.finish_reason, error=error, times=times)
        elif opened.aborted is not None:
            # Given up just as it reached its handover: nobody else has its blocks.
            self._pool.release(end.key)
            self.book.end(opened, error=opened.error, times=times)
        else:
            output_ids = (*opened.leg.output_ids, *drawn)
            self.outbox.export(opened, output_ids, times)

    def _give_up(self, opened: OpenLeg, cause: AbortCause, error: PdserveError | None) -> None:
        opened.give_up(cause, error)
        self.outbox.abort(opened.leg.handoff_id, cause)
        if opened.key in self._in_engine:
            self._engine.abort(opened.key, error or Cancelled("stopped", stage=STAGE))
            return
        self.book.end(opened, error=error)
        self.book.flush()
