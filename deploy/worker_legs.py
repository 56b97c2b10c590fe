"""Where a worker's legs come in: each is refused by name or given to the half that serves it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cluster.errors import Cancelled, InvalidRequest, PdserveError, QueueFull
from cluster.handoff import AbortCause
from cluster.request import LegEnd, LegKind
from cluster.rpc.given_up import GivenUpLegs
from cluster.rpc.legs import abort_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.clock import Clock
    from cluster.request import Leg, LegKey, Redirect
    from cluster.rpc.leg_rules import LegRules
    from cluster.rpc.legs import LegSink
    from decode_worker.streams import DecodeHalf
    from prefill_worker.intake import PrefillHalf

logger = logging.getLogger(__name__)

MAX_OPEN_LEGS = 1024


class WorkerLegs:
    """The ``LegHandler`` of one worker; event loop only."""

    def __init__(
        self,
        prefill: PrefillHalf | None,
        decode: DecodeHalf | None,
        *,
        rules: LegRules,
        check_state: Callable[[], None],
        clock: Clock,
    ) -> None:
        """``check_state`` raises where the worker takes no legs at present."""
        self.prefill = prefill
        self.decode = decode
        self.halves = [half for half in (prefill, decode) if half is not None]
        self.num_rejected = 0
        """Legs that were refused at once."""
        self._rules = rules
        self._check_state = check_state
        self._clock = clock
        self._given_up = GivenUpLegs()

    def __len__(self) -> int:
        """Return the number of legs that have not ended."""
        return sum(len(half.book) for half in self.halves)

    def start_leg(self, leg: Leg, sink: LegSink) -> None:
        """Take a leg, or end it at once with the reason."""
        if self._given_up.has(leg.key, leg.grant_id, self._clock.now()):
            # Its end was said when it was given up; by now another leg may have its key.
            logger.info("leg=%s grant=%s comes after its abort", leg.key, leg.grant_id)
            self.num_rejected += 1
            return
        renewer = self.decode if self.decode and self.decode.may_renew(leg, sink) else None
        if renewer is None and any(leg.key in half.book for half in self.halves):
            self._refuse_double(leg, sink)
            return
        try:
            self._check_state()
            if renewer is None and len(self) >= MAX_OPEN_LEGS:
                raise QueueFull(f"{MAX_OPEN_LEGS} legs are open", stage="intake")
            self._rules.check(leg)
            half = self._half_for(leg.kind)
        except PdserveError as error:
            error.worker_id = self._rules.worker_id
            if renewer is not None:
                renewer.refuse_renewal(leg.key, error)
            else:
                self._refuse(leg, sink, error)
            return
        half.start_leg(leg, sink)

    def abort_leg(self, key: LegKey, cause: AbortCause, grant_id: str, sink: LegSink) -> None:
        """Give a leg up, whichever half has it; say the end of one that nobody has."""
        owners = [half for half in self.halves if _has(half, key, grant_id)]
        for half in owners:
            half.abort_leg(key, cause)
        if not owners:
            logger.info("leg=%s grant=%s aborted, and not here", key, grant_id)
            self._given_up.add(key, grant_id, self._clock.now())
            error = abort_error(cause, "intake") or Cancelled("given up", stage="intake")
            error.worker_id = self._rules.worker_id
            sink.emit((), (LegEnd(key=key, error=error, grant_id=grant_id),))

    def redirect_leg(self, redirect: Redirect) -> None:
        """Pass a waiting export on to another decode worker; a bad redirect ends its leg."""
        if self.prefill is None:
            return
        try:
            self._rules.check_redirect(redirect)
        except InvalidRequest as error:
            logger.warning("leg=%s redirect refused: %s", redirect.key, error.message)
            self.prefill.abort_leg(redirect.key, AbortCause.FAULT)
            return
        self.prefill.redirect_leg(redirect)

    def router_lost(self, sink: LegSink) -> None:
        """Give up the legs of a router that is gone."""
        for half in self.halves:
            half.router_lost(sink, AbortCause.CANCELLED)

    def abort_grant(self, grant_id: str) -> None:
        """Give up the legs of a grant that was taken back."""
        for half in self.halves:
            for opened in half.book:
                if opened.leg.grant_id == grant_id:
                    logger.info("leg=%s grant=%s taken back", opened.key, grant_id)
                    half.abort_leg(opened.key, AbortCause.LEASE)

    def close(self, error: PdserveError) -> None:
        """End every leg with ``error``."""
        for half in self.halves:
            try:
                half.close(AbortCause.FAULT, error)
            except Exception:
                # A half that is broken must keep neither the other one nor the worker's end up.
                logger.exception("worker=%s legs not ended", self._rules.worker_id)

    def _half_for(self, kind: LegKind) -> PrefillHalf | DecodeHalf:
        half = self.prefill if kind is LegKind.PREFILL else self.decode
        if half is None:
            raise InvalidRequest(f"this worker serves no {kind.value} legs", field="kind")
        return half

    def _refuse(self, leg: Leg, sink: LegSink, error: PdserveError) -> None:
        logger.info("leg=%s refused: %s field=%s", leg.key, error.code, error.field)
        self.num_rejected += 1
        sink.emit((), (LegEnd(key=leg.key, error=error),))

    def _refuse_double(self, leg: Leg, sink: LegSink) -> None:
        logger.warning("leg=%s sent twice", leg.key)
        self.num_rejected += 1
        owners = [half.book.get(leg.key) for half in self.halves]
        # To the router that has the leg, an end under this key would end the leg.
        if all(opened is None or opened.sink is not sink for opened in owners):
            error = InvalidRequest("this leg is open", field="key", worker_id=self._rules.worker_id)
            sink.emit((), (LegEnd(key=leg.key, error=error),))


def _has(half: PrefillHalf | DecodeHalf, key: LegKey, grant_id: str) -> bool:
    opened = half.book.get(key)
    return opened is not None and grant_id in ("", opened.leg.grant_id)
