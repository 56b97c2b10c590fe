"""The control plane as a Serve deployment: placement, restarts and status come from Serve."""

from __future__ import annotations

from typing import Any

from cluster import config as deploy_config
from cluster.clock import SystemClock
from cluster.control.server import ControlServer
from cluster.control.settings import ControlSettings
from cluster.policy.load import to_stats
from deploy import node
from deploy.cores import pin_process
from deploy.heap import keep_what_start_made
from deploy.logs import log_to_file
from deploy.model_shape import stated_layout


class ControlReplica:
    """Hosts one ``ControlServer`` on the fixed control port."""

    _server: ControlServer | None = None

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, tree: dict[str, Any], model_path: str, run_dir: str
    ) -> None:
        config = deploy_config.from_tree(tree)
        log_to_file(node.run_folder(config, run_dir) / "logs", "control")
        pin_process(config.service_cores)
        settings = ControlSettings(model_layout=stated_layout(model_path))
        self._server = ControlServer(config, SystemClock(), settings=settings)
        await self._server.start(config.endpoints.host, config.endpoints.control_port)
        keep_what_start_made()

    async def check_health(self) -> None:
        """Raise where nobody is placed any more; Serve then replaces this replica."""
        assert self._server is not None, "Serve asks after the constructor"
        self._server.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Serve the load, which it asks for where pools are scaled."""
        assert self._server is not None, "Serve asks after the constructor"
        return to_stats(self._server.load())

    async def __del__(self) -> None:
        """Close the port first: in an update the next instance is waiting for it."""
        if self._server is not None:
            await self._server.stop()
