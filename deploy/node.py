"""What a process of the cluster finds out on its own node: its address, its folder, its model."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config_rules import is_loopback
from cluster.errors import StartupError
from deploy.model_source import resolve_model
from deploy.run_state import RunState

if TYPE_CHECKING:
    from cluster.config import DeployConfig

_ANY_PORT = 9
_TAG_CHARS = 6


def own_address(config: DeployConfig) -> str:
    """Return the address at which the rest of the cluster reaches this node.

    It is the one from which this node would speak to the head node; no packet is sent. Raises
    StartupError where no network leads there.
    """
    head = config.endpoints.host
    if is_loopback(head):
        return head
    family = socket.AF_INET6 if ":" in head else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((head, _ANY_PORT))
        except OSError as error:
            raise StartupError(f"no network leads to endpoints.host {head}: {error}") from error
        return str(probe.getsockname()[0])


def worker_id(config: DeployConfig, pool_name: str, index: int) -> str:
    """Return the id of a pool's worker in place ``index`` of this node.

    Where there may be other nodes it says which one this is, in no words of the network's.
    """
    if is_loopback(config.endpoints.host):
        return f"{pool_name}-{index}"
    tag = hashlib.sha256(own_address(config).encode()).hexdigest()[:_TAG_CHARS]
    return f"{pool_name}-{tag}-{index}"


def run_folder(config: DeployConfig, run_dir: str) -> Path:
    """Return where this node's processes log and lease their cores.

    ``run_dir`` is a launcher's, who has made it; without one each node has its own.
    """
    return Path(run_dir) if run_dir else RunState(config.endpoints.control_port).join()


def model_folder(model_path: str) -> Path:
    """Return the checkpoint's folder on this node, fetched first where it has to be."""
    return resolve_model(model_path).folder
