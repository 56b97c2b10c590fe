"""The control plane as a Serve deployment: placement, restarts and status come from Serve."""

from __future__ import annotations

from typing import Any

from cluster import config as deploy_config
from cluster.clock import SystemClock
from cluster.control.server import ControlServer


class ControlReplica:
    """Hosts one ``ControlServer`` on the fixed control port."""

    async def __init__(self, tree: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        config = deploy_config.from_tree(tree)
        self._server = ControlServer(config, SystemClock())
        await self._server.start(config.endpoints.host, config.endpoints.control_port)

    async def __del__(self) -> None:
        """Close the port first: in an update the next instance is waiting for it."""
        await self._server.stop()
