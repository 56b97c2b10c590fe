"""The life of one request in the router, from its acceptance to its one end.

    1. want    ``_place``     ask the control plane; it answers with a grant, or refuses
    2. grant   ``Attempt``    which worker does what: PREFILL + DECODE, LOCAL, or PREFILL alone
    3. legs    ``_serve``     start all legs at once, none waits for the other's answer
    4. merge   ``_merge``     tokens in index order to the reader; the first at once
    5. end     ``_live``      exactly one: a finish, or an error; legs aborted, grant given back

A failed attempt goes back to 1 while no token is out: on other workers, at most twice, within the
deadline. Each request runs in a task of its own, so a slow reader delays neither its deadline nor
the return of what it holds; what waits for the reader is bounded by ``max_tokens``.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from cluster.control.facts import Want
from cluster.errors import Cancelled, DeadlineExceeded, EngineFault, PdserveError, WorkerLost
from cluster.handoff import AbortCause
from cluster.request import FinishReason, LegEnd, LegKey, LegKind
from router.attempt import Attempt, peers_of
from router.events import Accepted, Delta, Finish
from router.merge import Merger

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.clock import Clock
    from cluster.control.facts import Grant
    from cluster.control.route_client import RouteEvents
    from router.legs import LegNews, Workers
    from router.metrics import RouterMetrics
    from router.route import Route

logger = logging.getLogger(__name__)

MAX_RETRIES = 2
MAX_LOST_WORKERS = 2
"""A request that has killed two workers is ended, not tried again."""
COMMIT_GRACE_S = 1.0
"""How long a decode worker may take to show that it had the KV before the prefill leg failed."""
LAST_WORDS_S = 0.25
"""How long a timeline waits for the durations of legs that are told to end."""


class Generation:
    """The reader's end of one request. Whoever holds it must ``cancel`` it when leaving."""

    def __init__(self, life: _Life) -> None:
        self._life = life
        self.request_id = life.request.request_id
        self.remaining_s = life.remaining_s()
        """Of its deadline, when it was made."""
        self.num_prompt_tokens = len(life.request.prompt_ids)

    async def next(self) -> Delta | Finish:
        """Return the next event; nothing follows a Finish. Raises the PdserveError that ended it.

        One reader at a time.
        """
        event = await self._life.events.get()
        if isinstance(event, PdserveError):
            raise event
        return event

    def cancel(self) -> None:
        """Stop the work, wherever it is; nothing happens where it is over. Idempotent."""
        self._life.cancel()


class Dispatcher:
    """All requests of one router; hears the control plane's events."""

    def __init__(
        self,
        *,
        route: Callable[[RouteEvents], Route],
        workers: Workers,
        clock: Clock,
        metrics: RouterMetrics,
    ) -> None:
        self.route = route(self)
        self.clock = clock
        self.workers = workers
        self.metrics = metrics
        self._lives: dict[str, tuple[_Life, asyncio.Task[None]]] = {}

    @property
    def num_open(self) -> int:
        """Requests that are not over."""
        return len(self._lives)

    async def start(self) -> None:
        """Connect to the control plane."""
        await self.route.start()

    async def stop(self) -> None:
        """Cancel everything that runs, give it back, and leave; idempotent."""
        running = list(self._lives.values())
        for life, _ in running:
            life.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)
        await self.workers.close()
        await self.route.stop()

    def submit(self, accepted: Accepted) -> Generation:
        """Start a request's life; its events come through the returned Generation."""
        self.metrics.started()
        life = _Life(accepted, self)
        task = asyncio.get_running_loop().create_task(life.run())
        life.task = task
        request_id = accepted.request.request_id
        self._lives[request_id] = (life, task)
        task.add_done_callback(lambda _: self._lives.pop(request_id, None))
        return Generation(life)

    def on_cancel(self, request_id: str) -> bool:
        """Cancel a request if it runs here; whether it did."""
        entry = self._lives.get(request_id)
        return entry is not None and entry[0].cancel()

    def on_worker_dead(self, worker_id: str, incarnation: str) -> None:
        """Take a dead worker's legs as lost."""
        self.workers.lost(worker_id, incarnation, "declared dead by the control plane")


