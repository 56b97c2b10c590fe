"""The Serve config file of a deploy file: the only way the app is built."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from cluster import config as deploy_config
from cluster.config import HEAD
from cluster.errors import StartupError
from deploy import autoscale
from deploy.model_source import model_name
from deploy.plan import with_kv_tokens

if TYPE_CHECKING:
    from cluster.config import DeployConfig

APP_NAME = "pdserve"


def serve_config(config: DeployConfig, *, model_path: str, run_dir: str = "") -> dict[str, Any]:
    """Return the Serve config file, as plain data, that deploys ``config``.

    ``model_path`` is a folder or an id that every node finds or fetches; ``run_dir`` is a
    launcher's run folder, and without one each node has its own.
    """
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
                **autoscale.app_options(config),
            }
        ],
    }


def named(config: DeployConfig) -> DeployConfig:
    """Return the config with what no node shall have to find out: the model's name, its KV.

    Raises StartupError where the head node's address is not in it.
    """
    if config.endpoints.host == HEAD:
        raise StartupError(
            "endpoints.host: head is known on a running cluster only: give its address with "
            "--set endpoints.host=ADDRESS",
            field="endpoints.host",
        )
    path = config.model.path
    folder = Path(path).expanduser()
    if folder.is_dir():
        path = str(folder.resolve())
    model = dataclasses.replace(
        config.model, path=path, name=model_name(config.model.path, config.model.name)
    )
    return with_kv_tokens(dataclasses.replace(config, model=model))


def text_of(config: DeployConfig) -> str:
    """Return the file for ``serve run`` and ``serve deploy``, for a Ray over any nodes."""
    config = named(config)
    tree = serve_config(config, model_path=config.model.path)
    return yaml.safe_dump(tree, sort_keys=False)
