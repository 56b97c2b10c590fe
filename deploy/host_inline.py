"""A cluster in one process, without Ray: the same control plane, workers and doors on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from cluster.clock import SystemClock
from cluster.control.server import ControlServer
from cluster.control.settings import ControlSettings
from cluster.errors import EngineFault, PdserveError, StartupError
from cluster.transport.loopback import LoopbackTransport
from deploy.heap import keep_what_start_made
from deploy.hosted_worker import HostedWorker
from deploy.model_shape import stated_layout
from router.ingress import Ingress

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.config import DeployConfig, PoolConfig

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 180.0


class InlineHost:
    """Runs everything on one event loop in a thread of its own; KV moves within the process."""

    def __init__(self, config: DeployConfig, *, model_path: Path) -> None:
        self._config = config
        self._model_path = model_path
        self._thread = threading.Thread(target=self._run, name="inline-cluster", daemon=True)
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._failure: StartupError | None = None

    def start(self) -> None:
        """Start the loop and return when all of it is up; raises StartupError."""
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_S):
            raise StartupError(
                f"the workers were not loaded after {_START_TIMEOUT_S:.0f} s: start again with a "
                "smaller model or fewer workers"
            )
        if self._failure is not None:
            raise self._failure

    def settle(self) -> None:
        """Do nothing: there is only this process."""

    def failure(self) -> StartupError | None:
        """Return why the loop ended, if it did."""
        return self._failure

    def start_failure(self) -> StartupError | None:
        """Return nothing: workers of one process fail together."""
        return None

    def where_logs(self) -> str:
        """It logs to the terminal."""
        return "--verbose shows what happened before"

    def stop(self, timeout_s: float) -> None:
        """End the loop, for ``timeout_s`` at most."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            asyncio.run(self._run_and_collect())
        except PdserveError as error:
            self._failure = StartupError(error.message)
        except Exception as error:
            logger.exception("the cluster ended")
            self._failure = StartupError(f"the cluster ended: {error!r}")
        finally:
            self._started.set()

    async def _run_and_collect(self) -> None:
        try:
            await self._serve()
        finally:
            # grpc.aio servers say their last word to the loop when they are collected.
            gc.unfreeze()
            gc.collect()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        endpoints = self._config.endpoints
        async with AsyncExitStack() as stack:
            settings = ControlSettings(model_layout=stated_layout(str(self._model_path)))
            control = ControlServer(self._config, SystemClock(), settings=settings)
            stack.push_async_callback(control.stop)
            await control.start(endpoints.host, endpoints.control_port)
            transport = LoopbackTransport()
            workers = [
                await self._start_worker(stack, pool, index, transport)
                for pool in self._config.pools
                for index in range(pool.count)
            ]
            ingress = Ingress(self._config, self._model_path)
            stack.push_async_callback(ingress.stop)
            await ingress.start()
            faults = [worker.fault for worker in workers]
            keep_what_start_made()
            self._started.set()
            stopped = asyncio.create_task(self._stop.wait())
            ends: set[asyncio.Future[Any]] = {stopped, *faults}
            ends |= {worker.drained for worker in workers}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for worker, fault in zip(workers, faults, strict=True):
                if worker.drained.done():
                    raise EngineFault(
                        f"{worker.worker.worker_id} was drained, as ordered; nobody replaces it"
                    )
                if fault.done():
                    raise EngineFault(
                        f"the engine of {worker.worker.worker_id} failed: {fault.result()!r}"
                    ) from fault.result()

    async def _start_worker(
        self, stack: AsyncExitStack, pool: PoolConfig, index: int, transport: LoopbackTransport
    ) -> HostedWorker:
        endpoints = self._config.endpoints
        worker = await asyncio.to_thread(
            HostedWorker.build,
            self._config,
            pool,
            worker_id=f"{pool.name}-{index}",
            model_path=self._model_path,
            control_address=f"{endpoints.host}:{endpoints.control_port}",
            transport=transport,
        )
        # The doors are shut by then, and their calls ended.
        stack.push_async_callback(worker.end, 0.0)
        await worker.start()
        return worker