class _Life:
    """One request, from want to end; ``run`` is its task."""

    def __init__(self, accepted: Accepted, owner: Dispatcher) -> None:
        self.request = accepted.request
        self._accepted = accepted
        self._owner = owner
        self._text = accepted.text
        self.events: asyncio.Queue[Delta | Finish | PdserveError] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._has_started = False
        self._is_over = False
        self._phase = "queue"
        self._num_attempts = 0
        self._num_output_tokens = 0
        self._first_token_s = 0.0
        self._avoid: list[str] = []

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
        metrics = self._owner.metrics
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
        metrics.ended(end, phase=self._phase, num_output_tokens=self._num_output_tokens)
        self._log(end)

    async def _live(self) -> Finish:
        try:
            async with asyncio.timeout(max(0.0, self.remaining_s())):
                while True:
                    grant = await self._place()
                    try:
                        return await self._serve(grant)
                    except PdserveError as error:
                        # Only attempts without a token are tried again.
                        if not self._may_retry(error):
                            raise
                        logger.warning(
                            "request=%s attempt=%d retried after %s",
                            self.request.request_id,
                            self._num_attempts - 1,
                            error.code,
                        )
                    finally:
                        self._owner.route.done(grant.grant_id, self._num_output_tokens)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed", stage=self._phase) from None

    def _may_retry(self, error: PdserveError) -> bool:
        is_early = self._num_output_tokens == 0 and self._num_attempts <= MAX_RETRIES
        # A deadline that passed ends the request; a full queue or no worker is the last word too.
        is_fault = error.is_retryable and error.http_status == WorkerLost.http_status
        return is_early and is_fault and len(self._avoid) < MAX_LOST_WORKERS

    async def _place(self) -> Grant:
        self._phase = "queue"
        now = self._owner.clock.now()
        want = Want(
            request_id=self.request.request_id,
            attempt=self._num_attempts,
            num_prompt_tokens=len(self.request.prompt_ids),
            max_tokens=self.request.params.max_tokens,
            waited_s=now - self._accepted.accepted,
            remaining_s=self.remaining_s(),
            avoid=tuple(self._avoid),
        )
        with self._owner.metrics.queued():
            return await self._owner.route.want(want)

    async def _serve(self, grant: Grant) -> Finish:
        """Run one attempt; whatever happens, its legs are told to end."""
        attempt = Attempt(
            grant=grant,
            peers=(peers := peers_of(grant)),
            merger=Merger(peers, max_tokens=self.request.params.max_tokens),
            key=LegKey(self.request.request_id, self._num_attempts, 0),
            granted=self._owner.clock.now(),
        )
        self._num_attempts += 1
        self._phase = "prefill"
        cause = AbortCause.FAULT
        try:
            for leg in attempt.legs(self.request, self.remaining_s()):
                peer = attempt.peers[leg.kind]
                await self._owner.workers.start(leg, peer, attempt.news.put_nowait)
            reason = await self._merge(attempt)
            cause = AbortCause.STOPPED if self._text.is_stopped else AbortCause.FINISHED
            return await self._finish(attempt, reason, cause)
        except asyncio.CancelledError:
            cause = AbortCause.CANCELLED if self._is_cancelled else AbortCause.DEADLINE
            raise
        finally:
            self._abort(attempt, cause)
            self._count_surplus(attempt)
            self._owner.metrics.attempt_ended(num_repeats=attempt.merger.num_repeats)

    async def _merge(self, attempt: Attempt) -> FinishReason:
        """Pass tokens on until a leg's end or a stop string finishes the choice."""
        merger = attempt.merger
        while True:
            kind, said = await self._hear(attempt)
            if isinstance(said, LegEnd):
                if isinstance(said.error, WorkerLost):
                    self._avoid.append(attempt.lost_incarnation(kind, said.error))
                reason = merger.end(kind, said)
                if reason is not None:
                    return reason
                continue
            due = merger.token(kind, said)
            for number, token_id in enumerate(due, 1):
                if self._emit(token_id):
                    self._owner.metrics.wasted(len(due) - number)
                    return FinishReason.STOP

    async def _hear(self, attempt: Attempt) -> LegNews:
        if attempt.merger.doubt is None:
            return await attempt.news.get()
        try:
            return await asyncio.wait_for(attempt.news.get(), COMMIT_GRACE_S)
        except TimeoutError:
            raise attempt.merger.doubt from None

    def _emit(self, token_id: int) -> bool:
        """Pass one token on; whether a stop string ends the choice with it."""
        if self._num_output_tokens == 0:
            self._first_token_s = self._owner.clock.now() - self._accepted.accepted
            self._phase = "decode"
        self._num_output_tokens += 1
        text = self._text.push(token_id)
        self.events.put_nowait(Delta(text=text, token_ids=(token_id,)))
        return self._text.is_stopped

    async def _finish(self, attempt: Attempt, reason: FinishReason, cause: AbortCause) -> Finish:
        text = self._text.flush()
        if self._text.is_stopped:
            reason = FinishReason.STOP
        total_s = self._owner.clock.now() - self._accepted.accepted
        if self._accepted.wants_timeline and attempt.merger.open_kinds:
            await self._hear_last_words(attempt, cause)
        return Finish(
            text=text,
            finish_reason=reason,
            num_prompt_tokens=len(self.request.prompt_ids),
            num_output_tokens=self._num_output_tokens,
            timeline=attempt.timeline(
                total_s=total_s,
                first_token_s=self._first_token_s,
                queue_s=attempt.granted - self._accepted.accepted,
                num_attempts=self._num_attempts,
            ),
        )

    def _abort(self, attempt: Attempt, cause: AbortCause) -> None:
        for kind, peer in attempt.peers.items():
            # After a good end the decode worker's COMMIT ends the prefill leg, if it hasn't yet.
            if cause is not AbortCause.FINISHED or kind is not LegKind.PREFILL:
                self._owner.workers.abort(peer, attempt.key, cause)

    async def _hear_last_words(self, attempt: Attempt, cause: AbortCause) -> None:
        """Abort what is open, and wait a moment for the durations of its legs."""
        self._abort(attempt, cause)
        loop = asyncio.get_running_loop()
        until = loop.time() + LAST_WORDS_S
        try:
            async with asyncio.timeout_at(until):
                while attempt.merger.open_kinds:
                    kind, said = await attempt.news.get()
                    if isinstance(said, LegEnd):
                        attempt.merger.last_word(kind, said)
                    else:
                        self._owner.metrics.wasted(attempt.surplus((kind, said)))
        except TimeoutError:
            logger.info("leg=%s gave no last word", attempt.key)

    def _count_surplus(self, attempt: Attempt) -> None:
        """Count as wasted what the legs have made too much, now and until they end."""
        metrics = self._owner.metrics

        def waste(news: LegNews) -> None:
            metrics.wasted(attempt.surplus(news))

        while not attempt.news.empty():
            waste(attempt.news.get_nowait())
        for peer in attempt.peers.values():
            self._owner.workers.pass_to(peer, attempt.key, waste)

    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return self.request.deadline - self._owner.clock.now()

    def _log(self, end: Finish | PdserveError) -> None:
        request_id = self.request.request_id
        if isinstance(end, PdserveError) and end.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            # The client is told less: this is where the names are.
            place = (end.stage or self._phase, end.worker_id or "?")
            logger.warning("request=%s stage=%s worker=%s: %s", request_id, *place, end.message)
        outcome = end.code if isinstance(end, PdserveError) else end.finish_reason.value
        logger.info(
            "request=%s %s prompt_tokens=%d output_tokens=%d attempts=%d",
            request_id,
            outcome,
            len(self.request.prompt_ids),
            self._num_output_tokens,
            self._num_attempts,
        )
