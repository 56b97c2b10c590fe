"""The ingress as a Ray Serve deployment: a thin shell around ``Ingress``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve

from cluster import config as deploy_config
from router.ingress import Ingress

if TYPE_CHECKING:
    from fastapi import FastAPI


@serve.ingress()
class RouterReplica:
    """One router replica: HTTP through Serve's proxy, gRPC through a door of its own.

    The handles of the control plane and the pools are taken so that Serve deploys them as one
    app; nothing is ever called through them.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, tree: dict[str, Any], model_path: str, *deployments: Any
    ) -> None:
        self._ingress = Ingress(deploy_config.from_tree(tree), Path(model_path))
        await self._ingress.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP API; Serve calls this once, after the constructor."""
        return self._ingress.api

    async def __del__(self) -> None:
        """Close the gRPC door and end what still runs."""
        await self._ingress.stop()
