"""The half of a worker that imports KV and streams tokens.

The life of a DECODE leg, as queues; each line names what moves it on:

 1. waiting for its offer    ``start_leg`` gives it to ``Inbox.leg_arrived``; either comes first
 2. waiting for blocks       ``Inbox.reserve_waiting``: free blocks, in the order of
                             ``reservations``
 3. reserved, being sent     ``Inbox.on_signal``: the manifest, then the bytes, piece by piece
 4. the engine's queue       ``on_imported``, ``_go_on``: its first token goes out again, its
                             sequence has the prompt computed and the imported blocks under its key
 5. streaming                ``on_step``: growth and preemption are the engine's
 6. over                     ``_left_engine``: LegEnd with the times; the engine freed the blocks

A LOCAL leg starts at 4 with nothing computed. Legs end early where their router aborts them or
goes away (``abort_leg``), at their deadline (``expire`` up to 3, then the engine's), and where
link or sender fail (``on_handoff_over``). In 2 and 3 the inbox gives the blocks back, later the
engine.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from cluster.errors import Cancelled, PdserveError
from cluster.handoff import AbortCause
from cluster.request import LegKind, Preempted, Token
from cluster.rpc.legs import LegBook, LegEngine, LegSink, OpenLeg, abort_error, times_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.clock import Clock
    from cluster.engine.plan import SequenceEnd, StepEvents
    from cluster.request import Leg, LegKey, TokenLogprobs
    from cluster.rpc.errands import Errands
    from decode_worker.inbox import Inbox

logger = logging.getLogger(__name__)

STAGE = "decode"


class DecodeHalf:
    """Serves DECODE and LOCAL legs. Event loop only; every leg ends once."""

    def __init__(
        self,
        *,
        engine: LegEngine,
        inbox: Inbox,
        clock: Clock,
        eos_ids: frozenset[int],
        errands: Errands,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._errands = errands
        self._clock = clock
        self._eos_ids = eos_ids
        self.inbox = inbox
        self.book = LegBook(on_change)
        self._in_engine: set[LegKey] = set()
        inbox.report_to(self)

    def start_leg(self, leg: Leg, sink: LegSink) -> None:
        """Take a checked DECODE or LOCAL leg.

        A DECODE leg that waits here by another handoff goes on by the new one, without an end
        between them: its export was redirected to where it had been meant to go.
        """
        now = self._clock.now()
        if self.may_renew(leg, sink):
            self._renew(leg)
            return
        opened = self.book.open(leg, sink, now)
        if leg.kind is LegKind.DECODE:
            self.inbox.leg_arrived(opened)
            return
        self._in_engine.add(leg.key)
        self._engine.add(opened.sequence(self._eos_ids, now))

    def may_renew(self, leg: Leg, sink: LegSink) -> bool:
        """Whether its router has this leg open here, still without KV, by another handoff."""
        opened = self.book.get(leg.key)
        if opened is None or opened.sink is not sink or leg.key in self._in_engine:
            return False
        return leg.kind is LegKind.DECODE and opened.leg.handoff_id != leg.handoff_id

    def refuse_renewal(self, key: LegKey, error: PdserveError) -> None:
        """End a leg whose new handoff is not taken: its old one is given up already."""
        opened = self.book.get(key)
        assert opened is not None, "asked before"
        self._give_up(opened, AbortCause.REFUSED, error)

    def abort_leg(self, key: LegKey, cause: AbortCause) -> None:
        """Give a leg up, in whatever state; its sender hears of it at once."""
        opened = self.book.get(key)
        if opened is not None and opened.aborted is None:
            self._give_up(opened, cause, abort_error(cause, STAGE))

    def router_lost(self, sink: LegSink, cause: AbortCause) -> None:
        """Give up all legs of a router that is gone."""
        for opened in self.book.answering_to(sink):
            if opened.aborted is None:
                # It may have lost this worker only, and find another one for the export.
                self._give_up(opened, cause, abort_error(cause, STAGE), said=AbortCause.REFUSED)

    def close(self, cause: AbortCause, error: PdserveError) -> None:
        """Give up everything; what the engine has ends by its events."""
        self.inbox.close(cause)
        for opened in self.book:
            if opened.aborted is None:
                self._give_up(opened, cause, error)

    def expire(self, now: float) -> None:
        """End what outlived its deadline outside the engine."""
        self.inbox.expire(now)

    def on_step(self, events: StepEvents) -> None:
        """Take what the engine says about this half's legs; others' keys are left alone."""
        self.book.prompts(events.prompt_logprobs, self._in_engine)
        self.book.preempted(events.preempted, self._in_engine)
        for token in events.tokens:
            opened = self.book.get(token.key)
            if opened is not None and token.key in self._in_engine:
                self.book.token(opened, token)
        for end in events.ends:
            if end.key in self._in_engine:
                self._left_engine(end)
        self.book.flush()

    def on_imported(
        self, opened: OpenLeg, output_ids: tuple[int, ...], logprobs: TokenLogprobs | None
    ) -> None:
        """Take over a leg with its blocks, and go on with it once the COMMIT is out.

        Else the step thread would hold up what the sender's blocks wait for.
        """
        self._in_engine.add(opened.key)
        self._errands.soon(functools.partial(self._go_on, opened, output_ids, logprobs))

    def _go_on(
        self, opened: OpenLeg, output_ids: tuple[int, ...], logprobs: TokenLogprobs | None
    ) -> None:
        """Repeat the first token, for the router may not have it, and compute those after it."""
        sequence = opened.sequence(self._eos_ids, self._clock.now())
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.output_ids = list(output_ids)
        self._engine.add(sequence)
        first = Token(opened.key, len(output_ids) - 1, output_ids[-1], logprobs)
        self.book.token(opened, first)
        self.book.flush()
        if opened.aborted is not None:
            # Given up meanwhile, when the engine knew nothing of it.
            self._engine.abort(opened.key, opened.error or Cancelled("stopped", stage=STAGE))

    def on_gave_way(self, opened: OpenLeg) -> None:
        """Tell the router that the leg was preempted: that counts, wherever it goes on."""
        again = Preempted(opened.key, opened.leg.num_preemptions + 1)
        self.book.preempted((again,), (opened.key,))

    def on_handoff_over(
        self, opened: OpenLeg, cause: AbortCause, error: PdserveError | None
    ) -> None:
        """End a leg whose KV will not come; without an error the first token was its last."""
        opened.give_up(cause, error)
        self.book.end(opened, error=error)
        self.book.flush()

    def _renew(self, leg: Leg) -> None:
        opened = self.book.get(leg.key)
        assert opened is not None, "asked before"
        self.inbox.abort(opened, AbortCause.REFUSED)
        opened.leg, opened.deadline = leg, self._clock.now() + leg.remaining_s
        self.inbox.leg_arrived(opened)

    def _left_engine(self, end: SequenceEnd) -> None:
        self._in_engine.discard(end.key)
        opened = self.book.get(end.key)
        assert opened is not None, "a leg stays open while the engine has it"
        error = opened.error if opened.aborted is not None and end.error else end.error
        self.book.end(opened, finish_reason=end.finish_reason, error=error, times=times_of(end))

    def _give_up(
        self,
        opened: OpenLeg,
        cause: AbortCause,
        error: PdserveError | None,
        *,
        said: AbortCause | None = None,
    ) -> None:
        """End a leg; the sender of its KV is told ``said``, by default ``cause``."""
        opened.give_up(cause, error)
        if opened.key in self._in_engine:
            self._engine.abort(opened.key, error or Cancelled("stopped", stage=STAGE))
            return
        self.inbox.abort(opened, said or cause)
        self.book.end(opened, error=error)
        self.book.flush()
