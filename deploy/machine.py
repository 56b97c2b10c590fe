"""Can this machine run the cluster as configured? Asked before anything is started.

Each check returns a ``Problem`` or None and takes well under a second; ``check_machine`` raises
all of them as one StartupError, ``check_memory`` follows once the model is there.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from cluster.config import Device, Host
from cluster.config_rules import is_loopback
from cluster.errors import StartupError
from deploy.hardware import element_bytes
from deploy.model_shape import kv_elements
from deploy.problems import raise_all
from deploy.run_state import RunState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.config import DeployConfig, PoolConfig

_MIB = 1 << 20
# Proportional set sizes, measured on an idle cluster and rounded up.
_WORKER_BYTES = 350 * _MIB  # interpreter, torch, transformers, gRPC, a step's activations
_CUDA_WORKER_BYTES = 1500 * _MIB  # the same and the CUDA libraries; weights and KV are on the GPU
_ROUTER_BYTES = 200 * _MIB  # web server, tokenizer
_CONTROL_BYTES = 120 * _MIB
_RAY_BYTES = 800 * _MIB  # its own processes, Serve's controller and the launcher
_STORED_BYTES = {"float32": 4, "float64": 8}
_WRONG = "this machine can't run the cluster as configured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One reason not to start, and what to do about it."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        """Return both as one line."""
        return f"{self.reason}: {self.remedy}"


def check_machine(config: DeployConfig, *, state: RunState | None = None) -> None:
    """Raise StartupError, with reason and remedy, where the cluster can't start here.

    What an earlier run left is told alone, since it explains the rest.
    """
    (state or RunState(config.endpoints.control_port)).check_free()
    raise_all(_WRONG, [cores_problem(config), *port_problems(config)])


def check_ports(config: DeployConfig) -> None:
    """Raise StartupError where somebody listens at the doors, whose address is of this machine.

    Of a cluster that is not there yet, and nobody can tell on another machine: then it passes.
    """
    if is_here(config.endpoints.host):
        raise_all(_WRONG, port_problems(config))


def is_here(host: str) -> bool:
    """Whether an IP address is one of this machine's."""
    own = {each.address for every in psutil.net_if_addrs().values() for each in every}
    return is_loopback(host) or host in own


def check_memory(config: DeployConfig, model_folder: Path) -> None:
    """Raise StartupError where the memory is too small; needs the model, so it comes later."""
    raise_all(_WRONG, [memory_problem(config, model_folder)])


def cores_problem(config: DeployConfig) -> Problem | None:
    """Cores that the deploy file names and this process may not use."""
    usable = os.sched_getaffinity(0)
    named = {"service_cores": config.service_cores}
    named |= {f"pools.{pool.name}.cores": pool.cores for pool in config.pools}
    for field, cores in named.items():
        missing = sorted(set(cores) - usable)
        if missing:
            choice = _listed(sorted(usable))
            return Problem(
                reason=f"{field}: this machine has no core {_listed(missing)}",
                remedy=f"choose from {choice}, or pin nothing with {_unpinned(config)}",
            )
    return None


def _unpinned(config: DeployConfig) -> str:
    """Options that name no core; all of them, since service_cores asks for cores of each pool."""
    fields = ["service_cores"] if config.service_cores else []
    fields += [f"pools.{pool.name}.cores" for pool in config.pools if pool.cores]
    return " ".join(f"--set {field}=[]" for field in fields)


def port_problems(config: DeployConfig) -> list[Problem | None]:
    """What is wrong with the three doors."""
    doors = config.endpoints
    ports = {"http_port": doors.http_port, "grpc_port": doors.grpc_port}
    ports["control_port"] = doors.control_port
    return [port_problem(doors.host, port, f"endpoints.{key}") for key, port in ports.items()]


