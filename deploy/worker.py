"""One worker: an engine and a KV pool, with the prefill half, the decode half, or both.

    routers ──legs──▶ WorkerServer ──▶ WorkerLegs ──▶ PrefillHalf, DecodeHalf ──▶ EngineLoop
    engine's step thread ──one call a step──▶ event loop ──▶ halves ──▶ routers
    other workers ◀──links──▶ Outbox, Inbox          control plane ◀──reports── Worker

Everything but steps and the movement of bytes happens on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import uuid
from typing import TYPE_CHECKING, Any

from cluster.clock import Clock, SystemClock
from cluster.config import Role
from cluster.control.membership import LEFT_FOR_FAULT
from cluster.control.report_client import ReportClient
from cluster.engine.loop import EngineLoop
from cluster.engine.rules import Rules
from cluster.engine.scheduler import StepScheduler
from cluster.engine.step_model import StepModel
from cluster.errors import StartupError, WorkerLost
from cluster.policy.tiers import Tiers
from cluster.request import Peer
from cluster.rpc.errands import Errands
from cluster.rpc.leg_rules import LegRules
from cluster.rpc.link_acceptor import LinkAcceptor
from cluster.rpc.link_dialer import LinkDialer
from cluster.rpc.server import WorkerServer
from cluster.trust import ClusterToken
from decode_worker.inbox import Inbox
from decode_worker.streams import DecodeHalf
from deploy.node import own_address
from deploy.worker_faults import WorkerFaults
from deploy.worker_legs import WorkerLegs
from deploy.worker_life import WorkerLife, WorkerState
from deploy.worker_parts import WorkerParts, link_limits, make_block_pool
from deploy.worker_report import WorkerReporter
from deploy.worker_watch import WorkerWatch
from prefill_worker.intake import PrefillHalf
from prefill_worker.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.config import DeployConfig, PoolConfig
    from cluster.engine.plan import StepEvents
    from cluster.rpc.link import LinkEvents

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 45.0
"""For the control plane to accept a worker, which may start before it."""
_ENGINE_STOP_S = 5.0


class Worker:
    """Composes a worker. ``start`` returns when it is registered; ``stop`` is idempotent."""

    def __init__(  # noqa: PLR0913 (what it is made of, and where it is)
        self,
        config: DeployConfig,
        pool: PoolConfig,
        parts: WorkerParts,
        *,
        worker_id: str,
        control_address: str,
        port: int = 0,
        on_order: Callable[[Role | None], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``pool`` has the role that it serves in, which need not be that of the deploy file.

        ``port`` 0 takes any that is free. ``on_order`` is told of an operator's order: to drain and
        leave, or to come back in a role.
        """
        self.worker_id = worker_id
        self.incarnation = uuid.uuid4().hex
        self._config = config
        self._control_address = control_address
        self._faults = WorkerFaults(config)
        self._parts = parts = self._faults.parts(parts)
        self._clock = clock or SystemClock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fault: asyncio.Future[BaseException] | None = None
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._life = WorkerLife()
        self._stopping: asyncio.Task[None] | None = None
        self.has_let_go = False
        """Whether, when it has stopped, nothing of it writes to the cache any more."""
        self._errands = Errands(call_soon=self._call_soon, on_failure=self._fail)
        self._token = ClusterToken.load(config.security)
        self._pool = make_block_pool(config, pool, parts.layout)
        self._rules = Rules.of(config.scheduling, pool)
        self._engine = self._make_engine(pool)
        self._dialer: LinkDialer | None = None
        self._acceptor: LinkAcceptor | None = None
        self.legs = self._make_legs(pool)
        self._watch = WorkerWatch(
            clock=self._clock,
            engine=self._engine,
            pool=self._pool,
            halves=self.legs.halves,
            are_links_moving=self._are_links_moving,
            on_fault=self._fail,
        )
        self._server = WorkerServer(
            self._faults.legs(self.legs),
            self._acceptor,
            incarnation=self.incarnation,
            host=own_address(config),
            port=port,
            services=self._faults.services(),
            beat=self._engine.beat,
            is_well=lambda: self._reporter.is_well(),
            token=self._token,
        )
        self._reporter = WorkerReporter(
            pool=pool,
            parts=parts,
            blocks=self._pool,
            engine=self._engine,
            legs=self.legs,
            acceptor=self._acceptor,
            token=self._token,
            watch=self._watch,
            life=self._life,
            pool_role=config.pool(pool.name).role,
            rules=self._rules,
            clock=self._clock,
        )
        self._report = ReportClient(
            control_address,
            registration=lambda: self._reporter.registration(self.me),
            report=self._reporter.report,
            on_abort_grant=self.legs.abort_grant,
            on_order=on_order,
            clock=self._clock,
            token=self._token,
        )
        self._report.set_tap(self._faults.tap())
        # Also by links that read or wrote them when their leg had ended already.
        self._pool.subscribe(lambda: self._call_soon(self._report.changed))
        self.me = Peer(worker_id=worker_id, incarnation=self.incarnation, address="")

    @property
    def fault(self) -> asyncio.Future[BaseException]:
        """Done, with the error, when this worker can serve no more: its process must end."""
        if self._fault is None:
            self._fault = asyncio.get_running_loop().create_future()
        return self._fault

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Listen, start the step thread, and return when the control plane has accepted this.

        Raises StartupError where it refuses or isn't there in time, where this worker fails
        before that, or where the port is taken.
        """
        self._loop = asyncio.get_running_loop()
        address = await self._server.start()
        self.me = Peer(worker_id=self.worker_id, incarnation=self.incarnation, address=address)
        self._engine.start()
        self._watching = self._loop.create_task(self._watch.run())
        await self._report.start()
        try:
            await self._until_accepted(timeout_s)
        except StartupError:
            await self.stop(0.0)
            raise
        self._life.advance(WorkerState.SERVING, self._clock.now())
        self._report.refused.add_done_callback(self._refused)
        logger.info(
            "worker=%s incarnation=%s at=%s ready", self.worker_id, self.incarnation, address
        )

    async def drain(self, grace_s: float) -> None:
        """Take no new work; return when nothing is left here, or after ``grace_s``.

        It stays registered meanwhile, so that exports find their way to decode workers and those
        who leave it to others. A worker that was not accepted yet has nothing to drain.
        """
        if self._life.advance(WorkerState.DRAINING, self._clock.now()):
            logger.info("worker=%s drains, legs=%d", self.worker_id, len(self.legs))
            await self._server.tell_health()
            self._report.changed()
        if self._life.state is not WorkerState.DRAINING or self.fault.done():
            return
        leaving = asyncio.ensure_future(self._until_left(grace_s))
        # One that has failed ends none of its legs: it is not waited for.
        ends: set[asyncio.Future[Any]] = {leaving, self.fault}
        try:
            await asyncio.wait(ends, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
        logger.info("worker=%s drained, legs=%d left", self.worker_id, len(self.legs))

    async def _until_left(self, grace_s: float) -> None:
        await asyncio.sleep(self._life.last_grants_s(self._clock.now()))
        await self._until_idle(grace_s)

    async def stop(self, grace_s: float) -> None:
        """Leave the control plane, give open legs ``grace_s`` to end, end them, and close all.

        Idempotent; it goes on to its end when its caller is cancelled.
        """
        if self._stopping is None:
            self._life.advance(WorkerState.STOPPING, self._clock.now())
            self._stopping = asyncio.get_running_loop().create_task(self._stop(grace_s))
        await asyncio.shield(self._stopping)

    async def _stop(self, grace_s: float) -> None:
        await self._report.stop("stopping")
        await self._until_idle(grace_s)
        self.legs.close(WorkerLost("the worker is stopping", worker_id=self.worker_id))
        self.has_let_go = await asyncio.to_thread(self._engine.stop, _ENGINE_STOP_S)
        await self._until_idle(1.0)
        if self._dialer is not None:
            await self._dialer.close()
        if self._acceptor is not None:
            await self._acceptor.close()
        await self._server.stop(1.0)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        logger.info("worker=%s stopped, legs=%d", self.worker_id, len(self.legs))

    # ---- composition

    def _make_engine(self, pool: PoolConfig) -> EngineLoop:
        scheduler = StepScheduler(
            self._pool, pool.block_size, pool.max_num_seqs, pool.token_budget, pool.chunk_tokens,
            self._parts.max_model_len, self._rules,
        )  # fmt: skip
        speed = self._parts.speed
        return EngineLoop(
            scheduler=scheduler,
            runner=self._parts.runner,
            clock=self._clock,
            on_events=lambda events: self._errands.soon(functools.partial(self._on_step, events)),
            on_fault=lambda error: self._errands.soon(functools.partial(self._fail, error)),
            pin=self._parts.pin,
            speed=StepModel(speed.base_s, speed.per_seq_s, speed.prefill_per_token_s),
            copier=self._parts.copier,
        )

    def _make_legs(self, pool: PoolConfig) -> WorkerLegs:
        parts = self._parts
        return WorkerLegs(
            self._make_prefill() if pool.role is not Role.DECODE else None,
            self._make_decode(pool) if pool.role is not Role.PREFILL else None,
            rules=LegRules(
                layout=parts.layout,
                num_blocks=pool.num_blocks,
                max_model_len=parts.max_model_len,
                vocab_size=parts.vocab_size,
                worker_id=self.worker_id,
                tiers=Tiers.of(self._config.scheduling),
            ),
            check_state=self._check_state,
            clock=self._clock,
        )

    def _make_prefill(self) -> PrefillHalf:
        outbox = Outbox(
            pool=self._pool,
            cache=self._parts.cache,
            layout=self._parts.layout,
            clock=self._clock,
            lease_s=self._config.limits.export_lease_s,
            make_dialer=self._make_dialer,
            errands=self._errands,
            streams=self._config.limits.stream_kv,
            # What gives way has its first token already.
            tier_of=self._rules.tier if self._config.router.resume else None,
        )
        return PrefillHalf(
            engine=self._engine,
            pool=self._pool,
            outbox=outbox,
            clock=self._clock,
            eos_ids=self._parts.eos_ids,
            on_change=self._on_change,
        )

    def _make_dialer(self, events: LinkEvents) -> LinkDialer:
        self._dialer = LinkDialer(
            me=self._link_name(),
            layout=self._parts.layout,
            transport=self._parts.transport,
            limits=link_limits(self._config.limits, self._parts.layout),
            events=self._faults.link_events(events),
            token=self._token,
        )
        return self._dialer

    def _make_decode(self, pool: PoolConfig) -> DecodeHalf:
        inbox = Inbox(
            pool=self._pool,
            cache=self._parts.cache,
            layout=self._parts.layout,
            clock=self._clock,
            lease_s=self._config.limits.export_lease_s,
            patience_s=self._config.limits.reserve_patience_s,
            errands=self._errands,
            needs_all=self._rules.needs_all,
            tier_of=self._rules.taking_tier,
            gives=self._config.router.resume,
        )
        self._acceptor = LinkAcceptor(
            me=self._link_name(),
            layout=self._parts.layout,
            transport=self._parts.transport,
            limits=link_limits(self._config.limits, self._parts.layout),
            events=self._faults.link_events(inbox),
        )
        return DecodeHalf(
            engine=self._engine,
            inbox=inbox,
            clock=self._clock,
            eos_ids=self._parts.eos_ids,
            errands=self._errands,
            on_change=self._on_change,
        )

    def _are_links_moving(self) -> bool:
        sides = (self._dialer, self._acceptor)
        return any(side.is_moving for side in sides if side is not None)

    def _link_name(self) -> Peer:
        # Only decode workers are dialled, and their address comes with the leg.
        return Peer(worker_id=self.worker_id, incarnation=self.incarnation, address="")

    # ---- events

    def _call_soon(self, call: Callable[[], None]) -> None:
        """Bring a call from any thread to the event loop; after its end there is nobody to tell."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call)

    def _on_step(self, events: StepEvents) -> None:
        for half in self.legs.halves:
            half.on_step(events)
        if not events.stored:  # told amid a step, which has changed no count yet
            self._on_change()

    def _refused(self, refused: asyncio.Future[StartupError]) -> None:
        if not refused.cancelled():
            self._fail(refused.result())

    def _fail(self, error: BaseException) -> None:
        """Serve no more: end every leg, leave the control plane, and say so by ``fault``.

        The step that failed has told its own sequences. Others may well run elsewhere.
        """
        if self.fault.done():
            return
        logger.critical("worker=%s fault", self.worker_id, exc_info=error)
        self.fault.set_result(error)
        self._life.advance(WorkerState.STOPPING, self._clock.now())
        assert self._loop is not None, "nothing fails before the start"
        self._leaving = self._loop.create_task(self._report.stop(LEFT_FOR_FAULT))
        self.legs.close(WorkerLost("the worker gave up", worker_id=self.worker_id))

    def _on_change(self) -> None:
        self._changed.set()
        self._report.changed()

    async def _until_accepted(self, timeout_s: float) -> None:
        accepted, fault = self._report.accepted, self.fault
        either: set[asyncio.Future[Any]] = {accepted, fault}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if fault.done():
            raise StartupError(f"failed at its start: {fault.result()}") from fault.result()
        if not accepted.done():
            why = self._report.refusal or "does the control plane serve there?"
            raise StartupError(
                f"not accepted within {timeout_s:g} s by {self._control_address}: {why}"
            )
        if accepted.cancelled():
            raise StartupError("stopped before it was accepted")
        accepted.result()

    async def _until_idle(self, patience_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while len(self.legs):
                    self._changed.clear()
                    await self._changed.wait()

    def _check_state(self) -> None:
        why = "the worker gave up" if self.fault.done() else self._life.refusal(self._clock.now())
        if why:
            raise WorkerLost(why, stage="intake")
