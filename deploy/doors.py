"""How our own commands reach the doors of a cluster: by its deploy file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from cluster.tls import DoorTls
from cluster.trust import ClusterToken
from deploy.client import Client, ClientTls

if TYPE_CHECKING:
    from cluster.config import DeployConfig


def http_url(config: DeployConfig, *, by_name: bool = False) -> str:
    """Return where HTTP is spoken, without a slash at the end.

    ``by_name``: by the name in its certificate, if the deploy file tells one.
    """
    endpoints, security = config.endpoints, config.security
    scheme = "https" if security.has_door_tls else "http"
    host = (security.door_certificate_name if by_name else "") or endpoints.host
    return f"{scheme}://{host}:{endpoints.http_port}"


def http_client(config: DeployConfig, *, timeout_s: float, **headers: str) -> httpx.Client:
    """Return a client for ``http_url``; raises StartupError where its certificates can't be read.

    The doors are on this machine, or in its cluster: a proxy of the environment has no part in it.
    """
    tls = _tls(config)
    if tls is None:
        return httpx.Client(timeout=timeout_s, trust_env=False, headers=headers)
    client = httpx.Client(timeout=timeout_s, trust_env=False, headers=headers, verify=tls.context())
    if tls.server_name:
        name = tls.server_name

        def expect_name(request: httpx.Request) -> None:
            request.extensions["sni_hostname"] = name

        client.event_hooks = {"request": [expect_name]}
    return client


def grpc_client(config: DeployConfig) -> Client:
    """Return a client of the gRPC door; raises StartupError as ``http_client``."""
    endpoints = config.endpoints
    return Client(f"{endpoints.host}:{endpoints.grpc_port}", tls=_tls(config))


def check_files(config: DeployConfig) -> None:
    """Raise StartupError, naming the key, where this node's token or certificates are of no use."""
    ClusterToken.load(config.security)
    if config.security.has_door_tls:
        DoorTls(config.security)
    tls = _tls(config)
    if tls is not None:
        tls.context()


def _tls(config: DeployConfig) -> ClientTls | None:
    security = config.security
    if not security.has_door_tls:
        return None
    return ClientTls(ca_file=security.door_ca_file, server_name=security.door_certificate_name)
