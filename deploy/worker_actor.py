"""The one Ray shell of a worker: an engine and a KV pool with the halves of its pool's role."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any

from cluster import config as deploy_config
from deploy import cores, node
from deploy.heap import keep_what_start_made
from deploy.hosted_worker import HostedWorker
from deploy.logs import log_to_file

if TYPE_CHECKING:
    from deploy.cores import CoreLease

logger = logging.getLogger(__name__)

_PLACE_WAIT_S = 10.0
"""For a predecessor's process to be gone, beyond what it may drain by its own deploy file."""


class WorkerReplica:
    """Hosts one worker; Serve's calls never reach it, only Serve's health checks do.

    Serve ends it by ``__del__``, and by force once ``graceful_shutdown_timeout_s`` are over.
    """

    _lease: CoreLease | None = None
    _worker: HostedWorker | None = None
    _drain_s = 0.0

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, tree: dict[str, Any], pool_name: str, model_path: str, run_dir: str
    ) -> None:
        config = deploy_config.from_tree(tree)
        pool = config.pool(pool_name)
        self._drain_s = config.limits.drain_s
        folder = node.run_folder(config, run_dir)
        self._lease = await asyncio.to_thread(
            cores.lease_cores,
            folder / "cores",
            pool.name,
            pool.cores,
            pool.cores_per_worker,
            pool.max_count,
            leaves_s=self._drain_s,
            wait_s=_PLACE_WAIT_S,
        )
        worker_id = node.worker_id(config, pool.name, self._lease.index)
        log_to_file(folder / "logs", worker_id)
        logger.info("worker=%s pid=%d cores=%s loading", worker_id, os.getpid(), self._lease.cores)
        checkpoint = await asyncio.to_thread(node.model_folder, model_path)
        self._worker = await asyncio.to_thread(
            HostedWorker.build,
            config,
            pool,
            worker_id=worker_id,
            model_path=checkpoint,
            control_address=f"{config.endpoints.host}:{config.endpoints.control_port}",
            cores=self._lease.cores,
        )
        await self._worker.start()
        keep_what_start_made()

    async def check_health(self) -> None:
        """Fail once the worker has, or was drained: Serve then replaces this process."""
        assert self._worker is not None, "Serve asks after the constructor"
        self._worker.check_health()

    async def __del__(self) -> None:
        """Drain, leave the control plane, stop the step thread; safe after any start."""
        if self._worker is not None:
            await self._worker.end(self._drain_s)
        if self._lease is not None:
            self._lease.release()
