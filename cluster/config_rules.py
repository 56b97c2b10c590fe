"""What a type cannot say of a deploy file: which values go together."""

from __future__ import annotations

import dataclasses
import ipaddress
from typing import TYPE_CHECKING

from cluster import config_tree
from cluster.config_shape import MAX_TIER_CHARS, Batching, Device, Dtype, Preemption, Role
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from cluster.config_shape import AuthConfig, DeployConfig, PoolConfig, SchedulingConfig


def check(config: DeployConfig) -> None:
    """Raise ConfigError, naming the keys, where values do not go together."""
    names = [pool.name for pool in config.pools]
    if len(set(names)) != len(names):
        raise ConfigError("pools: two pools have the same name", field="pools")
    roles = {pool.role for pool in config.pools}
    if Role.MIXED not in roles and not {Role.PREFILL, Role.DECODE} <= roles:
        raise ConfigError("pools: need a prefill and a decode pool, or a mixed one", field="pools")
    for pool in config.pools:
        _check_pool(pool)
        _check_batching(pool, config.scheduling)
        if config.service_cores and not pool.cores:
            raise ConfigError(
                f"pools.{pool.name}.cores: needed where service_cores is set",
                field=f"pools.{pool.name}.cores",
            )
    limits = tuple(f.name for f in dataclasses.fields(config.limits) if f.type != "bool")
    for section, names_of_positive in {**_POSITIVE, "limits": limits}.items():
        for name in names_of_positive:
            _check_positive(f"{section}.{name}", getattr(getattr(config, section), name))
    _check_tiers(config.scheduling)
    _check_faults(config)
    _check_auth(config.auth)
    _check_host(config.endpoints.host)
    ports = [getattr(config.endpoints, f"{door}_port") for door in ("http", "grpc", "control")]
    if any(not 0 < port < 65536 for port in ports) or len(set(ports)) != len(ports):
        raise ConfigError("endpoints: ports must be 1 to 65535 and differ", field="endpoints")


def _check_host(host: str) -> None:
    """Refuse every address that other machines can reach: nothing asks them who they are yet."""
    if not _is_loopback(host):
        raise ConfigError(
            f"endpoints.host: {host!r} is not a loopback address, and there are no cluster tokens "
            "yet that would keep strangers out; use 127.0.0.1 and a proxy that authenticates",
            field="endpoints.host",
        )


def _check_faults(config: DeployConfig) -> None:
    """Refuse the fault seam on any address but loopback, whatever else may be allowed there."""
    if config.faults.enabled and not _is_loopback(config.endpoints.host):
        raise ConfigError(
            "faults.enabled: only with a loopback endpoints.host: whoever reaches a worker could "
            "break it",
            field="faults.enabled",
        )


def _check_auth(auth: AuthConfig) -> None:
    if auth.keys_file and not auth.keys_file.startswith("/"):
        raise ConfigError(
            "auth.keys_file: must be an absolute path, since routers may start in any folder",
            field="auth.keys_file",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_MAX_TIERS = 16
_POSITIVE = {
    "model": ("max_model_len",),
    "scheduling": ("aging_s", "max_preemptions", "max_queue_requests", "run_ahead_tokens"),
    "router": ("replicas",),
}
_POSITIVE_OF_POOL = (
    "count", "cores_per_worker", "block_size", "kv_tokens", "max_num_seqs", "token_budget",
)  # fmt: skip


def _check_pool(pool: PoolConfig) -> None:
    path = f"pools.{pool.name}"
    if not pool.name.replace("-", "").isalnum():
        raise ConfigError(f"{path}: a pool's name is letters, digits and dashes", field=path)
    for name in _POSITIVE_OF_POOL:
        _check_positive(f"{path}.{name}", getattr(pool, name))
    if pool.kv_tokens % pool.block_size:
        field = f"{path}.kv_tokens"
        raise ConfigError(f"{field}: not a multiple of block_size", field=field)
    if pool.dtype is Dtype.FP16 and pool.device is Device.CPU:
        field = f"{path}.dtype"
        raise ConfigError(f"{field}: fp16 weights are for device cuda", field=field)
    if not 0 <= pool.chunk_tokens <= pool.token_budget:
        raise ConfigError(
            f"{path}.chunk_tokens: {pool.chunk_tokens} is not between 0 and {path}.token_budget, "
            f"{pool.token_budget}",
            field=f"{path}.chunk_tokens",
        )
    if pool.token_budget < pool.max_num_seqs:
        raise ConfigError(
            f"{path}.token_budget: below {path}.max_num_seqs, so that decodes would wait",
            field=f"{path}.token_budget",
        )
    if pool.cores and len(pool.cores) < pool.count * pool.cores_per_worker:
        raise ConfigError(
            f"{path}.cores: fewer than count x cores_per_worker", field=f"{path}.cores"
        )


def _check_positive(path: str, value: float) -> None:
    if value <= 0:
        raise ConfigError(f"{path}: must be above 0, got {value}", field=path)


def _check_batching(pool: PoolConfig, scheduling: SchedulingConfig) -> None:
    path = f"pools.{pool.name}"
    if not 0 <= pool.batch_size <= pool.max_num_seqs:
        raise ConfigError(
            f"{path}.batch_size: {pool.batch_size} is not between 0 and {path}.max_num_seqs, "
            f"{pool.max_num_seqs}",
            field=f"{path}.batch_size",
        )
    if pool.batching is Batching.CONTINUOUS:
        if pool.batch_size:
            raise ConfigError(
                f"{path}.batch_size: for static or dynamic batching; {path}.batching is continuous",
                field=f"{path}.batch_size",
            )
        return
    if scheduling.preemption is not Preemption.OFF:
        raise ConfigError(
            f"{path}.batching: {pool.batching.value} batches run as they were formed; set "
            f"scheduling.preemption to off, not {scheduling.preemption.value}",
            field=f"{path}.batching",
        )
    if pool.batching is Batching.DYNAMIC:
        _check_positive(f"{path}.batch_window_ms", pool.batch_window_ms)


def _check_tiers(scheduling: SchedulingConfig) -> None:
    path, tiers = "scheduling.tiers", scheduling.tiers
    if not tiers or len(set(tiers)) != len(tiers) or len(tiers) > _MAX_TIERS:
        raise ConfigError(f"{path}: needs 1 to {_MAX_TIERS} names that differ", field=path)
    for name in tiers:
        # A number is the OpenAI way to ask for a priority: it must not be a name too.
        if not name.replace("-", "").isalnum() or name.isdigit() or len(name) > MAX_TIER_CHARS:
            raise ConfigError(
                f"{path}: {name!r} is not a name of letters, digits and dashes", field=path
            )
    if scheduling.default_tier not in tiers:
        raise config_tree.refused(
            "scheduling.default_tier", scheduling.default_tier, tiers, what="tier"
        )
