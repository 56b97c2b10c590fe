"""The deploy file: frozen settings, and a loader that refuses what it does not know.

A file is YAML with the sections of ``DeployConfig``. Unknown keys and values are refused with the
dotted path and the nearest valid one. Derived values are properties; a change is a
``dataclasses.replace`` or a ``--set a.b=value``.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import ipaddress
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import yaml

from cluster.errors import ConfigError

if typing.TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")


class Role(enum.Enum):
    """Which halves a worker runs."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Dtype(enum.Enum):
    """Element type of weights and KV; AUTO is bf16 where the device has it in hardware."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"


class Device(enum.Enum):
    """What a worker computes on."""

    CPU = "cpu"
    CUDA = "cuda"


class TransportKind(enum.Enum):
    """How block bytes move between two workers."""

    LOOPBACK = "loopback"
    TORCH_DIST = "torch_dist"


class Policy(enum.Enum):
    """The order in which waiting requests are placed."""

    FCFS = "fcfs"


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

    @property
    def num_blocks(self) -> int:
        """KV blocks of one worker."""
        return self.kv_tokens // self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    """How waiting requests are ordered and how far prefill may run ahead."""

    policy: Policy = Policy.FCFS
    max_queue_requests: int = 256
    run_ahead_tokens: int = 4096
    """Prompt tokens granted to one prefill worker and not yet computed, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Caps that are checked before work in proportion to them."""

    default_deadline_s: float = 120.0
    max_deadline_s: float = 600.0
    max_body_bytes: int = 1 << 20
    max_stop_strings: int = 4
    max_stop_chars: int = 256
    max_messages: int = 256
    export_lease_s: float = 10.0


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
    endpoints: EndpointsConfig = field(default_factory=EndpointsConfig)
    router: RouterConfig = field(default_factory=RouterConfig)

    def pool(self, name: str) -> PoolConfig:
        """Return the pool called ``name``; raises ConfigError where there is none."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise _refused("pools", name, [pool.name for pool in self.pools], what="pool")


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
        _override(tree, override)
    return from_tree(tree)


def from_tree(tree: Mapping[str, Any]) -> DeployConfig:
    """Build and check a config from plain data, as ``to_tree`` returns it."""
    config = _build(DeployConfig, tree, "")
    _check(config)
    return config


def to_tree(config: DeployConfig) -> dict[str, Any]:
    """Return the config as plain data that any serializer takes."""
    tree = _plain(config)
    assert isinstance(tree, dict)
    return tree


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _override(tree: dict[str, Any], override: str) -> None:
    dotted, separator, text = override.partition("=")
    if not separator or not dotted:
        raise ConfigError(f"--set {override}: expected a.b=value", field=dotted or None)
    *parents, last = dotted.split(".")
    node: Any = tree
    for name in parents:
        node = _child(node, name, dotted)
    if not isinstance(node, dict):
        raise ConfigError(f"--set {override}: {dotted} is not inside a section", field=dotted)
    try:
        node[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: not a YAML value", field=dotted) from error


def _child(node: Any, name: str, dotted: str) -> Any:
    if isinstance(node, dict):
        return node.setdefault(name, {})
    if isinstance(node, list):
        named = {
            str(item["name"]): item for item in node if isinstance(item, dict) and "name" in item
        }
        if name in named:
            return named[name]
        if name.isdigit() and int(name) < len(node):
            return node[int(name)]
        raise _refused(dotted, name, list(named), what="element")
    raise ConfigError(f"{dotted}: {name} is not inside a section", field=dotted)


def _refused(path: str, got: object, valid: Sequence[str], *, what: str) -> ConfigError:
    near = difflib.get_close_matches(str(got), valid, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; valid: {', '.join(valid)}"
    return ConfigError(f"{path}: unknown {what} {got!r}{hint}", field=path)


def _build(kind: type[T], tree: Any, path: str) -> T:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path or 'file'}: expected a section, got {tree!r}", field=path)
    hints = typing.get_type_hints(kind)
    prefix = f"{path}." if path else ""
    for key in tree:
        if key not in hints:
            raise _refused(f"{prefix}{key}", key, list(hints), what="key")
    values = {key: _value(hints[key], value, f"{prefix}{key}") for key, value in tree.items()}
    for f in dataclasses.fields(kind):  # type: ignore[arg-type]
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            raise ConfigError(f"{prefix}{f.name}: missing", field=f"{prefix}{f.name}")
    return kind(**values)


def _value(hint: Any, value: Any, path: str) -> Any:
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{path}: expected a list, got {value!r}", field=path)
        item_hint = typing.get_args(hint)[0]
        return tuple(_value(item_hint, item, f"{path}.{i}") for i, item in enumerate(value))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _build(hint, value, path)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        valid = [member.value for member in hint]
        if value not in valid:
            raise _refused(path, value, valid, what=hint.__name__.lower())
        return hint(value)
    return _scalar(hint, value, path)


def _scalar(hint: type, value: Any, path: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{path}: expected {hint.__name__}, got {value!r}", field=path)
    return value


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
        if config.service_cores and not pool.cores:
            raise ConfigError(
                f"pools.{pool.name}.cores: needed where service_cores is set",
                field=f"pools.{pool.name}.cores",
            )
    for section, names_of_positive in _POSITIVE.items():
        for name in names_of_positive:
            _check_positive(f"{section}.{name}", getattr(getattr(config, section), name))
    _check_host(config.endpoints.host)
    ports = [getattr(config.endpoints, f"{door}_port") for door in ("http", "grpc", "control")]
    if any(not 0 < port < 65536 for port in ports) or len(set(ports)) != len(ports):
        raise ConfigError("endpoints: ports must be 1 to 65535 and differ", field="endpoints")


def _check_host(host: str) -> None:
    """Refuse every address that other machines can reach: nothing asks them who they are yet."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            f"endpoints.host: {host!r} is not a loopback address, and there are no cluster tokens "
            "yet that would keep strangers out; use 127.0.0.1 and a proxy that authenticates",
            field="endpoints.host",
        )


_POSITIVE = {
    "model": ("max_model_len",),
    "scheduling": ("max_queue_requests", "run_ahead_tokens"),
    "limits": tuple(f.name for f in dataclasses.fields(LimitsConfig)),
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
    if pool.chunk_tokens < 0 or pool.token_budget < pool.max_num_seqs:
        raise ConfigError(f"{path}: chunk_tokens < 0 or token_budget < max_num_seqs", field=path)
    if pool.cores and len(pool.cores) < pool.count * pool.cores_per_worker:
        raise ConfigError(
            f"{path}.cores: fewer than count x cores_per_worker", field=f"{path}.cores"
        )


def _check_positive(path: str, value: float) -> None:
    if value <= 0:
        raise ConfigError(f"{path}: must be above 0, got {value}", field=path)
