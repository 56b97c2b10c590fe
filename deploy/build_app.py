"""Builds the Ray Serve application: control plane, one deployment per pool, the ingress.

Serve imports ``build`` from the generated config file and calls it with the file's ``args``; the
app is never built another way, since some of Serve's features exist only for apps from a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster import config as deploy_config
from deploy.control_actor import ControlReplica
from deploy.worker_actor import WorkerReplica
from router.serve_app import RouterReplica

if TYPE_CHECKING:
    from ray.serve import Application

    from cluster.config import DeployConfig, PoolConfig

APP_NAME = "pdserve"
_HEALTH = {"health_check_period_s": 1.0, "health_check_timeout_s": 10.0}


def build(args: dict[str, Any]) -> Application:
    """Return the application that ``serve_config`` describes."""
    tree, folder, cores_dir = args["config"], args["model_path"], args["cores_dir"]
    config = deploy_config.from_tree(tree)
    control = ControlReplica.options(
        name="control",
        num_replicas=1,
        # The control plane's port is fixed, so it has to be where clients look for it.
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
        graceful_shutdown_timeout_s=2.0,
        **_HEALTH,
    ).bind(tree)
    pools = [_pool(pool, tree, folder, cores_dir) for pool in config.pools]
    return RouterReplica.options(  # type: ignore[no-any-return]
        name="router",
        num_replicas=config.router.replicas,
        max_ongoing_requests=_ongoing(config),
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=2.0,
        **_HEALTH,
    ).bind(tree, folder, control, *pools)


def _ongoing(config: DeployConfig) -> int:
    """Return the calls that one ingress replica may hold: the queue, and everything that runs."""
    running = sum(pool.count * pool.max_num_seqs for pool in config.pools)
    return 2 * (config.scheduling.max_queue_requests + running)


def _pool(pool: PoolConfig, tree: dict[str, Any], folder: str, cores_dir: str) -> Application:
    return WorkerReplica.options(  # type: ignore[no-any-return]
        name=pool.name,
        num_replicas=pool.count,
        max_constructor_retry_count=1,
        ray_actor_options={
            # Cores are pinned by lease, not counted by Ray: a trial may share them on purpose.
            "num_cpus": 0,
            "num_gpus": pool.gpus_per_worker,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(pool.cores_per_worker)}},
        },
        graceful_shutdown_timeout_s=2.0,
        **_HEALTH,
    ).bind(tree, pool.name, folder, cores_dir)


def serve_config(config: DeployConfig, *, model_path: str, cores_dir: str) -> dict[str, Any]:
    """Return the Serve config file, as plain data, that deploys ``config``."""
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": config.endpoints.host, "port": config.endpoints.http_port},
        "applications": [
            {
                "name": APP_NAME,
                "route_prefix": "/",
                "import_path": "deploy.build_app:build",
                "args": {
                    "config": deploy_config.to_tree(config),
                    "model_path": model_path,
                    "cores_dir": cores_dir,
                },
            }
        ],
    }
