"""The control plane's streams: facts in, the planner's decisions out.

Everything runs on one event loop and nothing awaits between a fact and its decisions, so that the
planner sees facts one by one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from typing import TYPE_CHECKING, Any

import grpc

from cluster.control import convert, convert_view
from cluster.control.cancels import Answer, CancelDesk
from cluster.control.decisions import AbortLegs, Decision, SendGrant, SendReject, WorkerDied
from cluster.control.facts import Reject
from cluster.control.planner import Planner
from cluster.control.session import Session
from cluster.errors import InvalidRequest, PdserveError, StartupError
from cluster.wire import control_pb2 as pb
from cluster.wire import control_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from cluster.clock import Clock
    from cluster.config import DeployConfig
    from cluster.control.facts import Registration
    from cluster.control.settings import ControlSettings
    from cluster.policy.load import Load

logger = logging.getLogger(__name__)

_RouterSession = Session[pb.RouteDecision]
_WorkerSession = Session[pb.Directive]

_MAX_SHOWN_CHARS = 64
_KEY_BYTES = 32


class Desk(pb_grpc.ControlServicer):
    """The servicer: sessions by name, and what decisions mean for them."""

    def __init__(
        self, config: DeployConfig, clock: Clock, *, settings: ControlSettings, term: int
    ) -> None:
        self.has_changed = asyncio.Event()
        self._clock = clock
        self._term = term
        self._make_planner = functools.partial(Planner, config, term=term, settings=settings)
        self._planner = self._make_planner(now=clock.now())
        # Of this process alone: who comes after it has to learn all names anew anyway.
        self._prefix_key = secrets.token_bytes(_KEY_BYTES)
        self._cancels = CancelDesk(settings.cancel_timeout_s)
        self._routers: dict[str, _RouterSession] = {}
        self._workers: dict[str, _WorkerSession] = {}
        self._watchers: set[Session[pb.ClusterView]] = set()

    # ---- for the server

    def begin(self) -> None:
        """Count the time since the start from now on: before this nobody could come back."""
        self._planner = self._make_planner(now=self._clock.now())

    def tick(self) -> None:
        """Let time pass."""
        now = self._clock.now()
        self._answer(self._cancels.tick(now))
        self._carry_out(self._planner.tick(now), is_change=False)

    def push_view(self) -> None:
        """Send the view to whoever follows it."""
        self.has_changed.clear()
        view = self._view()
        for session in self._routers.values():
            session.put_view(pb.RouteDecision(view=view))
        for watcher in self._watchers:
            watcher.put_view(view)

    def load(self) -> Load:
        """Return what scaling goes by."""
        return self._planner.load()

    def close(self) -> None:
        """End every stream."""
        sessions: list[Session[Any]] = [*self._routers.values(), *self._workers.values()]
        for session in [*sessions, *self._watchers]:
            session.close()

    # ---- rpc

    async def Route(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.RouterFact], context: Any
    ) -> None:
        """Serve one router until either side hangs up."""
        hello = await _first(request_iterator, "hello")
        if hello is None or not hello.hello.router_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "hello comes first")
        router_id, incarnation = hello.hello.router_id, hello.hello.incarnation
        session = _RouterSession(router_id, incarnation)
        self._replace(self._routers, session)
        welcome = pb.RouterWelcome(term=self._term, prefix_key=self._prefix_key)
        session.put(pb.RouteDecision(welcome=welcome))
        session.put_view(pb.RouteDecision(view=self._view()))
        self._carry_out(self._planner.router_joined(router_id, incarnation, self._clock.now()))
        try:
            await session.serve(
                request_iterator, lambda fact: self._router_fact(session, fact), context.write
            )
        finally:
            if self._routers.get(router_id) is session:
                del self._routers[router_id]
                self._answer(self._cancels.router_gone(router_id))
                self._carry_out(
                    self._planner.router_left(router_id, incarnation, self._clock.now())
                )

    async def Report(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.WorkerFact], context: Any
    ) -> None:
        """Serve one worker until either side hangs up."""
        first = await _first(request_iterator, "register")
        if first is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "register comes first")
        try:
            registration = self._registration(first.register)
            decisions = self._planner.register(registration, self._clock.now())
        except (InvalidRequest, StartupError) as error:
            worker_id = first.register.worker_id[:_MAX_SHOWN_CHARS]
            logger.warning("worker=%s refused: %s", worker_id, error)
            self.has_changed.set()
            await context.write(pb.Directive(refused=pb.Refused(reason=error.message)))
            return
        worker_id, incarnation = registration.worker_id, registration.incarnation
        logger.info("worker=%s incarnation=%s pool=%s registered", worker_id, incarnation,
                    registration.pool)  # fmt: skip
        self._carry_out(decisions)
        session = _WorkerSession(worker_id, incarnation)
        self._replace(self._workers, session)
        session.put(pb.Directive(accepted=pb.Accepted(term=self._term)))
        try:
            await session.serve(
                request_iterator, lambda fact: self._worker_fact(session, fact), context.write
            )
        finally:
            if self._workers.get(worker_id) is session:
                del self._workers[worker_id]
                self._carry_out(
                    self._planner.worker_stream_lost(worker_id, incarnation, self._clock.now())
                )

    def _registration(self, message: pb.Register) -> Registration:
        try:
            return convert.registration_from_wire(message)
        except InvalidRequest as error:
            worker_id = message.worker_id[:_MAX_SHOWN_CHARS]
            pool = message.pool[:_MAX_SHOWN_CHARS]
            self._planner.refused(worker_id, pool, error.message, self._clock.now())
            raise

    async def GetCluster(self, request: pb.GetClusterRequest, context: Any) -> pb.ClusterView:
        """Answer with the view."""
        return self._view()

    async def Order(self, request: pb.WorkerOrder, context: Any) -> pb.OrderGiven:
        """Pass an operator's order on to a worker."""
        try:
            role = convert.role_from_wire("role", request.role) if request.role else None
            told = self._planner.take_order(request.worker_id, role, self._clock.now())
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        order = pb.Directive(drain=pb.Drain(term=self._term))
        if role is not None:
            order = pb.Directive(role=pb.TakeRole(term=self._term, role=role.value))
        self._workers[told.worker_id].put(order)
        logger.info("worker=%s told to %s", told.worker_id,
                    f"be a {role.value} worker" if role else "drain")  # fmt: skip
        return pb.OrderGiven(incarnation=told.incarnation)

    async def WatchCluster(
        self, request: pb.GetClusterRequest, context: Any
    ) -> AsyncIterator[pb.ClusterView]:
        """Send the view, and again whenever it changes."""
        watcher: Session[pb.ClusterView] = Session("watcher", "")
        watcher.put_view(self._view())
        self._watchers.add(watcher)
        try:
            async for view in watcher.messages():
                yield view
        finally:
            self._watchers.discard(watcher)

    # ---- facts

    def _router_fact(self, session: _RouterSession, fact: pb.RouterFact) -> None:
        if self._routers.get(session.name) is not session:
            return
        now, kind = self._clock.now(), fact.WhichOneof("kind")
        if kind == "want":
            self._wanted(session, fact.want, now)
        elif kind == "cancel":
            cancel = fact.cancel
            self._carry_out(self._planner.cancel_want(cancel.request_id, cancel.attempt, now))
        elif kind == "done":
            done = fact.done
            decisions = self._planner.done(
                done.grant_id,
                done.num_output_tokens,
                now,
                whole_output_tokens=done.whole_output_tokens,
            )
            self._carry_out(decisions)
        elif kind == "cancel_request":
            self._cancel_asked(session, fact.cancel_request, now)
        elif kind == "cancel_result":
            result = fact.cancel_result
            self._answer(self._cancels.answered(session.name, result.cancel_id, result.was_running))

    def _wanted(self, session: _RouterSession, message: pb.Want, now: float) -> None:
        try:
            want = convert.want_from_wire(message)
        except PdserveError as error:
            reject = Reject(request_id=message.request_id, attempt=message.attempt, error=error)
            wire = convert.reject_to_wire(reject, self._term)
            session.put(pb.RouteDecision(reject=wire))
            return
        self._carry_out(self._planner.want(session.name, want, now))

    def _cancel_asked(self, session: _RouterSession, asked: pb.CancelRequest, now: float) -> None:
        others = [name for name in self._routers if name != session.name]
        outcome = self._cancels.ask(session.name, asked.cancel_id, others, now)
        if isinstance(outcome, Answer):
            self._answer([outcome])
            return
        order = pb.CancelOrder(request_id=asked.request_id, cancel_id=outcome)
        for name in others:
            self._routers[name].put(pb.RouteDecision(cancel=order))

    def _worker_fact(self, session: _WorkerSession, fact: pb.WorkerFact) -> None:
        worker_id, incarnation = session.name, session.incarnation
        if self._workers.get(worker_id) is not session:
            return
        now, kind = self._clock.now(), fact.WhichOneof("kind")
        if kind == "report":
            if not session.is_next(fact.report.number):
                logger.warning("worker=%s report=%d came late", worker_id, fact.report.number)
                return
            report = convert.report_from_wire(fact.report)
            self._carry_out(self._planner.report(worker_id, incarnation, report, now))
        elif kind == "leave":
            reason = fact.leave.reason[:256]
            self._carry_out(self._planner.worker_left(worker_id, incarnation, reason, now))

    def _view(self) -> pb.ClusterView:
        return convert_view.view_to_wire(self._planner.view(self._clock.now()))

    # ---- decisions

    def _carry_out(self, decisions: Iterable[Decision], *, is_change: bool = True) -> None:
        decisions = list(decisions)
        if is_change or decisions:
            self.has_changed.set()
        for decision in decisions:
            if isinstance(decision, SendGrant):
                grant = convert.grant_to_wire(decision.grant)
                self._to_router(decision.router_id, pb.RouteDecision(grant=grant))
            elif isinstance(decision, SendReject):
                reject = convert.reject_to_wire(decision.reject, self._term)
                self._to_router(decision.router_id, pb.RouteDecision(reject=reject))
            elif isinstance(decision, WorkerDied):
                self._worker_died(decision)
            else:
                self._abort_legs(decision)

    def _to_router(self, router_id: str, message: pb.RouteDecision) -> None:
        session = self._routers.get(router_id)
        if session is not None:
            session.put(message)

    def _worker_died(self, died: WorkerDied) -> None:
        dead = pb.WorkerDead(worker_id=died.worker_id, incarnation=died.incarnation)
        for session in self._routers.values():
            session.put(pb.RouteDecision(dead=dead))
        worker = self._workers.get(died.worker_id)
        if worker is not None and worker.incarnation == died.incarnation:
            # If it is alive after all, it registers again.
            del self._workers[died.worker_id]
            worker.close()

    def _abort_legs(self, order: AbortLegs) -> None:
        worker = self._workers.get(order.worker_id)
        if worker is not None:
            abort = pb.AbortGrant(term=self._term, grant_id=order.grant_id)
            worker.put(pb.Directive(abort=abort))

    def _answer(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            result = pb.CancelResult(cancel_id=answer.cancel_id, was_running=answer.was_running)
            self._to_router(answer.router_id, pb.RouteDecision(cancel_result=result))

    def _replace(self, sessions: dict[str, Session[Any]], session: Session[Any]) -> None:
        old = sessions.get(session.name)
        if old is not None:
            old.close()
        sessions[session.name] = session


async def _first(facts: AsyncIterator[Any], kind: str) -> Any:
    """Return the first message if it is of this kind."""
    async for fact in facts:
        return fact if fact.WhichOneof("kind") == kind else None
    return None
