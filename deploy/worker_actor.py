"""The one Ray shell of a worker: an engine and a KV pool with the halves of its pool's role."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any

from cluster import config as deploy_config
from deploy import cores, node
from deploy.logs import log_to_file
from deploy.worker import Worker

if TYPE_CHECKING:
    from deploy.cores import CoreLease

logger = logging.getLogger(__name__)


class WorkerReplica:
    """Hosts one ``Worker``; Serve's calls never reach it, only Serve's health checks do."""

    _lease: CoreLease | None = None
    _worker: Worker | None = None

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, tree: dict[str, Any], pool_name: str, model_path: str, run_dir: str
    ) -> None:
        config = deploy_config.from_tree(tree)
        pool = config.pool(pool_name)
        folder = node.run_folder(config, run_dir)
        self._lease = await asyncio.to_thread(
            cores.lease_cores,
            folder / "cores",
            pool.name,
            pool.cores,
            pool.cores_per_worker,
            pool.count,
        )
        worker_id = node.worker_id(config, pool.name, self._lease.index)
        log_to_file(folder / "logs", worker_id)
        logger.info("worker=%s pid=%d cores=%s loading", worker_id, os.getpid(), self._lease.cores)
        checkpoint = await asyncio.to_thread(node.model_folder, model_path)
        self._worker = await asyncio.to_thread(
            Worker.build,
            config,
            pool,
            worker_id=worker_id,
            model_path=checkpoint,
            control_address=f"{config.endpoints.host}:{config.endpoints.control_port}",
            cores=self._lease.cores,
        )
        await self._worker.start()

    async def check_health(self) -> None:
        """Fail once the worker has: Serve then replaces this process."""
        assert self._worker is not None, "Serve asks after the constructor"
        self._worker.check_health()

    async def __del__(self) -> None:
        """Leave the control plane, end every leg, stop the step thread; safe after any start."""
        if self._worker is not None:
            await self._worker.stop(grace_s=1.0)
        if self._lease is not None:
            self._lease.release()
