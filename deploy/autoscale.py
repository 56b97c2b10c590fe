"""The app's autoscaling policy, as Ray Serve calls it: the control plane's load in, targets out.

Serve's controller calls it ten times a second, in its own loop: nothing here waits for anything.
The load comes as the numbers that the control plane's replica records (``ControlReplica``), and
decides once; between two of them, and where none has come for a while, the targets stay.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from cluster import config as deploy_config
from cluster.policy.load import from_stats
from cluster.policy.scaling import Scaler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.config import DeployConfig

    Decisions = tuple[dict[Any, int], dict[Any, dict[str, Any]]]

# Serve's: what is logged there lands in its controller's log.
logger = logging.getLogger("ray.serve")

CONTROL = "control"
"""The deployment that tells the load."""
POLICY = "deploy.autoscale:PoolPolicy"
_INTERVAL_S = 1.0
_LOOK_BACK_S = 5.0
"""For so long Serve keeps a reading; an older one is no reason to change anything."""
_CONTROL_SCALING = {
    "min_replicas": 1,
    "max_replicas": 1,
    "metrics_interval_s": _INTERVAL_S,
    "look_back_period_s": _LOOK_BACK_S,
}


def app_options(config: DeployConfig) -> dict[str, Any]:
    """Return what the Serve config says of scaling: nothing where no pool is scaled.

    The control plane is among the scaled deployments, at exactly one replica: Serve collects
    numbers from no others.
    """
    scaled = [pool for pool in config.pools if pool.is_scaled]
    if not scaled:
        return {}
    deployments: list[dict[str, Any]] = [{"name": CONTROL, "autoscaling_config": _CONTROL_SCALING}]
    for pool in scaled:
        # The policy itself waits before it takes a worker away.
        at_once = {"upscale_delay_s": 0.0, "downscale_delay_s": 0.0}
        bounds = {"min_replicas": pool.min, "max_replicas": pool.max}
        deployments.append({"name": pool.name, "autoscaling_config": bounds | at_once})
    policy = {
        "policy_function": POLICY,
        "policy_kwargs": {"config": deploy_config.to_tree(config)},
    }
    return {"autoscaling_policy": policy, "deployments": deployments}


class PoolPolicy:
    """Serve makes one when it deploys the app, and calls it with each deployment's context."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = deploy_config.from_tree(config)
        self._scaler = Scaler(self._config)
        self._read_at = 0.0

    def __call__(self, contexts: Mapping[Any, Any]) -> Decisions:
        """Return the targets by deployment, where there is something new to decide them by."""
        by_name = {context.deployment_name: context for context in contexts.values()}
        reading = _latest(by_name[CONTROL]) if CONTROL in by_name else None
        if reading is None or reading[0] <= self._read_at:
            return {}, {}
        self._read_at, stats = reading
        targets = {
            pool.name: by_name[pool.name].target_num_replicas if pool.is_scaled else pool.count
            for pool in self._config.pools
            if pool.name in by_name or not pool.is_scaled
        }
        decision = self._scaler.decide(from_stats(stats), targets, self._read_at)
        for name, reason in decision.reasons.items():
            now, before = decision.targets[name], targets.get(name)
            logger.info("pool=%s workers=%d before=%s: %s", name, now, before, reason)
        known = {name: target for name, target in decision.targets.items() if name in by_name}
        return {by_name[name].deployment_id: target for name, target in known.items()}, {}


def _latest(context: Any) -> tuple[float, dict[str, float]] | None:
    """Return the control plane's last numbers and when they were taken; None: none, or old ones.

    In an update two control planes may tell some: the one that told something last is taken.
    """
    last: dict[Any, dict[str, tuple[float, float]]] = {}
    for name, by_replica in (context.raw_metrics or {}).items():
        for replica, points in by_replica.items():
            if points:
                last.setdefault(replica, {})[name] = (points[-1].timestamp, points[-1].value)
    told = [(max(at for at, _ in numbers.values()), numbers) for numbers in last.values()]
    if not told:
        return None
    at, numbers = max(told, key=lambda each: each[0])
    if context.current_time - at > _LOOK_BACK_S:
        return None
    return at, {name: value for name, (taken, value) in numbers.items() if taken == at}
