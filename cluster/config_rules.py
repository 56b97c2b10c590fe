"""What a type cannot say of a deploy file: which values go together."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from typing import TYPE_CHECKING

from cluster import config_security, config_tree
from cluster.config_shape import (
    DEFAULT_KV_TOKENS,
    DEFAULT_WINDOW_MS,
    HEAD,
    MAX_TIER_CHARS,
    Batching,
    Device,
    Dtype,
    Host,
    Preemption,
    Role,
    TransportKind,
)
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.config_shape import (
        DeployConfig,
        PoolConfig,
        SchedulingConfig,
    )


def check(config: DeployConfig) -> None:
    """Raise ConfigError, naming the keys, where values do not go together."""
    names = [pool.name for pool in config.pools]
    if len(set(names)) != len(names):
        raise ConfigError("pools: two pools have the same name", field="pools")
    roles = {pool.role for pool in config.pools}
    if Role.MIXED not in roles and not {Role.PREFILL, Role.DECODE} <= roles:
        raise ConfigError("pools: need a prefill and a decode pool, or a mixed one", field="pools")
    for pool in config.pools:
        check_role(config, pool, pool.role)
        _check_count(pool, config.host)
        if config.service_cores and not pool.cores:
            raise ConfigError(
                f"pools.{pool.name}.cores: needed where service_cores is set",
                field=f"pools.{pool.name}.cores",
            )
    _check_cores("service_cores", config.service_cores)
    limits = tuple(f.name for f in dataclasses.fields(config.limits) if f.type != "bool")
    for section, names_of_positive in {**_POSITIVE, "limits": limits}.items():
        for name in names_of_positive:
            _check_positive(f"{section}.{name}", getattr(getattr(config, section), name))
    _check_transports(config)
    _check_tiers(config.scheduling)
    _check_floors(config)
    _check_faults(config)
    config_security.check_auth(config.auth)
    config_security.check(config.security)
    _check_address(config)
    ports = [getattr(config.endpoints, f"{door}_port") for door in ("http", "grpc", "control")]
    if any(not 0 < port < 65536 for port in ports) or len(set(ports)) != len(ports):
        raise ConfigError("endpoints: ports must be 1 to 65535 and differ", field="endpoints")


def check_role(config: DeployConfig, pool: PoolConfig, role: Role) -> None:
    """Raise ConfigError, naming the keys, where a worker of ``pool`` could not be a ``role``."""
    pool = dataclasses.replace(pool, role=role)
    _check_pool(pool)
    _check_hardware(pool, config)
    _check_batching(pool, config.scheduling)
    _check_swap(pool, config.scheduling)
    _check_prefix(pool)


def _check_address(config: DeployConfig) -> None:
    """Refuse an address that strangers reach, but one that is named, and only with a token."""
    host, field = config.endpoints.host, "endpoints.host"
    if is_loopback(host):
        return
    try:
        address = None if host == HEAD else ipaddress.ip_address(host)
    except ValueError as error:
        raise ConfigError(
            f"{field}: {host!r} is not an IP address; use 127.0.0.1, or on a cluster head",
            field=field,
        ) from error
    if address is not None and (address.is_unspecified or address.is_multicast):
        raise ConfigError(
            f"{field}: {host} is no address of one interface: use 127.0.0.1, or name the head "
            "node's address in the cluster's network",
            field=field,
        )
    if not config.security.has_token:
        raise ConfigError(
            f"{field}: {host} is not a loopback address, and without a cluster token strangers "
            "could register as workers: set security.cluster_token_file, or use 127.0.0.1",
            field=field,
        )


def _check_faults(config: DeployConfig) -> None:
    """Refuse the fault seam on any address but loopback, whatever else may be allowed there."""
    if config.faults.enabled and not is_loopback(config.endpoints.host):
        raise ConfigError(
            "faults.enabled: only with a loopback endpoints.host: whoever reaches a worker could "
            "break it",
            field="faults.enabled",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; a name is none."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_MAX_TIERS = 16
_TAKEN_NAMES = ("control", "router")
"""Each pool is a Serve deployment, and so are these two."""
_LABEL_KEY = re.compile(r"([A-Za-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_POSITIVE = {
    "model": ("max_model_len",),
    "scheduling": (
        "aging_s", "max_preemptions", "max_queue_requests", "max_queue_tokens", "run_ahead_tokens",
        "tenant_queue_share", "local_prefill_tokens",
    ),
    "scaling": ("ttft_target_s", "quiet_s", "start_s"),
    "router": ("replicas",),
}  # fmt: skip
_POSITIVE_OF_POOL = (
    "count", "cores_per_worker", "block_size", "kv_tokens", "max_num_seqs", "token_budget",
)  # fmt: skip


def _check_pool(pool: PoolConfig) -> None:
    path = f"pools.{pool.name}"
    if not pool.name.replace("-", "").isalnum():
        raise ConfigError(f"{path}: a pool's name is letters, digits and dashes", field=path)
    if pool.name in _TAKEN_NAMES:
        raise ConfigError(
            f"{path}: {pool.name} is what another part of the cluster is called: name the pool "
            "otherwise",
            field=path,
        )
    for name in _POSITIVE_OF_POOL:
        _check_positive(f"{path}.{name}", getattr(pool, name))
    if pool.kv_tokens % pool.block_size:
        field = f"{path}.kv_tokens"
        raise ConfigError(f"{field}: not a multiple of block_size", field=field)
    if pool.dtype is Dtype.FP16 and pool.device is Device.CPU:
        field = f"{path}.dtype"
        raise ConfigError(f"{field}: fp16 weights are for device cuda", field=field)
    if pool.token_budget < pool.max_num_seqs:
        raise ConfigError(
            f"{path}.token_budget: below {path}.max_num_seqs, so that decodes would wait",
            field=f"{path}.token_budget",
        )
    if not 0 <= pool.chunk_tokens <= pool.token_budget:
        raise ConfigError(
            f"{path}.chunk_tokens: {pool.chunk_tokens} is not between 0 and {path}.token_budget, "
            f"{pool.token_budget}",
            field=f"{path}.chunk_tokens",
        )
    _check_cores(f"{path}.cores", pool.cores)
    if pool.cores and len(pool.cores) < pool.max_count * pool.cores_per_worker:
        most = "max" if pool.is_scaled else "count"
        raise ConfigError(
            f"{path}.cores: fewer than {most} x cores_per_worker", field=f"{path}.cores"
        )


def _check_cores(path: str, cores: Sequence[int]) -> None:
    for core in cores:
        if core < 0:
            raise ConfigError(f"{path}: cores count from 0, got {core}", field=path)


def _check_count(pool: PoolConfig, host: Host) -> None:
    """Refuse a pool whose numbers of workers contradict one another, or its host."""
    path = f"pools.{pool.name}"
    if not pool.is_scaled:
        if pool.max < 0:
            raise ConfigError(f"{path}.max: must not be below 0", field=f"{path}.max")
        if pool.min != 1:
            raise ConfigError(
                f"{path}.min: needs {path}.max; for a fixed number of workers use {path}.count",
                field=f"{path}.min",
            )
        return
    if not 0 <= pool.min <= pool.max:
        raise ConfigError(
            f"{path}.min: {pool.min} is not between 0 and {path}.max, {pool.max}",
            field=f"{path}.min",
        )
    if pool.count != 1:
        raise ConfigError(
            f"{path}.count: {path}.max says that workers come and go: use min and max, or count",
            field=f"{path}.count",
        )
    if host is Host.INLINE:
        raise ConfigError(
            f"{path}.max: host inline runs a fixed number of workers: use {path}.count",
            field=f"{path}.max",
        )


def _check_floors(config: DeployConfig) -> None:
    """Refuse a pool that may be empty where requests need it: they would be turned away."""
    if config.scaling.tpot_target_s < 0:
        field = "scaling.tpot_target_s"
        raise ConfigError(f"{field}: must not be below 0", field=field)
    for role in (Role.PREFILL, Role.DECODE):
        serving = [pool for pool in config.pools if pool.role in (role, Role.MIXED)]
        staying = [pool for pool in serving if pool.min_count > 0]
        largest = max((pool.kv_tokens for pool in staying), default=0)
        for pool in serving:
            field = f"pools.{pool.name}.min"
            if pool.min_count > 0:
                continue
            if not staying:
                raise ConfigError(
                    f"{field}: 0, and no other pool keeps a {role.value} worker: requests would "
                    "be refused until one is there",
                    field=field,
                )
            needed = min(pool.kv_tokens, config.model.max_model_len)
            if largest < needed and not any(other.kv_bytes for other in serving):
                raise ConfigError(
                    f"{field}: 0, and no {role.value} worker that stays has the kv_tokens for a "
                    f"request of {needed} tokens, as these have",
                    field=field,
                )


def _check_hardware(pool: PoolConfig, config: DeployConfig) -> None:
    path = f"pools.{pool.name}"
    not_below_0 = (
        "cpus_per_worker", "gpus_per_worker", "cost_per_hour", "prefill_tokens_per_s", "kv_bytes",
    )  # fmt: skip
    for name in not_below_0:
        if getattr(pool, name) < 0:
            raise ConfigError(f"{path}.{name}: must not be below 0", field=f"{path}.{name}")
    for key, value in pool.node_labels.items():
        # Ray would read the rest as operators of a condition.
        if not (_LABEL_KEY.fullmatch(key) and _LABEL_VALUE.fullmatch(value)):
            raise ConfigError(
                f"{path}.node_labels.{key}: {value!r} is no label: letters, digits, . _ and -",
                field=f"{path}.node_labels.{key}",
            )
    if pool.gpus_per_worker > 1:
        raise ConfigError(
            f"{path}.gpus_per_worker: a worker computes on one GPU: raise count instead",
            field=f"{path}.gpus_per_worker",
        )
    if pool.kv_bytes and pool.kv_tokens != DEFAULT_KV_TOKENS:
        raise ConfigError(
            f"{path}.kv_bytes: {path}.kv_tokens says it already", field=f"{path}.kv_bytes"
        )
    if pool.device is not Device.CUDA or config.host is not Host.RAY:
        return
    if not pool.gpus_per_worker:
        raise ConfigError(
            f"{path}.gpus_per_worker: device cuda needs a GPU, or a part of one",
            field=f"{path}.gpus_per_worker",
        )
    is_pair = pool.role is not Role.MIXED
    is_torch = config.transport_of(pool) is TransportKind.TORCH_DIST
    if is_pair and pool.gpus_per_worker < 1 and is_torch:
        raise ConfigError(
            f"{path}.gpus_per_worker: NCCL cannot connect two workers on one GPU: use transport "
            "auto, or role mixed",
            field=f"{path}.gpus_per_worker",
        )


def _check_transports(config: DeployConfig) -> None:
    """Any two workers may have to link: what one pool takes the others have to take as well."""
    for own in config.pools:
        for other in config.pools:
            kinds = {config.transport_of(own), config.transport_of(other)}
            if len(kinds) > 1 and (
                TransportKind.AUTO not in kinds or TransportKind.LOOPBACK in kinds
            ):
                names = " and ".join(sorted(kind.value for kind in kinds))
                raise ConfigError(
                    f"pools.{own.name}.transport, pools.{other.name}.transport: {names} have "
                    "nothing in common; auto takes torch_dist and shm",
                    field=f"pools.{own.name}.transport",
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
    if pool.batching is not Batching.DYNAMIC and pool.batch_window_ms != DEFAULT_WINDOW_MS:
        raise ConfigError(
            f"{path}.batch_window_ms: for dynamic batching; {path}.batching is "
            f"{pool.batching.value}",
            field=f"{path}.batch_window_ms",
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


def _check_prefix(pool: PoolConfig) -> None:
    if pool.prefix_shared and not pool.prefix_cache:
        field = f"pools.{pool.name}.prefix_shared"
        raise ConfigError(
            f"{field}: there is nothing to share, pools.{pool.name}.prefix_cache is off",
            field=field,
        )


def _check_swap(pool: PoolConfig, scheduling: SchedulingConfig) -> None:
    field = f"pools.{pool.name}.swap_tokens"
    if not pool.swap_tokens:
        return
    if scheduling.preemption is not Preemption.SWAP:
        raise ConfigError(
            f"{field}: for scheduling.preemption swap, and that is {scheduling.preemption.value}",
            field=field,
        )
    _check_positive(field, pool.swap_tokens)
    if pool.swap_tokens % pool.block_size:
        raise ConfigError(
            f"{field}: {pool.swap_tokens} is not a multiple of pools.{pool.name}.block_size, "
            f"{pool.block_size}",
            field=field,
        )


def _check_tiers(scheduling: SchedulingConfig) -> None:
    if scheduling.tenant_queue_share > 1.0:
        path = "scheduling.tenant_queue_share"
        raise ConfigError(f"{path}: a part of the queue, at most 1", field=path)
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
