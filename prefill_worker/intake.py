"""The half of a worker that takes prompts and hands their KV over.

The life of a PREFILL leg, as queues; each line names what moves it on:

 1. the engine's queue    ``start_leg`` makes a sequence that leaves after its first token
 2. being computed        ``_started``: its first chunk is about to run, so ``Outbox.offer``
 3. first token           ``on_step``: to the router at once, whatever the transfer does
 4. exported              ``_left_engine``: ``Outbox.export`` renames its blocks to the export's
 5. credited              ``Sender.on_signal``: any time after 2
 6. being sent            ``Sender.push``: in 2 what a step has finished or, of its first layers,
                          stored; in 4 the rest
 7. over                  ``on_handoff_over``: blocks given back, LegEnd with the times

From 2 to 6 its handoff may fail and leave the KV good: ``on_export_waiting`` tells the router, and
``redirect_leg`` goes on with another decode worker.

It ends early where its first token is its last (``_left_engine``: the receiver is told
ABORTED(finished)), where its router aborts it or goes away (``abort_leg``), at its deadline
(the engine's up to 4, ``expire``'s after that), and where link or receiver fail
(``on_handoff_over`` with a cause). In 1 to 3 the engine gives the blocks back, later the outbox.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.engine.sequence import Sequence, StoredLayers
from cluster.errors import Cancelled, InvalidRequest, PdserveError
from cluster.handoff import AbortCause
from cluster.request import Preempted, Token
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
    from cluster.kv.block_pool import BlockPool
    from cluster.lifetime import LegTimes
    from cluster.request import ExportWaiting, Leg, LegKey, Redirect
    from prefill_worker.outbox import Outbox

logger = logging.getLogger(__name__)

STAGE = "prefill"


@dataclass(slots=True)
class _Computing:
    """A leg that the engine has."""

    sequence: Sequence
    drawn: list[Token] = field(default_factory=list)


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
        self._in_engine: dict[LegKey, _Computing] = {}
        outbox.report_to(self)

    def start_leg(self, leg: Leg, sink: LegSink) -> None:
        """Take a checked PREFILL leg; its handoff must be new."""
        now = self._clock.now()
        opened = self.book.open(leg, sink, now)
        if leg.handoff_id and self._has_handoff(opened, leg.handoff_id):
            error = InvalidRequest("this handoff is under way", field="handoff_id", stage=STAGE)
            self.book.end(opened, error=error)
            self.book.flush()
            return
        sequence = opened.sequence(self._eos_ids, now)
        if leg.handoff_id:
            sequence.hands_over_at = len(leg.output_ids) + 1
            sequence.stored = StoredLayers() if self.outbox.streams else None
        self._in_engine[leg.key] = _Computing(sequence)
        self._engine.add(sequence)

    def abort_leg(self, key: LegKey, cause: AbortCause) -> None:
        """Give a leg up, in whatever state; its receiver hears of it at once."""
        opened = self.book.get(key)
        if opened is not None and opened.aborted is None:
            self._give_up(opened, cause, abort_error(cause, STAGE))

    def redirect_leg(self, redirect: Redirect) -> None:
        """Pass a waiting export on; a key that is not open crossed with its end."""
        opened = self.book.get(redirect.key)
        if opened is None or opened.aborted is not None or not opened.leg.handoff_id:
            return
        if self._has_handoff(opened, redirect.handoff_id):
            logger.warning("leg=%s handoff=%s is another's", opened.key, redirect.handoff_id)
            self.abort_leg(opened.key, AbortCause.FAULT)
            return
        self.outbox.redirect(opened, redirect)

    def router_lost(self, sink: LegSink, cause: AbortCause) -> None:
        """Give up all legs of a router that is gone."""
        for opened in self.book.answering_to(sink):
            if opened.aborted is None:
                # It may have lost this worker only: its decode leg must end as one to be retried.
                self._give_up(opened, cause, abort_error(cause, STAGE), said=AbortCause.LEASE)

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
        self.book.prompts(events.prompt_logprobs, self._in_engine)
        self.book.preempted(events.preempted, self._in_engine)
        for key in (*events.stored, *(key for key, _ in events.computed)):
            self.outbox.computed(key)
        for token in events.tokens:
            opened = self.book.get(token.key)
            if opened is not None and token.key in self._in_engine:
                self._in_engine[token.key].drawn.append(token)
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

    def on_gave_way(self, opened: OpenLeg) -> None:
        """Tell the router that the leg was preempted: that counts when it is computed again."""
        again = Preempted(opened.key, opened.leg.num_preemptions + 1)
        self.book.preempted((again,), (opened.key,))

    def on_export_waiting(self, opened: OpenLeg, waiting: ExportWaiting) -> None:
        """Tell the router that it has the lease's time to find another decode worker."""
        logger.info(
            "handoff=%s leg=%s its export waits: %s",
            waiting.handoff_id, opened.key, waiting.error.message,
        )  # fmt: skip
        self.book.waiting(opened, waiting)
        self.book.flush()

    def _has_handoff(self, mine: OpenLeg, handoff_id: str) -> bool:
        """Whether another leg has the handoff."""
        return any(o is not mine and o.leg.handoff_id == handoff_id for o in self.book)

    def _started(self, key: LegKey) -> None:
        opened = self.book.get(key)
        if opened is None or opened.aborted is not None or key not in self._in_engine:
            return
        if opened.leg.handoff_id and key not in self.outbox:
            self.outbox.offer(opened, self._in_engine[key].sequence)

    def _left_engine(self, end: SequenceEnd) -> None:
        drawn = self._in_engine.pop(end.key).drawn
        opened = self.book.get(end.key)
        assert opened is not None, "a leg stays open while the engine has it"
        times = times_of(end)
        if end.error is not None or end.finish_reason is not None:
            error = opened.error if opened.aborted is not None and end.error else end.error
            self.outbox.abort(end.key, abort_cause(error))
            self.book.end(opened, finish_reason=end.finish_reason, error=error, times=times)
        elif opened.aborted is not None:
            # Given up just as it reached its handover: nobody else has its blocks.
            self._pool.release(end.key)
            self.book.end(opened, error=opened.error, times=times)
        else:
            output_ids = (*opened.leg.output_ids, *(token.token_id for token in drawn))
            self.outbox.export(opened, output_ids, drawn[-1].logprobs, times)

    def _give_up(
        self,
        opened: OpenLeg,
        cause: AbortCause,
        error: PdserveError | None,
        *,
        said: AbortCause | None = None,
    ) -> None:
        """End a leg; the receiver of its KV is told ``said``, by default ``cause``."""
        opened.give_up(cause, error)
        self.outbox.abort(opened.key, said or cause)
        if opened.key in self._in_engine:
            self._engine.abort(opened.key, error or Cancelled("stopped", stage=STAGE))
            return
        self.book.end(opened, error=error)
        self.book.flush()
