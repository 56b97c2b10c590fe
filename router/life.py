"""The life of one request in the router, from its acceptance to its one end.

    1. want    ``_place``     ask the control plane; it answers with a grant, or refuses
    2. grant   ``Attempt``    which worker does what: PREFILL + DECODE, LOCAL, or PREFILL alone
    3. legs    ``_serve``     start all legs at once, none waits for the other's answer
    4. merge   ``_read``      tokens in index order to the reader; the first at once
    5. end     ``_live``      exactly one: a finish, or an error; legs aborted, grants given back

A failed attempt goes back to 1, on other workers, within the deadline. Before the first token
that is a retry; after it a resume: the legs get the tokens that are out beside the prompt and go
on at the next index, while the text's state (characters and stop strings in the making) has been
here all along. It ends at the second worker that died with a leg of this request, and after
``MAX_RETRIES`` other failures without a new token between them.

Each request runs in a task of its own, so a slow reader delays neither its deadline nor the return
of what it holds; what waits for the reader is bounded by ``max_tokens``.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from cluster.control.facts import Want
from cluster.errors import Cancelled, DeadlineExceeded, EngineFault, PdserveError, WorkerLost
from cluster.handoff import AbortCause
from cluster.request import (
    MAX_PREEMPTIONS,
    NO_PREFIX,
    FinishReason,
    LegKind,
    PromptLogprobs,
    Token,
)
from router.attempt import Attempt
from router.events import Accepted, Delta, Finish, Scored
from router.timeline import Record, cached_tokens, make_timeline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.control.facts import ExportRef, Grant
    from cluster.request import Peer
    from router.parts import Parts

logger = logging.getLogger(__name__)

MAX_RETRIES = 2
MAX_LOST_WORKERS = 2
"""A request that has killed two workers is ended, not tried again."""
LAST_WORDS_S = 0.25
"""How long a timeline waits for the durations of legs that are told to end."""


class Life:
    """One request, from want to end; ``run`` is its task."""

    def __init__(self, accepted: Accepted, parts: Parts) -> None:
        self.request = accepted.request
        self._accepted = accepted
        self._parts = parts
        self._text = accepted.text
        self.events: asyncio.Queue[Delta | Finish | Scored | PdserveError] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._has_started = False
        self._is_over = False
        self.prefilled_on = ""
        """Incarnation that computes the prompt, or has."""
        self._phase = "queue"
        self._peers: Mapping[LegKind, Peer] = {}  # of the attempt under way
        self._output_ids: list[int] = []
        self._record = Record()
        self._num_wants = 0
        self._num_failures = 0  # attempts in a row that gave no token and killed nobody
        self._prefix = NO_PREFIX
        self._avoid: list[str] = []
        self._died: set[str] = set()
        self._attempt: Attempt | None = None

    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return self.request.deadline - self._parts.clock.now()

    def age_s(self) -> float:
        """Seconds since it was accepted."""
        return self._parts.clock.now() - self._accepted.accepted

    def cancel(self) -> bool:
        """Ask the task to end as cancelled; whether it was still running."""
        if self._is_over or self.task is None or self.task.done():
            return False
        if not self._is_cancelled:
            self._is_cancelled = True
            # A task that is cancelled before its first step never runs, and nobody would be told.
            if self._has_started:
                self.task.cancel()
        return True

    async def run(self) -> None:
        """Live, and tell the reader and the metrics the one end."""
        self._has_started = True
        end: Finish | PdserveError
        try:
            if self._is_cancelled:
                raise Cancelled("the request was cancelled", stage=self._phase)
            end = await self._live()
        except asyncio.CancelledError:
            end = Cancelled("the request was cancelled", stage=self._phase)
        except PdserveError as error:
            end = error
        except Exception:
            logger.exception("request=%s failed", self.request.request_id)
            end = EngineFault("an internal error", stage=self._phase)
        self._is_over = True
        self.events.put_nowait(end)
        counter = self._accepted.counter or self._parts.metrics
        counter.ended(end, phase=self._phase, num_output_tokens=len(self._output_ids))
        self._log(end)

    def on_leg_missed(self, attempt: int, error: PdserveError) -> None:
        """Take word that a living worker has never heard of a leg of this."""
        if self._attempt is not None:
            self._attempt.on_leg_missed(attempt, error)

    # ---- for its attempts

    @property
    def num_preemptions(self) -> int:
        """How often it was preempted so far."""
        return self._record.num_preemptions

    def note_preempted(self, num_preemptions: int) -> None:
        """Take word of a worker that it was preempted so often; old word changes nothing."""
        told = min(num_preemptions, MAX_PREEMPTIONS)
        self._record.num_preemptions = max(self._record.num_preemptions, told)

    def note_lost(self, incarnation: str, *, is_death: bool) -> None:
        """Avoid a worker from now on; ``is_death``: it was lost with a leg of this request."""
        if incarnation not in self._avoid:
            self._avoid.append(incarnation)
        if is_death:
            self._died.add(incarnation)

    def may_go_on(self, error: PdserveError) -> bool:
        """Whether the request may be given to another worker after ``error``."""
        # A deadline that passed ends the request; a full queue or no worker is the last word too.
        is_fault = error.is_retryable and error.http_status == WorkerLost.http_status
        return is_fault and len(self._died) < MAX_LOST_WORKERS

    def want(self, export: ExportRef | None = None) -> Want:
        """Return a new want: for all legs, or for a decode worker that takes ``export``."""
        # Each has a number of its own, for the control plane answers each number once.
        number = self._num_wants
        self._num_wants += 1
        return Want(
            request_id=self.request.request_id,
            attempt=number,
            num_prompt_tokens=len(self.request.prompt_ids) + len(self._output_ids),
            max_tokens=self._num_left(),
            waited_s=self.age_s(),
            remaining_s=self.remaining_s(),
            avoid=tuple(self._avoid),
            export=export,
            priority=self.request.priority,
            tenant=self.request.tenant,
            expected_tokens=self.request.expected_tokens,
            cached_on=self._accepted.cached_on,
            prefix=NO_PREFIX if export is not None else self._prefix,
            num_preemptions=self._record.num_preemptions,
        )

    # ---- inside

    async def _live(self) -> Finish:
        try:
            async with asyncio.timeout(max(0.0, self.remaining_s())):
                while True:
                    num_died = len(self._died)
                    try:
                        return await self._serve(await self._place())
                    except PdserveError as error:
                        self._num_failures += len(self._died) == num_died
                        if not self._may_try_again(error):
                            raise
                        self._log_failure(error)
        except TimeoutError:
            raise DeadlineExceeded(
                "the deadline passed", stage=self._phase, worker_id=self._worker_id()
            ) from None

    def _may_try_again(self, error: PdserveError) -> bool:
        is_allowed = self._parts.resumes or not self._output_ids
        return is_allowed and self.may_go_on(error) and self._num_failures <= MAX_RETRIES

    async def _place(self) -> Grant:
        # What was let in once and fails here was not refused before work.
        self._phase = "placement" if self._record.num_attempts else "queue"
        self._peers = {}
        request, parts = self.request, self._parts
        if not request.params.prompt_logprobs:  # for these every position is computed
            self._prefix = parts.prefixes.of(
                parts.route.prefix_key, request.tenant, request.prompt_ids
            )
        with self._parts.metrics.queued():
            grant = await parts.route.want(self.want())
        if not self._output_ids:
            self._record.queue_s = self.age_s()
        return grant

    async def _serve(self, grant: Grant) -> Finish:
        """Run one attempt; whatever happens, its legs are told to end and its grants go back."""
        grant_ids = [grant.grant_id]
        computing = grant.prefill or grant.decode
        self.prefilled_on = computing.incarnation if computing is not None else ""
        cause = AbortCause.FAULT
        num_before, whole_output_tokens = len(self._output_ids), 0
        try:
            attempt = Attempt(
                grant, self.request, self._output_ids, parts=self._parts, owner=self,
                prefix=self._prefix,
            )  # fmt: skip
            grant_ids, self._peers = attempt.grant_ids, attempt.peers
            self._attempt = attempt
            self._begin()
            try:
                await attempt.start()
                try:
                    reason = await self._read(attempt)
                finally:
                    self._record.num_redirected += attempt.num_redirects
                cause = AbortCause.STOPPED if self._text.is_stopped else AbortCause.FINISHED
                finish = await self._finish(attempt, reason, cause)
                whole_output_tokens = finish.num_output_tokens
                return finish
            except asyncio.CancelledError:
                cause = AbortCause.CANCELLED if self._is_cancelled else AbortCause.DEADLINE
                raise
            finally:
                self._attempt = None
                attempt.close(cause)
        finally:
            done = self._parts.route.done
            for grant_id in grant_ids[:-1]:
                done(grant_id, 0)
            num_come = len(self._output_ids) - num_before
            done(grant_ids[-1], num_come, whole_output_tokens=whole_output_tokens)

    def _begin(self) -> None:
        self._record.num_attempts += 1
        self._phase = "decode" if self._output_ids else "prefill"
        if self._output_ids:
            if not self._record.num_resumed:
                self._parts.metrics.resumed()
            self._record.num_resumed += 1

    async def _read(self, attempt: Attempt) -> FinishReason:
        """Pass tokens on until a leg's end or a stop string finishes the choice."""
        while True:
            try:
                come = await attempt.next()
            except PdserveError:
                if self._output_ids and not self._num_left():
                    return FinishReason.LENGTH  # nothing but the last word was lost
                raise
            if isinstance(come, FinishReason):
                return come
            if isinstance(come, PromptLogprobs):
                self.events.put_nowait(Scored(start=come.start, logprobs=come.entries))
                continue
            for number, token in enumerate(come, 1):
                if self._emit(token):
                    self._parts.metrics.wasted(len(come) - number)
                    return FinishReason.STOP

    def _emit(self, token: Token) -> bool:
        """Pass one token on; whether a stop string ends the choice with it."""
        if not self._output_ids:
            self._record.first_token_s = self.age_s()
            self._phase = "decode"
        self._output_ids.append(token.token_id)
        self._num_failures = 0
        text = self._text.push(token.token_id)
        logprobs = () if token.logprobs is None else (token.logprobs,)
        self.events.put_nowait(Delta(text=text, token_ids=(token.token_id,), logprobs=logprobs))
        return self._text.is_stopped

    async def _finish(self, attempt: Attempt, reason: FinishReason, cause: AbortCause) -> Finish:
        text = self._text.flush()
        if self._text.is_stopped:
            reason = FinishReason.STOP
        total_s = self.age_s()
        if self._accepted.wants_timeline and attempt.merger.open_kinds:
            await self._hear_last_words(attempt, cause)
        return Finish(
            text=text,
            finish_reason=reason,
            num_prompt_tokens=len(self.request.prompt_ids),
            num_output_tokens=len(self._output_ids),
            num_cached_tokens=min(cached_tokens(attempt), len(self.request.prompt_ids) - 1),
            timeline=make_timeline(attempt, self._record, total_s),
            num_resumed=self._record.num_resumed,
        )

    async def _hear_last_words(self, attempt: Attempt, cause: AbortCause) -> None:
        """Abort what is open, and wait a moment for the durations of its legs."""
        attempt.abort(cause)
        try:
            # Its end is a good one, whatever is heard: the deadline may not pass here.
            async with asyncio.timeout(min(LAST_WORDS_S, self.remaining_s() / 2)):
                await attempt.last_words()
        except TimeoutError:
            logger.info("leg=%s gave no last word", attempt.key)

    def _worker_id(self) -> str:
        """Who is at work on it; empty while it waits for a place."""
        kinds = (LegKind.LOCAL, LegKind.PREFILL, LegKind.DECODE)
        if self._phase == "decode":
            kinds = (LegKind.LOCAL, LegKind.DECODE, LegKind.PREFILL)
        return next((self._peers[kind].worker_id for kind in kinds if kind in self._peers), "")

    def _num_left(self) -> int:
        return self.request.params.max_tokens - len(self._output_ids)

    def _log_failure(self, error: PdserveError) -> None:
        logger.warning(
            "request=%s attempt=%d stage=%s worker=%s goes on elsewhere at token=%d after %s",
            self.request.request_id,
            self._record.num_attempts - 1,
            error.stage or self._phase,
            error.worker_id or "?",
            len(self._output_ids),
            error.code,
        )

    def _log(self, end: Finish | PdserveError) -> None:
        request_id = self.request.request_id
        if isinstance(end, PdserveError) and end.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            # The client is told less: this is where the names are.
            place = (end.stage or self._phase, end.worker_id or "?")
            logger.warning("request=%s stage=%s worker=%s: %s", request_id, *place, end.message)
        outcome = end.code if isinstance(end, PdserveError) else end.finish_reason.value
        logger.info(
            "request=%s %s prompt_tokens=%d output_tokens=%d attempts=%d resumed=%d",
            request_id,
            outcome,
            len(self.request.prompt_ids),
            len(self._output_ids),
            self._record.num_attempts,
            self._record.num_resumed,
        )
