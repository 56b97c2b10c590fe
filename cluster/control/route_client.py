"""A router's end of the Route stream: wants up, grants down, over any loss of the control plane.

A want's life here:
    1. ``want`` keeps it in ``_waiting`` and sends it; every new stream sends it again, with the
       time it has waited (``_welcomed``), and so do long waits on the same one (``_viewed``)
    2. a grant or a reject takes it out (``_granted``, ``_rejected``); so does the end of its
       deadline, a cancel by its caller, or a control plane that stays away too long. A grant that
       was lost is missed by the control plane, and wanted again (``_missed``)
    3. a grant whose caller is gone is given back at once; the others live in ``_held`` until
       ``done``
Legs that run need nothing from here: they go on while the control plane is away.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, cast

from cluster.control import connection, convert, convert_view
from cluster.control.facts import ClusterView, Grant, Reject, Want
from cluster.errors import Cancelled, DeadlineExceeded, NoWorker, PdserveError, WorkerLost
from cluster.wire import control_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.clock import Clock
    from cluster.trust import ClusterToken

logger = logging.getLogger(__name__)

WantKey = tuple[str, int]
"""(request_id, attempt)."""

_MAX_UNSENT_DONES = 4096
_LOOK_S = 0.25
_GAP_S = 1.0
"""After a longer gap between two looks it was this router that had been stopped."""


class RouteEvents(Protocol):
    """What the router is told, on its event loop."""

    def on_cancel(self, request_id: str) -> bool:
        """Somebody cancels a request; return whether it was running here."""
        ...

    def on_worker_dead(self, worker_id: str, incarnation: str) -> None:
        """A worker was declared dead: legs on this incarnation are lost."""
        ...

    def on_leg_missed(self, request_id: str, attempt: int, error: PdserveError) -> None:
        """The worker that was to compute an attempt lives, and reports no leg of it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteTiming:
    """How long a router puts up with a control plane that is away."""

    unreachable_after_s: float = 15.0
    """Then wants end with NoWorker: better come back than wait for the deadline. A control plane
    that was stopped for 10 s is waited for."""
    resend_after_s: float = 3.0
    """A want that is not answered is sent again: it, or its answer, may have been lost."""
    backoff: connection.Backoff = field(default_factory=connection.Backoff)


@dataclass(slots=True)
class _Waiting:
    want: Want
    since: float
    sent: float
    answer: asyncio.Future[Grant]
    was_sent: bool = False
    """On a stream that was open: the control plane may have let it in."""


