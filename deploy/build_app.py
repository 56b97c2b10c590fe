"""Builds the Ray Serve application: control plane, one deployment per pool, the ingress.

Serve imports ``build`` from the generated config file and calls it with the file's ``args``; the
app is never built another way, since some of Serve's features exist only for apps from a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray import serve

from cluster import config as deploy_config
from deploy.autoscale import CONTROL
from deploy.control_actor import ControlReplica
from deploy.router_actor import RouterReplica
from deploy.worker_actor import WorkerReplica

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.serve import Application, Deployment

    from cluster.config import PoolConfig

_END_S = 2.0
"""For a replica to end, before Serve does it by force."""
_WAIT_LOOP_S = 0.1
_CHECK_S, _WORKER_CHECK_S = 10.0, 4.0
"""For an answer about health. Serve replaces a replica after three in a row that did not come: a
worker whose node says nothing any more is missed after 12 s, and one that was paused for 10 is not.
The head has no other node to go to: there a pause may be longer."""


def build(args: dict[str, Any]) -> Application:
    """Return the application that its arguments (see ``serve_config``) describe."""
    tree, folder, run_dir = args["config"], args["model_path"], args["run_dir"]
    config = deploy_config.from_tree(tree)
    # The control plane's port is fixed, so it has to be where clients look for it.
    on_head = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    control = _deployment(ControlReplica, CONTROL, 1, on_head).bind(tree, folder, run_dir)
    # Workers and routers drain first, and only then end.
    end_s = config.limits.drain_s + 2 * _END_S
    pools = [
        _deployment(
            WorkerReplica, pool.name, pool.count, _actor_options(pool), end_s, _WORKER_CHECK_S
        ).bind(tree, pool.name, folder, run_dir)
        for pool in config.pools
    ]
    # So are the doors: clients know the head node's address.
    router = _deployment(RouterReplica, "router", config.router.replicas, on_head, end_s)
    return router.bind(tree, folder, run_dir, control, *pools)


def _deployment(
    replica: Callable[..., Any],
    name: str,
    count: int,
    actor_options: dict[str, Any],
    end_s: float = _END_S,
    check_s: float = _CHECK_S,
) -> Deployment:
    deploy: Callable[..., Deployment] = serve.deployment(
        name=name,
        # Of a pool that is scaled the config file says it otherwise (``autoscale``).
        num_replicas=count,
        ray_actor_options=actor_options,
        # A start that fails is told at once; one that fails after a crash is tried for ever.
        max_constructor_retry_count=1,
        health_check_period_s=1.0,
        health_check_timeout_s=check_s,
        # No call of ours goes through Serve, so there is none that it should wait for.
        graceful_shutdown_wait_loop_s=_WAIT_LOOP_S,
        graceful_shutdown_timeout_s=end_s,
    )
    return deploy(replica)


def _actor_options(pool: PoolConfig) -> dict[str, Any]:
    """Return what Ray places a worker by; cores are leased, since a trial may share them."""
    options: dict[str, Any] = {"num_cpus": pool.cpus_per_worker, "num_gpus": pool.gpus_per_worker}
    if pool.accelerator_type:
        options["accelerator_type"] = pool.accelerator_type
    if pool.node_labels:
        options["label_selector"] = dict(pool.node_labels)
    return options
