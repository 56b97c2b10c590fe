"""The deploy file: frozen settings, and a loader that refuses what it does not know.

A file is YAML with the sections of ``DeployConfig``. Unknown keys and values are refused with the
dotted path and the nearest valid one. Derived values are properties; a change is a
``dataclasses.replace`` or a ``--set a.b=value``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from cluster import config_rules, config_text, config_tree
from cluster.config_security import AuthConfig, SecurityConfig
from cluster.config_shape import (
    DEFAULT_KV_TOKENS,
    HEAD,
    MAX_TIER_CHARS,
    Batching,
    DeployConfig,
    Device,
    Dtype,
    EndpointsConfig,
    FaultsConfig,
    Host,
    LimitsConfig,
    LocalPrefill,
    ModelConfig,
    Policy,
    PoolConfig,
    Preemption,
    Role,
    RouterConfig,
    ScalingConfig,
    SchedulingConfig,
    TransportKind,
)
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = [
    "DEFAULT_KV_TOKENS",
    "HEAD",
    "MAX_TIER_CHARS",
    "AuthConfig",
    "Batching",
    "DeployConfig",
    "Device",
    "Dtype",
    "EndpointsConfig",
    "FaultsConfig",
    "Host",
    "LimitsConfig",
    "LocalPrefill",
    "ModelConfig",
    "Policy",
    "PoolConfig",
    "Preemption",
    "Role",
    "RouterConfig",
    "ScalingConfig",
    "SchedulingConfig",
    "SecurityConfig",
    "TransportKind",
    "from_tree",
    "load",
    "to_tree",
]


def load(path: Path, overrides: Sequence[str] = ()) -> DeployConfig:
    """Read a deploy file, apply ``a.b=value`` overrides (YAML values), and check everything.

    A list element is named by its index or by its ``name``: ``pools.decode.count=2``.
    Raises ConfigError with the dotted path of what is wrong, or with the lines of a key that stands
    twice.
    """
    try:
        tree = config_text.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections")
    for override in overrides:
        config_tree.override(tree, override)
    return from_tree(tree)


def from_tree(tree: Mapping[str, Any]) -> DeployConfig:
    """Build and check a config from plain data, as ``to_tree`` returns it."""
    config = config_tree.build(DeployConfig, tree)
    config_rules.check(config)
    return config


def to_tree(config: DeployConfig) -> dict[str, Any]:
    """Return the config as plain data that any serializer takes."""
    tree = config_tree.plain(config)
    assert isinstance(tree, dict)
    return tree