class RouteClient:
    """Places requests through the control plane at ``address``; reconnects by itself."""

    def __init__(  # noqa: PLR0913 (who it is, and what it shows)
        self,
        address: str,
        *,
        router_id: str,
        incarnation: str,
        clock: Clock,
        events: RouteEvents,
        timing: RouteTiming | None = None,
        token: ClusterToken | None = None,
    ) -> None:
        self._hello = pb.RouterHello(router_id=router_id, incarnation=incarnation)
        self._clock = clock
        self._events = events
        self._timing = timing or RouteTiming()
        self._stream: connection.Connection[pb.RouterFact, pb.RouteDecision] = (
            connection.Connection(
                address,
                lambda stub: cast("Callable[[], object]", stub.Route),
                events=self,
                name=f"route:{router_id}",
                backoff=self._timing.backoff,
                token=token,
            )
        )
        self._waiting: dict[WantKey, _Waiting] = {}
        self._held: set[str] = set()
        self._unsent_dones: list[pb.Done] = []
        self._cancels: dict[int, asyncio.Future[bool]] = {}
        self._cancel_ids = itertools.count(1)
        self._term = 0
        self._prefix_key = b""
        self._is_connected = False
        self._away_since = clock.now()
        self._view: ClusterView | None = None
        self._view_at = 0.0
        self._looked_at = clock.now()
        self._looking: asyncio.Task[None] | None = None

    # ---- for the router

    @property
    def view(self) -> ClusterView | None:
        """The last snapshot; None before the first."""
        return self._view

    @property
    def prefix_key(self) -> bytes:
        """The control plane's key for naming prompts' beginnings; empty before it has told one."""
        return self._prefix_key

    @property
    def is_connected(self) -> bool:
        """Whether the control plane answers on the stream."""
        return self._is_connected

    @property
    def awaits_first_view(self) -> bool:
        """Whether no snapshot has come yet, of a control plane that may still be coming."""
        return self._view is None and not self._is_unreachable()

    def view_age_s(self, now: float) -> float:
        """Seconds since the last snapshot came; infinite before the first.

        Without those in which this router was stopped, and could hear nothing.
        """
        if self._view is None:
            return float("inf")
        return now - self._stopped_s(now) - self._view_at

    def set_tap(self, tap: connection.Tap | None) -> None:
        """Let faults be injected between this client and its stream; None: none, as at first."""
        self._stream.tap = tap

    async def start(self) -> None:
        """Start dialling; wants may be made at once."""
        self._away_since = self._looked_at = self._clock.now()
        self._stream.start()
        self._looking = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """Hang up; who still waits gets Cancelled."""
        if self._looking is not None:
            self._looking.cancel()
        self._fail_waiting(lambda: Cancelled("the router is stopping", stage="placement"))
        await self._stream.stop()
        self._fail_cancels()

    async def want(self, want: Want) -> Grant:
        """Wait for the placement of one attempt.

        Raises the reject's error; DeadlineExceeded when ``remaining_s`` has passed; NoWorker when
        the control plane has been away for too long. Cancelling the awaiting task withdraws the
        want, or gives the grant back that has crossed the cancel.
        """
        key = (want.request_id, want.attempt)
        if key in self._waiting:
            raise AssertionError(f"{key} is wanted twice")
        if self._is_unreachable():
            raise self._unreachable()
        answer: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        now = self._clock.now()
        waiting = _Waiting(want=want, since=now, sent=now, answer=answer)
        self._waiting[key] = waiting
        self._send_want(waiting)
        is_answered = False
        try:
            async with asyncio.timeout(max(0.0, want.remaining_s)):
                grant = await answer
            is_answered = True
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed in the queue", stage="queue") from error
        except PdserveError:
            is_answered = True
            raise
        finally:
            if not is_answered:
                self._withdraw(key, answer)
        return grant

    def done(self, grant_id: str, num_output_tokens: int, *, whole_output_tokens: int = 0) -> None:
        """Give a grant back, once its legs have ended or were aborted; unknown ids are ignored."""
        if grant_id not in self._held:
            return
        self._held.discard(grant_id)
        self._send_done(
            pb.Done(
                grant_id=grant_id,
                num_output_tokens=num_output_tokens,
                whole_output_tokens=whole_output_tokens,
            )
        )

    async def cancel_request(self, request_id: str, timeout_s: float) -> bool:
        """Ask the other routers to cancel a request; whether it was running at one of them.

        Raises NoWorker where no answer comes within ``timeout_s``, or no control plane is there.
        """
        cancel_id = next(self._cancel_ids)
        order = pb.CancelRequest(request_id=request_id, cancel_id=cancel_id)
        if not self._is_connected or not self._stream.send(pb.RouterFact(cancel_request=order)):
            raise NoWorker("the control plane is away", stage="cancel", retry_after_s=1.0)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._cancels[cancel_id] = answer
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise NoWorker(
                "the control plane did not answer in time", stage="cancel", retry_after_s=1.0
            ) from error
        finally:
            self._cancels.pop(cancel_id, None)

    # ---- for the connection

    def on_dialled(self, send: Callable[[pb.RouterFact], None]) -> None:
        """Say who we are."""
        send(pb.RouterFact(hello=self._hello))

    def on_message(self, message: pb.RouteDecision) -> None:
        """Take one decision."""
        kind = message.WhichOneof("kind")
        if kind == "welcome":
            self._prefix_key = message.welcome.prefix_key
            self._welcomed(message.welcome.term)
        elif kind == "grant":
            self._granted(convert.grant_from_wire(message.grant))
        elif kind == "reject":
            self._rejected(convert.reject_from_wire(message.reject), message.reject.term)
        elif kind == "view":
            self._viewed(convert_view.view_from_wire(message.view))
        elif kind == "dead":
            self._events.on_worker_dead(message.dead.worker_id, message.dead.incarnation)
        elif kind == "cancel":
            self._cancel_ordered(message.cancel)
        elif kind == "cancel_result":
            self._cancel_answered(message.cancel_result)

    def on_lost(self, num_failures: int) -> None:
        """Keep the wants for the next stream, unless the control plane has been away too long."""
        if self._is_connected:
            self._is_connected = False
            self._away_since = self._clock.now()
        self._fail_cancels()
        if self._is_unreachable():
            self._fail_waiting(self._unreachable)

    # ---- inside

    async def _look(self) -> None:
        while True:
            now = self._clock.now()
            stopped_s = self._stopped_s(now)
            self._view_at += stopped_s
            self._away_since += stopped_s
            self._looked_at = now
            await asyncio.sleep(_LOOK_S)

    def _stopped_s(self, now: float) -> float:
        """Return how long this router had been stopped since its last look."""
        gap_s = now - self._looked_at
        return gap_s if gap_s > _GAP_S else 0.0

    def _welcomed(self, term: int) -> None:
        """Give back what was done meanwhile, and want again what still waits."""
        if term < self._term:
            logger.warning("term=%d is older than %d: an old control plane", term, self._term)
        self._term = max(self._term, term)
        self._is_connected = True
        dones, self._unsent_dones = self._unsent_dones, []
        for done in dones:
            self._send_done(done)
        for waiting in self._waiting.values():
            self._send_want(waiting)

    def _viewed(self, view: ClusterView) -> None:
        """Keep the snapshot. One comes each second: time to look whose answer is overdue."""
        now = self._clock.now()
        self._view, self._view_at = view, now - self._stopped_s(now)
        for waiting in self._waiting.values():
            if now - waiting.sent >= self._timing.resend_after_s:
                self._send_want(waiting)

    def _granted(self, grant: Grant) -> None:
        if grant.term < self._term:
            logger.warning("grant=%s of old term=%d dropped", grant.grant_id, grant.term)
            return
        waiting = self._waiting.pop((grant.request_id, grant.attempt), None)
        if waiting is not None and not waiting.answer.done():
            self._held.add(grant.grant_id)
            waiting.answer.set_result(grant)
        elif grant.grant_id not in self._held:
            self._send_done(pb.Done(grant_id=grant.grant_id))

    def _rejected(self, reject: Reject, term: int) -> None:
        if term < self._term:
            return
        key = (reject.request_id, reject.attempt)
        if isinstance(reject.error, WorkerLost):
            self._missed(key, reject.error)
            return
        waiting = self._waiting.pop(key, None)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_exception(reject.error)

    def _missed(self, key: WantKey, error: WorkerLost) -> None:
        """A grant's leg is nowhere: either its start was lost, or the grant itself."""
        waiting = self._waiting.get(key)
        if waiting is not None:
            self._send_want(waiting)
        else:
            self._events.on_leg_missed(*key, error)

    def _withdraw(self, key: WantKey, answer: asyncio.Future[Grant]) -> None:
        """The caller is gone: take the want back, or the grant that it did not live to see."""
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            self.done(answer.result().grant_id, 0)
            return
        waiting = self._waiting.get(key)
        if waiting is not None and waiting.answer is answer:
            del self._waiting[key]
            cancel = pb.CancelWant(request_id=key[0], attempt=key[1])
            self._stream.send(pb.RouterFact(cancel=cancel))

    def _send_done(self, done: pb.Done) -> None:
        is_sent = self._stream.send(pb.RouterFact(done=done))
        if not is_sent and len(self._unsent_dones) < _MAX_UNSENT_DONES:
            self._unsent_dones.append(done)

    def _send_want(self, waiting: _Waiting) -> None:
        """Send it, where there is a stream. One that no stream has had yet may still be refused."""
        waiting.sent = self._clock.now()
        here_s = waiting.sent - waiting.since
        want = replace(
            waiting.want,
            waited_s=waiting.want.waited_s + here_s,
            remaining_s=waiting.want.remaining_s - here_s,
            is_resent=waiting.was_sent,
        )
        is_sent = self._stream.send(pb.RouterFact(want=convert.want_to_wire(want)))
        waiting.was_sent = waiting.was_sent or is_sent

    def _cancel_ordered(self, order: pb.CancelOrder) -> None:
        was_running = self._events.on_cancel(order.request_id)
        result = pb.CancelResult(cancel_id=order.cancel_id, was_running=was_running)
        self._stream.send(pb.RouterFact(cancel_result=result))

    def _cancel_answered(self, result: pb.CancelResult) -> None:
        answer = self._cancels.pop(result.cancel_id, None)
        if answer is not None and not answer.done():
            answer.set_result(result.was_running)

    def _fail_cancels(self) -> None:
        cancels, self._cancels = self._cancels, {}
        for answer in cancels.values():
            if not answer.done():
                answer.set_exception(
                    NoWorker("the control plane is away", stage="cancel", retry_after_s=1.0)
                )

    def _fail_waiting(self, make_error: Callable[[], PdserveError]) -> None:
        waiting, self._waiting = self._waiting, {}
        for entry in waiting.values():
            if not entry.answer.done():
                entry.answer.set_exception(make_error())

    def _is_unreachable(self) -> bool:
        now = self._clock.now()
        away_s = now - self._stopped_s(now) - self._away_since
        return not self._is_connected and away_s > self._timing.unreachable_after_s

    def _unreachable(self) -> NoWorker:
        return NoWorker("the control plane is away", stage="placement", retry_after_s=2.0)