def port_problem(host: str, port: int, key: str) -> Problem | None:
    """Try to listen on ``host``:``port``, as the door called ``key`` will."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Connections of an earlier run that linger don't matter, a listener does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror:
        return Problem(reason=f"endpoints.host: {host!r} is not an address", remedy="use 127.0.0.1")
    except OSError as error:
        return _bind_problem(error, host, port, key)
    return None


def _bind_problem(error: OSError, host: str, port: int, key: str) -> Problem:
    if error.errno == errno.EADDRINUSE:
        return Problem(
            reason=f"port {port} ({key}) is taken{_holder_of(port)}",
            remedy=f"end it, or choose another port with --set {key}=PORT",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return Problem(
            reason=f"endpoints.host: {host} is not an address of this machine",
            remedy="use 127.0.0.1, or an address that `ip address` lists",
        )
    return Problem(
        reason=f"cannot listen on {host}:{port} ({key}): {os.strerror(error.errno or 0)}",
        remedy="choose a port above 1023",
    )


def _holder_of(port: int) -> str:
    """Name the listener, where this user may know it."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN or connection.pid is None:
                continue
            if connection.laddr and connection.laddr.port == port:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        pass  # a hint only
    return ""


def memory_problem(config: DeployConfig, model_folder: Path) -> Problem | None:
    """Too little memory for the estimate of what the cluster takes."""
    needed, available = estimate_bytes(config, model_folder), available_bytes()
    if needed <= available:
        return None
    return Problem(
        reason=f"the cluster takes about {needed // _MIB} MiB of memory, "
        f"{available // _MIB} MiB are available",
        remedy="free some, or lower kv_tokens or count of the pools, or use dtype bf16",
    )


def estimate_bytes(config: DeployConfig, model_folder: Path) -> int:
    """Estimate the memory of the whole cluster, in bytes of proportional set size.

    Of each worker on CPU: its weights (the checkpoint's size, in the pool's dtype), its KV
    (``kv_tokens`` times the bytes of a token) and a fixed part; on a GPU only the fixed part.
    And fixed parts for each router, the control plane, and Ray. In one process, parts that all
    workers share are counted once. A model whose configuration doesn't tell its KV heads in the
    usual words counts no KV: this is to catch what can't work, not what may be tight.
    """
    facts = _model_facts(model_folder)
    tensors = sum(pool.max_count * _tensor_bytes(pool, facts) for pool in config.pools)
    if config.host is Host.INLINE:
        return tensors + _WORKER_BYTES + _ROUTER_BYTES
    workers = sum(pool.max_count * _fixed_bytes(pool) for pool in config.pools)
    routers = config.router.replicas * _ROUTER_BYTES
    return tensors + workers + routers + _CONTROL_BYTES + _RAY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelFacts:
    num_parameters: int
    kv_elements: int
    """Elements of one token's K and V over all layers."""


def _model_facts(folder: Path) -> _ModelFacts:
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read the model's configuration in {folder}: {error}") from error
    text: dict[str, Any] = tree.get("text_config") or tree
    stored_as = text.get("dtype") or text.get("torch_dtype") or tree.get("torch_dtype")
    return _ModelFacts(
        num_parameters=stored // _STORED_BYTES.get(str(stored_as), 2),
        kv_elements=kv_elements(text),
    )


def _tensor_bytes(pool: PoolConfig, facts: _ModelFacts) -> int:
    if pool.device is Device.CUDA:
        return 0
    num_elements = pool.kv_tokens * facts.kv_elements
    weight_bytes = facts.num_parameters * element_bytes(pool.dtype, pool.device)
    return weight_bytes + num_elements * element_bytes(pool.stored_dtype, pool.device)


def _fixed_bytes(pool: PoolConfig) -> int:
    return _CUDA_WORKER_BYTES if pool.device is Device.CUDA else _WORKER_BYTES


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that new processes can take: the machine's, or less in a container."""
    limits = [_cgroup_bytes(cgroup, "memory.max", "memory.current")]
    limits.append(
        _cgroup_bytes(cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    known = [limit for limit in limits if limit is not None]
    return min([int(psutil.virtual_memory().available), *known])


def _cgroup_bytes(folder: Path, limit_name: str, usage_name: str) -> int | None:
    """What is left under a control group's limit; None where there is no limit."""
    try:
        limit = int((folder / limit_name).read_text())
        usage = int((folder / usage_name).read_text())
        statistics = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no such group, or "max"
        return None
    # Files that were only read are counted as usage, and given back when memory gets short.
    cached = dict(line.split(maxsplit=1) for line in statistics).get("inactive_file", "0")
    return max(0, limit - usage + int(cached))


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
