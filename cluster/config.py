"""The deploy file: frozen settings, and a loader that refuses what it does not know.

A file is YAML with the sections of ``DeployConfig``. Unknown keys and values are refused with the
dotted path and the nearest valid one. Derived values are properties; a change is a
``dataclasses.replace`` or a ``--set a.b=value``.
"""

from __future__ import annotations

import dataclasses
import enum
import ipaddress
import typing
from dataclasses import dataclass, field
from typing import Any

import yaml

from cluster import config_tree
from cluster.errors import ConfigError

if typing.TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class Role(enum.Enum):
    """Which halves a worker runs."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Dtype(enum.Enum):
    """Element type of weights and KV; AUTO is bf16 where the device has it in hardware.

    FP16 is for KV anywhere, and for weights on a GPU.
    """

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Device(enum.Enum):
    """What a worker computes on."""

    CPU = "cpu"
    CUDA = "cuda"


class TransportKind(enum.Enum):
    """How block bytes move between two workers.

    SHM needs both on one host; AUTO takes it for such links, and TORCH_DIST for all others.
    """

    LOOPBACK = "loopback"
    TORCH_DIST = "torch_dist"
    SHM = "shm"
    AUTO = "auto"


class Policy(enum.Enum):
    """The order in which waiting requests are placed."""

    FCFS = "fcfs"
    SJF = "sjf"
    """The least expected work first: prompt tokens that are not cached, and expected output."""
    PRIORITY = "priority"
    """The highest tier first."""


class Preemption(enum.Enum):
    """What happens where a sequence needs slots or blocks that others have."""

    OFF = "off"
    """Nothing: each has its prompt and max_tokens reserved before it starts."""
    RECOMPUTE = "recompute"
    """The youngest of the lowest tier gives them up, and is computed again later."""


class Batching(enum.Enum):
    """When a worker's batch takes new members."""

    CONTINUOUS = "continuous"
    STATIC = "static"
    """When the last batch has ended to its last member."""
    DYNAMIC = "dynamic"
    """As static, once the new batch is full or has collected for a window."""


