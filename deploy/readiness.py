"""Whether a cluster is whole, and what it waits for, as its own control plane and doors tell it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx

from cluster.control.status import get_cluster
from cluster.errors import PdserveError
from cluster.trust import ClusterToken
from deploy.doors import http_client, http_url

if TYPE_CHECKING:
    from cluster.config import DeployConfig

_TIMEOUT_S = 2.0


def missing(config: DeployConfig) -> str:
    """Say what is not there yet; empty: ready."""
    endpoints = config.endpoints
    address = f"{endpoints.host}:{endpoints.control_port}"
    token = ClusterToken.load(config.security)
    try:
        view = asyncio.run(get_cluster(address, timeout_s=_TIMEOUT_S, token=token))
    except PdserveError:
        return "the control plane does not answer"
    for pool in config.pools:
        here = sum(worker.worker.pool == pool.name for worker in view.workers)
        if here < pool.min_count:
            return f"pool {pool.name}: {here} of {pool.min_count} workers registered"
    if view.num_routers < config.router.replicas:
        return f"{view.num_routers} of {config.router.replicas} routers connected"
    try:
        with http_client(config, timeout_s=5.0) as client:
            answer = client.get(f"{http_url(config)}/health/ready")
    except httpx.HTTPError as error:
        return f"the HTTP door does not answer ({error})"
    return "" if answer.status_code == httpx.codes.OK else f"not ready: {answer.text[:200]}"
