"""The worker of one process, from the first start to the last end, in one role after another.

    start ──▶ serves ──`pdserve set-role`──▶ drains ──▶ serves with other halves
                 │
                 └──`pdserve drain`, SIGTERM, Serve's shutdown──▶ drains ──▶ is over

Weights, cache and transport are loaded once. Whoever serves in another role is another incarnation:
nothing that routers, peers or the control plane know of the one before can be mistaken for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import deque
from typing import TYPE_CHECKING

from cluster.errors import EngineFault, StartupError
from deploy.worker import START_TIMEOUT_S, Worker
from deploy.worker_parts import load_parts

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.config import DeployConfig, PoolConfig, Role
    from cluster.transport.base import Transport
    from deploy.worker_parts import WorkerParts

logger = logging.getLogger(__name__)


class HostedWorker:
    """Starts, drains, converts and ends a worker over the same parts; event loop only."""

    def __init__(
        self,
        config: DeployConfig,
        pool: PoolConfig,
        parts: WorkerParts,
        *,
        worker_id: str,
        control_address: str,
        port: int = 0,
    ) -> None:
        """``port`` 0 takes any that is free."""
        self._config = config
        self._pool = pool
        self._parts = parts
        self._worker_id = worker_id
        self._control_address = control_address
        self._port = port
        self.worker = self._make(pool.role)
        """The one of now."""
        self._is_ending = False
        self._orders: deque[Role | None] = deque()
        """To be followed, the one under way first."""
        self._following: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._fault: asyncio.Future[BaseException] | None = None
        self._drained: asyncio.Future[None] | None = None

    @classmethod
    def build(  # noqa: PLR0913 (all that the one place where everything meets is told)
        cls,
        config: DeployConfig,
        pool: PoolConfig,
        *,
        worker_id: str,
        model_path: Path,
        control_address: str,
        cores: tuple[int, ...] = (),
        port: int = 0,
        transport: Transport | None = None,
    ) -> HostedWorker:
        """Load the model and make a worker of it; blocks for seconds, on any thread.

        With ``cores``, all threads of this process are pinned to them first. ``transport`` is
        given where the deploy file's cannot be made from itself (loopback).
        """
        parts = load_parts(config, pool, model_path, cores=cores, transport=transport)
        return cls(
            config, pool, parts, worker_id=worker_id, control_address=control_address, port=port
        )

    @property
    def fault(self) -> asyncio.Future[BaseException]:
        """Done, with the error, when this worker can serve no more: its process must end."""
        if self._fault is None:
            self._fault = asyncio.get_running_loop().create_future()
        return self._fault

    @property
    def drained(self) -> asyncio.Future[None]:
        """Done when an operator's order to drain has been followed: the process is to end."""
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()
        return self._drained

    def check_health(self) -> None:
        """Raise EngineFault once this worker can serve no more, or has been drained."""
        if self.fault.done():
            raise EngineFault("the worker failed", worker_id=self._worker_id) from (
                self.fault.result()
            )
        if self.drained.done():
            raise EngineFault("the worker was drained, as ordered", worker_id=self._worker_id)

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when the control plane has accepted the worker; raises StartupError."""
        self._watch(self.worker)
        await self.worker.start(timeout_s)

    async def end(self, grace_s: float) -> None:
        """Drain for at most ``grace_s``, and close all; idempotent, and never in vain.

        A change of role that is under way is given up.
        """
        self._is_ending = True
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end(grace_s))
        await asyncio.shield(self._ending)

    async def _end(self, grace_s: float) -> None:
        following = self._following
        if following is not None and not self.drained.done():
            following.cancel()
            await asyncio.wait({following})
        if not self.fault.done():
            await self.worker.drain(grace_s)
        await self.worker.stop(0.0)

    # ---- orders

    def _make(self, role: Role) -> Worker:
        return Worker(
            self._config,
            dataclasses.replace(self._pool, role=role),
            self._parts,
            worker_id=self._worker_id,
            control_address=self._control_address,
            port=self._port,
            on_order=self._ordered,
        )

    def _ordered(self, role: Role | None) -> None:
        """Follow an order, or where another is under way, that one first."""
        if self._is_ending or None in self._orders:
            logger.warning("worker=%s leaves already: an order dropped", self._worker_id)
            return
        self._orders.append(role)
        if len(self._orders) == 1:
            self._following = asyncio.get_running_loop().create_task(self._follow_all())

    async def _follow_all(self) -> None:
        try:
            while self._orders and not self.fault.done():
                await self._follow(self._orders[0])
                self._orders.popleft()
        except Exception as error:
            self._failed(error)

    async def _follow(self, role: Role | None) -> None:
        await self._leave()
        if role is None:
            self.drained.set_result(None)
            return
        if not self.worker.has_let_go:
            # It writes to blocks that the next one would give to others.
            raise EngineFault("a step outlasted the change of role", worker_id=self._worker_id)
        logger.info("worker=%s comes back as %s", self._worker_id, role.value)
        self.worker = self._make(role)
        self._watch(self.worker)
        await self.worker.start()

    async def _leave(self) -> None:
        await self.worker.drain(self._config.limits.drain_s)
        await self.worker.stop(0.0)

    def _watch(self, worker: Worker) -> None:
        worker.fault.add_done_callback(self._worker_failed)

    def _worker_failed(self, fault: asyncio.Future[BaseException]) -> None:
        if not fault.cancelled():
            self._failed(fault.result())

    def _failed(self, error: BaseException) -> None:
        if not self.fault.done():
            if isinstance(error, StartupError):
                logger.error("worker=%s cannot start: %s", self._worker_id, error.message)
            self.fault.set_result(error)
