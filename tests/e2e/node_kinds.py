"""Kinds of nodes that Ray's autoscaler starts when workers ask for one, and ends when none is on it
any more: what the head of an emulated cluster needs for that. Ray's fake provider makes the nodes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Kinds = Mapping[str, dict[str, object]]
    """By name: ``resources``, ``min_workers``, ``max_workers``."""

ENVIRONMENT = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
KIND = "RAY_NODE_TYPE_NAME"
"""In the environment of a node's raylet."""
_HEAD_KIND = "ray.head.default"
"""The provider's word."""
_IDLE_MINUTES = 0.1
_COMMANDS = (
    "cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands",
    "setup_commands", "head_setup_commands", "worker_setup_commands",
    "head_start_ray_commands", "worker_start_ray_commands",
)  # fmt: skip
"""What a cluster file has to have, and nobody runs here."""


def head_options(
    kinds: Kinds, file: Path, gcs_port: int, of_each: Mapping[str, object]
) -> dict[str, object]:
    """Write the cluster file, and return what the head is started with; ``of_each`` are resources
    that every node has."""
    from ray._private.services import get_node_ip_address
    from ray.autoscaler._private.fake_multi_node import node_provider as fake

    head = {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}
    workers = {
        name: {"node_config": {}, **kind, "resources": {**of_each, **kind["resources"]}}
        for name, kind in kinds.items()
    }
    tree = {
        "cluster_name": "fake",
        "max_workers": sum(kind["max_workers"] for kind in kinds.values()),
        "idle_timeout_minutes": _IDLE_MINUTES,
        "provider": {
            "type": "external",
            "module": f"{fake.__name__}.FakeMultiNodeProvider",
            "head_node_id": fake.FAKE_HEAD_NODE_ID,
            "gcs_address": f"{get_node_ip_address()}:{gcs_port}",
            "launch_multiple": True,
            "use_node_id_as_ip": True,
        },
        "head_node_type": _HEAD_KIND,
        "available_node_types": {_HEAD_KIND: head, **workers},
        "auth": {},
        "file_mounts": {},
        **{key: [] for key in _COMMANDS},
    }
    file.write_text(json.dumps(tree))
    told = ("RAY_OVERRIDE_NODE_ID_FOR_TESTING", "RAY_CLOUD_INSTANCE_ID")
    return {
        "gcs_server_port": gcs_port,
        "autoscaling_config": str(file),
        "env_vars": {**dict.fromkeys(told, fake.FAKE_HEAD_NODE_ID), KIND: _HEAD_KIND},
    }
