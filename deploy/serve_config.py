"""The Serve config file of a deploy file: the only way the app is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster import config as deploy_config

if TYPE_CHECKING:
    from cluster.config import DeployConfig

APP_NAME = "pdserve"


def serve_config(config: DeployConfig, *, model_path: str, run_dir: str) -> dict[str, Any]:
    """Return the Serve config file, as plain data, that deploys ``config``."""
    return {
        # The routers have doors of their own: see "Decisions" in the README.
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": APP_NAME,
                "route_prefix": "/",
                "import_path": "deploy.build_app:build",
                "args": {
                    "config": deploy_config.to_tree(config),
                    "model_path": model_path,
                    "run_dir": run_dir,
                },
            }
        ],
    }
