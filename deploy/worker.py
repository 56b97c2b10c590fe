"""One worker: an engine and a KV pool, with the prefill half, the decode half, or both.

    routers ──legs──▶ WorkerServer ──▶ Worker ──▶ PrefillHalf, DecodeHalf ──▶ EngineLoop
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
from typing import TYPE_CHECKING

from cluster.clock import Clock, SystemClock
from cluster.config import Role
from cluster.control.report_client import ReportClient
from cluster.engine.loop import EngineLoop
from cluster.engine.scheduler import StepScheduler
from cluster.errors import (
    EngineFault,
    InvalidRequest,
    PdserveError,
    QueueFull,
    StartupError,
    WorkerLost,
)
from cluster.handoff import AbortCause
from cluster.kv.block_pool import BlockPool
from cluster.request import LegEnd, LegKind, Peer
from cluster.rpc.leg_rules import LegRules
from cluster.rpc.link_acceptor import LinkAcceptor
from cluster.rpc.link_dialer import LinkDialer
from cluster.rpc.server import WorkerServer
from decode_worker.inbox import Inbox
from decode_worker.streams import DecodeHalf
from deploy.worker_parts import WorkerParts, load_parts
from deploy.worker_report import WorkerReporter
from prefill_worker.intake import PrefillHalf
from prefill_worker.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cluster.config import DeployConfig, PoolConfig
    from cluster.engine.plan import StepEvents
    from cluster.request import Leg, LegKey
    from cluster.rpc.legs import LegSink
    from cluster.rpc.link import LinkEvents
    from cluster.transport.base import Transport

logger = logging.getLogger(__name__)

TICK_S = 0.1
"""How late a deadline outside the engine may be noticed."""
MAX_OPEN_LEGS = 1024
_ENGINE_STOP_S = 5.0


class Worker:
    """Composes a worker. ``start`` returns when it is registered; ``stop`` is idempotent."""

    def __init__(
        self,
        config: DeployConfig,
        pool: PoolConfig,
        parts: WorkerParts,
        *,
        worker_id: str,
        control_address: str,
        clock: Clock | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = uuid.uuid4().hex
        self._config = config
        self._parts = parts
        self._clock = clock or SystemClock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fault: asyncio.Future[BaseException] | None = None
        self._changed = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._pool = BlockPool(pool.num_blocks)
        self._engine = self._make_engine(pool)
        self._dialer: LinkDialer | None = None
        self._acceptor: LinkAcceptor | None = None
        self._prefill = self._make_prefill() if pool.role is not Role.DECODE else None
        self._decode = self._make_decode() if pool.role is not Role.PREFILL else None
        self._halves = [half for half in (self._prefill, self._decode) if half is not None]
        self._rules = LegRules(
            layout=parts.layout,
            num_blocks=pool.num_blocks,
            max_model_len=parts.max_model_len,
            vocab_size=parts.vocab_size,
            worker_id=worker_id,
        )
        self._server = WorkerServer(
            self, self._acceptor, incarnation=self.incarnation, host=config.endpoints.host
        )
        self._reporter = WorkerReporter(
            pool=pool,
            parts=parts,
            blocks=self._pool,
            engine=self._engine,
            halves=(self._prefill, self._decode),
        )
        self._report = ReportClient(
            control_address,
            registration=lambda: self._reporter.registration(self.me),
            report=self._reporter.report,
            on_abort_grant=self._abort_grant,
            clock=self._clock,
        )
        self.me = Peer(worker_id=worker_id, incarnation=self.incarnation, address="")

    @classmethod
    def build(  # noqa: PLR0913 (the one place where everything meets)
        cls,
        config: DeployConfig,
        pool: PoolConfig,
        *,
        worker_id: str,
        model_path: Path,
        control_address: str,
        cores: tuple[int, ...] = (),
        transport: Transport | None = None,
    ) -> Worker:
        """Load the model and make a worker of it; blocks for seconds, on any thread.

        With ``cores``, all threads of this process are pinned to them first. ``transport`` is
        given where the deploy file's cannot be made from itself (loopback).
        """
        parts = load_parts(config, pool, model_path, cores=cores, transport=transport)
        return cls(config, pool, parts, worker_id=worker_id, control_address=control_address)

    @property
    def fault(self) -> asyncio.Future[BaseException]:
        """Done, with the error, when this worker can serve no more: its process must end."""
        if self._fault is None:
            self._fault = asyncio.get_running_loop().create_future()
        return self._fault

    @property
    def num_open_legs(self) -> int:
        """Legs that have not ended."""
        return sum(len(half.book) for half in self._halves)

    async def start(self) -> None:
        """Listen, start the step thread, and return when the control plane has accepted this.

        Raises StartupError where it refuses, or where the port is taken.
        """
        self._loop = asyncio.get_running_loop()
        address = await self._server.start()
        self.me = Peer(worker_id=self.worker_id, incarnation=self.incarnation, address=address)
        self._engine.start()
        self._ticker = self._loop.create_task(self._tick())
        await self._report.start()
        try:
            await self._report.accepted
        except PdserveError:
            await self.stop(0.0)
            raise
        self._report.refused.add_done_callback(self._refused)
        logger.info(
            "worker=%s incarnation=%s at=%s ready", self.worker_id, self.incarnation, address
        )

    async def stop(self, grace_s: float) -> None:
        """Leave the control plane, give open legs ``grace_s`` to end, end them, and close all."""
        if self._is_stopping:
            return
        self._is_stopping = True
        await self._report.stop("stopping")
        await self._until_idle(grace_s)
        self._close_halves(WorkerLost("the worker is stopping", worker_id=self.worker_id))
        await asyncio.to_thread(self._engine.stop, _ENGINE_STOP_S)
        await self._until_idle(1.0)
        if self._dialer is not None:
            await self._dialer.close()
        if self._acceptor is not None:
            await self._acceptor.close()
        await self._server.stop(1.0)
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        logger.info("worker=%s stopped, legs=%d", self.worker_id, self.num_open_legs)

    # ---- for the server

    def start_leg(self, leg: Leg, sink: LegSink) -> None:
        """Take a leg, or end it at once with the reason."""
        if self._is_open(leg.key):
            self._refuse_double(leg, sink)
            return
        try:
            self._check_state()
            self._rules.check(leg)
            half = self._half_for(leg.kind)
        except PdserveError as error:
            error.worker_id = self.worker_id
            self._refuse(leg, sink, error)
            return
        half.start_leg(leg, sink)

    def abort_leg(self, key: LegKey, cause: AbortCause) -> None:
        """Give a leg up, whichever half has it."""
        for half in self._halves:
            half.abort_leg(key, cause)

    def router_lost(self, sink: LegSink) -> None:
        """Give up the legs of a router that is gone."""
        for half in self._halves:
            half.router_lost(sink, AbortCause.CANCELLED)

    # ---- composition

    def _make_engine(self, pool: PoolConfig) -> EngineLoop:
        scheduler = StepScheduler(
            self._pool,
            pool.block_size,
            pool.max_num_seqs,
            pool.token_budget,
            pool.chunk_tokens,
            self._parts.max_model_len,
        )
        return EngineLoop(
            scheduler=scheduler,
            runner=self._parts.runner,
            clock=self._clock,
            on_events=lambda events: self._call_soon(functools.partial(self._on_step, events)),
            on_fault=lambda error: self._call_soon(functools.partial(self._on_fault, error)),
            pin=self._parts.pin,
        )

    def _make_prefill(self) -> PrefillHalf:
        outbox = Outbox(
            pool=self._pool,
            cache=self._parts.cache,
            layout=self._parts.layout,
            clock=self._clock,
            lease_s=self._config.limits.export_lease_s,
            make_dialer=self._make_dialer,
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
            events=events,
        )
        return self._dialer

    def _make_decode(self) -> DecodeHalf:
        inbox = Inbox(
            pool=self._pool,
            cache=self._parts.cache,
            layout=self._parts.layout,
            clock=self._clock,
            lease_s=self._config.limits.export_lease_s,
            call_soon=self._call_soon,
        )
        self._acceptor = LinkAcceptor(
            me=self._link_name(),
            layout=self._parts.layout,
            transport=self._parts.transport,
            events=inbox,
        )
        return DecodeHalf(
            engine=self._engine,
            inbox=inbox,
            clock=self._clock,
            eos_ids=self._parts.eos_ids,
            on_change=self._on_change,
        )

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
        for half in self._halves:
            half.on_step(events)
        self._on_change()

    def _on_fault(self, error: BaseException) -> None:
        logger.critical("worker=%s engine fault", self.worker_id, exc_info=error)
        self._fail(error)

    def _refused(self, refused: asyncio.Future[StartupError]) -> None:
        if not refused.cancelled():
            self._fail(refused.result())

    def _fail(self, error: BaseException) -> None:
        if self.fault.done():
            return
        self.fault.set_result(error)
        self._close_halves(EngineFault("the engine failed", worker_id=self.worker_id))
        assert self._loop is not None, "nothing fails before the start"
        self._leaving = self._loop.create_task(self._report.stop("fault"))

    def _close_halves(self, error: PdserveError) -> None:
        for half in self._halves:
            half.close(AbortCause.FAULT, error)

    def _on_change(self) -> None:
        self._changed.set()
        self._report.changed()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock.now()
            for half in self._halves:
                half.expire(now)

    async def _until_idle(self, patience_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self.num_open_legs:
                    self._changed.clear()
                    await self._changed.wait()

    def _abort_grant(self, grant_id: str) -> None:
        for half in self._halves:
            for opened in half.book:
                if opened.leg.grant_id == grant_id:
                    logger.info("leg=%s grant=%s taken back", opened.key, grant_id)
                    half.abort_leg(opened.key, AbortCause.LEASE)

    # ---- refusals

    def _is_open(self, key: LegKey) -> bool:
        return any(key in half.book for half in self._halves)

    def _check_state(self) -> None:
        if self.fault.done():
            raise EngineFault("the engine failed", stage="intake")
        if self._is_stopping:
            raise WorkerLost("the worker is stopping", stage="intake")
        if self.num_open_legs >= MAX_OPEN_LEGS:
            raise QueueFull(f"{MAX_OPEN_LEGS} legs are open", stage="intake")

    def _half_for(self, kind: LegKind) -> PrefillHalf | DecodeHalf:
        half = self._prefill if kind is LegKind.PREFILL else self._decode
        if half is None:
            raise InvalidRequest(f"this worker serves no {kind.value} legs", field="kind")
        return half

    def _refuse(self, leg: Leg, sink: LegSink, error: PdserveError) -> None:
        logger.info("leg=%s refused: %s field=%s", leg.key, error.code, error.field)
        self._reporter.num_rejected += 1
        sink.emit((), (LegEnd(key=leg.key, error=error),))

    def _refuse_double(self, leg: Leg, sink: LegSink) -> None:
        logger.warning("leg=%s sent twice", leg.key)
        self._reporter.num_rejected += 1
        owners = [half.book.get(leg.key) for half in self._halves]
        # To the router that has the leg, an end under this key would end the leg.
        if all(opened is None or opened.sink is not sink for opened in owners):
            error = InvalidRequest("this leg is open", field="key", worker_id=self.worker_id)
            sink.emit((), (LegEnd(key=leg.key, error=error),))