class Host(enum.Enum):
    """What runs the cluster: Ray, or one process for everything."""

    RAY = "ray"
    INLINE = "inline"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model the cluster serves."""

    path: str = "trial"
    """``trial`` (SmolLM2-135M-Instruct, fetched once), a folder, or a Hugging Face id."""
    name: str = ""
    """The name clients use; derived from ``path`` when empty."""
    max_model_len: int = 2048
    """Prompt and output tokens of one choice together; capped by the model's own limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Workers of one role on one kind of hardware."""

    name: str
    role: Role
    count: int = 1
    device: Device = Device.CPU
    dtype: Dtype = Dtype.AUTO
    kv_dtype: Dtype = Dtype.AUTO
    """What KV is stored as; AUTO: as the weights are. Pools may differ: receivers convert."""
    cores: tuple[int, ...] = ()
    """CPU cores to take from, ``cores_per_worker`` each; empty: the workers are not pinned."""
    cores_per_worker: int = 1
    gpus_per_worker: float = 0.0
    block_size: int = 16
    """Tokens per KV block."""
    kv_tokens: int = 16384
    """KV capacity of one worker, in tokens; a multiple of ``block_size``."""
    max_num_seqs: int = 8
    """Sequences that share a step."""
    token_budget: int = 2048
    """Tokens computed in one step at most."""
    chunk_tokens: int = 0
    """A prompt's share of a step at most; 0: the whole prompt, within the budget."""
    batching: Batching = Batching.CONTINUOUS
    batch_size: int = 0
    """Members of a static or dynamic batch at most; 0: ``max_num_seqs``."""
    batch_window_ms: float = 20.0
    """For how long a dynamic batch collects at most."""
    prefix_cache: bool = True
    """Keep the KV of ended sequences until its room is needed, for prompts that begin alike."""

    @property
    def num_blocks(self) -> int:
        """KV blocks of one worker."""
        return self.kv_tokens // self.block_size

    @property
    def num_batch_slots(self) -> int:
        """Sequences that share a step at most, by the kind of batching too."""
        return self.batch_size or self.max_num_seqs

    @property
    def stored_dtype(self) -> Dtype:
        """What KV is stored as; AUTO where only a worker on its device can say."""
        return self.dtype if self.kv_dtype is Dtype.AUTO else self.kv_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    """How waiting requests are ordered and how far prefill may run ahead."""

    policy: Policy = Policy.FCFS
    tiers: tuple[str, ...] = ("low", "normal", "high")
    """Names that requests may give as their ``priority``, from the lowest to the highest."""
    default_tier: str = "normal"
    """Of requests that name none."""
    aging_s: float = 5.0
    """Nobody who is younger by more than this overtakes a request, or takes what it waits for."""
    fair_tenants: bool = False
    """Whether tenants get fair shares of tokens within a tier."""
    preemption: Preemption = Preemption.RECOMPUTE
    max_preemptions: int = 3
    """Of one sequence; it is then computed again only with room for all that may come."""
    max_queue_requests: int = 256
    run_ahead_tokens: int = 4096
    """Prompt tokens granted to one prefill worker and not yet computed, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Caps that are checked before work in proportion to them."""

    default_deadline_s: float = 120.0
    max_deadline_s: float = 600.0
    max_body_bytes: int = 1 << 20
    max_header_bytes: int = 64 << 10
    """Of one HTTP request's head, or one gRPC call's metadata."""
    max_json_depth: int = 32
    max_id_chars: int = 128
    """Of an id or name that a client gives."""
    max_stop_strings: int = 4
    max_stop_chars: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 300
    """Entries of ``logit_bias``."""
    max_logprobs: int = 20
    """Best tokens told with each token; 5 for completions, as OpenAI has it."""
    max_messages: int = 256
    max_content_parts: int = 64
    """Of one message."""
    max_tools: int = 64
    """Of a chat, and calls of tools in one message."""
    max_n: int = 16
    """Choices of one prompt."""
    max_prompts: int = 32
    """Of one call."""
    max_choices: int = 64
    """Of all prompts of a call together."""
    max_streams_per_key: int = 256
    """Calls of one API key that are open at once, in one router."""
    export_lease_s: float = 10.0
    """How long prefilled KV waits for another decode worker after a handoff failed."""
    reserve_patience_s: float = 1.0
    """How long an offered export waits for blocks on its decode worker before it is refused."""
    stream_kv: bool = True
    """Whether finished blocks are sent while later chunks compute; else all at the end."""
    link_idle_s: float = 60.0
    """A link that carried nothing for so long is closed; the next handoff dials a new one."""
    kv_digest: bool = False
    """Whether KV is digested before it is sent and after it came; corrupted KV is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Where API keys are read from, ``tenant=key`` a line; nothing set: no key is needed."""

    keys_file: str = ""
    """A file, on each host that runs a router."""
    keys_env: str = ""
    """An environment variable of the routers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointsConfig:
    """Where the doors are: a loopback address, and ports that differ."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    control_port: int = 8002


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The ingress."""

    replicas: int = 1
    resume: bool = True
    """Whether a request goes on with other workers when its own are lost after a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsConfig:
    """Faults on purpose, for tests; never beyond loopback."""

    enabled: bool = False
    """Workers serve ``pdserve.faults.v1.Faults``: whoever reaches them can break them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployConfig:
    """Everything one cluster needs to know, one file."""

    pools: tuple[PoolConfig, ...]
    host: Host = Host.RAY
    service_cores: tuple[int, ...] = ()
    """CPU cores of all that is no worker (routers, control plane, Ray); empty: not pinned."""
    transport: TransportKind = TransportKind.TORCH_DIST
    model: ModelConfig = field(default_factory=ModelConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    endpoints: EndpointsConfig = field(default_factory=EndpointsConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)

    def pool(self, name: str) -> PoolConfig:
        """Return the pool called ``name``; raises ConfigError where there is none."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise config_tree.refused("pools", name, [pool.name for pool in self.pools], what="pool")


def load(path: Path, overrides: Sequence[str] = ()) -> DeployConfig:
    """Read a deploy file, apply ``a.b=value`` overrides (YAML values), and check everything.

    A list element is named by its index or by its ``name``: ``pools.decode.count=2``.
    Raises ConfigError with the dotted path of what is wrong.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
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
    _check(config)
    return config


def to_tree(config: DeployConfig) -> dict[str, Any]:
    """Return the config as plain data that any serializer takes."""
    tree = config_tree.plain(config)
    assert isinstance(tree, dict)
    return tree


def _check(config: DeployConfig) -> None:
    """Check what a type cannot say."""
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
    for section, names_of_positive in _POSITIVE.items():
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
MAX_TIER_CHARS = 32
_POSITIVE = {
    "model": ("max_model_len",),
    "scheduling": ("aging_s", "max_preemptions", "max_queue_requests", "run_ahead_tokens"),
    "limits": tuple(f.name for f in dataclasses.fields(LimitsConfig) if f.type != "bool"),
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
