"""The router as a Ray Serve deployment: a thin shell around ``Ingress``."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray

from cluster import config as deploy_config
from deploy import node
from deploy.cores import pin_process
from deploy.door_locks import DoorLocks
from deploy.heap import keep_what_start_made
from deploy.logs import log_to_file
from router.ingress import Ingress


class RouterReplica:
    """Hosts one router; Serve places, restarts and replicates it, and carries none of its calls.

    The handles of the control plane and the pools are taken so that Serve deploys them as one
    app; nothing is ever called through them.
    """

    _ingress: Ingress | None = None
    _locks: DoorLocks | None = None
    _drain_s = 0.0

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, tree: dict[str, Any], model_path: str, run_dir: str, *deployments: Any
    ) -> None:
        config = deploy_config.from_tree(tree)
        self._drain_s = config.limits.drain_s
        run_folder = node.run_folder(config, run_dir)
        log_to_file(run_folder / "logs", f"router-{os.getpid()}")
        pin_process(config.service_cores)
        checkpoint = await asyncio.to_thread(node.model_folder, model_path)
        # Of one Ray there is one app of ours: it is what its routers have in common.
        ray_address = ray.get_runtime_context().gcs_address
        self._locks = DoorLocks(run_folder.parent, ray_address)
        await asyncio.to_thread(self._locks.take, config)
        self._ingress = Ingress(config, checkpoint)
        await self._ingress.start()
        keep_what_start_made()

    async def check_health(self) -> None:
        """Raise where a door is not open; Serve then replaces this replica."""
        assert self._ingress is not None, "Serve asks after the constructor"
        await self._ingress.check_health()
        if self._locks is not None:
            self._locks.keep()

    async def __del__(self) -> None:
        """Be ready no more, let nobody new in, let what runs end, and end what is left then."""
        if self._ingress is not None:
            await self._ingress.stop(self._drain_s)
        if self._locks is not None:
            self._locks.release()
