"""``pdserve plan``: what will run where, and what it takes, before anything does.

From the deploy file and the model's ``config.json`` alone; with a running Ray also which node each
worker fits on.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.config import Device, PoolConfig, Preemption, Role
from deploy.fit import fit, needs
from deploy.hardware import GPU_BYTES, USABLE_SHARE, element_bytes
from deploy.model_shape import count_parameters, read_shape
from deploy.problems import raise_all
from deploy.status import table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cluster.config import DeployConfig
    from deploy.fit import Node
    from deploy.model_shape import ModelShape

_GB = 10**9
_WRONG = "it cannot run like this"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """What one pool takes; bytes are of one worker."""

    pool: PoolConfig
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    kv_tokens: int
    swap_bytes: int
    """Of CPU memory, for the KV of preempted sequences."""
    gpu_bytes: int | None
    """What it may take of its GPU; None where that isn't known."""

    @property
    def worker_bytes(self) -> int:
        """Bytes of all three together."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    @property
    def problem(self) -> str | None:
        """Why a worker cannot work, if it can't."""
        if self.gpu_bytes is None or self.worker_bytes <= self.gpu_bytes:
            return None
        pool = self.pool
        return (
            f"pool {pool.name}: a worker takes {_gb(self.worker_bytes)}, and may take "
            f"{_gb(self.gpu_bytes)} of its {pool.gpus_per_worker:g} {pool.accelerator_type}: "
            f"lower kv_tokens or kv_bytes, token_budget or max_num_seqs"
        )


def plan_pools(
    config: DeployConfig, shape: ModelShape, num_parameters: int
) -> tuple[PoolPlan, ...]:
    """Return what each pool takes; raises StartupError where ``kv_bytes`` is too small."""
    swaps = config.scheduling.preemption is Preemption.SWAP
    return tuple(_plan_pool(pool, shape, num_parameters, swaps=swaps) for pool in config.pools)


def with_kv_tokens(config: DeployConfig, model_path: str = "") -> DeployConfig:
    """Return the config with KV in tokens where it was in bytes; reads the model only then.

    ``model_path`` is where it is known to be; else where the config says.
    """
    if not any(pool.kv_bytes for pool in config.pools):
        return config
    shape = read_shape(model_path or config.model.path)
    pools = tuple(
        dataclasses.replace(pool, kv_tokens=shape.kv_tokens(pool), kv_bytes=0)
        if pool.kv_bytes
        else pool
        for pool in config.pools
    )
    return dataclasses.replace(config, pools=pools)


def show(config: DeployConfig, nodes: Sequence[Node] | None = None) -> int:
    """Print the plan; raises StartupError where it cannot work, after printing it."""
    shape = read_shape(config.model.path)
    num_parameters = count_parameters(config.model.path)
    plans = plan_pools(config, shape, num_parameters)
    sys.stdout.write(f"{_model(config, shape, num_parameters)}\n\n{render(config, plans)}\n")
    problems = _problems(plans)
    if nodes is not None:
        placing = fit(config.pools, nodes)
        rows = [
            (pool, node, str(count))
            for pool, where in placing.placed.items()
            for node, count in where.items()
        ]
        sys.stdout.write("\n" + table(("pool", "node", "workers"), rows) + "\n")
        problems += placing.problems
        sys.stdout.writelines(f"\nat its most: {told}\n" for told in placing.at_most)
    raise_all(_WRONG, problems)
    return 0


def check_gpus(config: DeployConfig) -> None:
    """Raise StartupError where workers could not load, of GPUs whose memory is known.

    The model is looked at, and not loaded; where no such GPU is asked for it is left alone.
    """
    if all(_gpu_bytes(pool) is None for pool in config.pools):
        return
    path = config.model.path
    raise_all(_WRONG, _problems(plan_pools(config, read_shape(path), count_parameters(path))))


def _problems(plans: Sequence[PoolPlan]) -> list[str]:
    return [plan.problem for plan in plans if plan.problem]


def render(config: DeployConfig, plans: Sequence[PoolPlan]) -> str:
    """Return the plan as text: the pools, and their sums."""
    head = (
        "pool", "role", "workers", "each needs", "weights", "KV", "activations", "of GPU",
        "KV tokens each", "in all", "cost/h",
    )  # fmt: skip
    return f"{table(head, [_row(plan) for plan in plans])}\n\n{_sums(config, plans)}"


def _model(config: DeployConfig, shape: ModelShape, num_parameters: int) -> str:
    return (
        f"model {config.model.name or config.model.path}: {num_parameters / 1e9:.2f} billion "
        f"parameters, {shape.num_layers} layers"
    )


def _plan_pool(
    pool: PoolConfig, shape: ModelShape, num_parameters: int, *, swaps: bool
) -> PoolPlan:
    kv_tokens = shape.kv_tokens(pool)
    swap_tokens = (pool.swap_tokens or kv_tokens) if swaps else 0
    return PoolPlan(
        pool=pool,
        weight_bytes=num_parameters * element_bytes(pool.dtype, pool.device),
        kv_bytes=kv_tokens * shape.token_bytes(pool),
        activation_bytes=shape.activation_bytes(pool),
        kv_tokens=kv_tokens,
        swap_bytes=swap_tokens * shape.token_bytes(pool),
        gpu_bytes=_gpu_bytes(pool),
    )


def _gpu_bytes(pool: PoolConfig) -> int | None:
    whole = GPU_BYTES.get(pool.accelerator_type) if pool.device is Device.CUDA else None
    return None if whole is None else int(whole * USABLE_SHARE * pool.gpus_per_worker)


def _row(plan: PoolPlan) -> tuple[str, ...]:
    pool = plan.pool
    share = "-" if plan.gpu_bytes is None else f"{plan.worker_bytes / plan.gpu_bytes:.0%}"
    return (
        pool.name,
        pool.role.value,
        _range(pool.min_count, pool.max_count),
        needs(pool) or "any node",
        _gb(plan.weight_bytes),
        _gb(plan.kv_bytes),
        _gb(plan.activation_bytes),
        share,
        str(plan.kv_tokens),
        _range(plan.kv_tokens * pool.min_count, plan.kv_tokens * pool.max_count),
        _range(pool.cost_per_hour * pool.min_count, pool.cost_per_hour * pool.max_count),
    )


def _sums(config: DeployConfig, plans: Sequence[PoolPlan]) -> str:
    decoding = [plan for plan in plans if plan.pool.role is not Role.PREFILL]
    slots = _sum(decoding, lambda plan: plan.pool.max_num_seqs)
    tokens = _sum(decoding, lambda plan: plan.kv_tokens)
    cost = _sum(plans, lambda plan: plan.pool.cost_per_hour)
    doors = config.endpoints
    swapping = [
        f"pool {plan.pool.name}: each worker takes {_gb(plan.swap_bytes)} of CPU memory besides, "
        "for the KV of preempted sequences\n"
        for plan in plans
        if plan.swap_bytes
    ]
    return "".join(swapping) + (
        f"{slots} sequences decode at once over {tokens} tokens of KV; cost {cost} an hour\n"
        f"on the head node: {config.router.replicas} routers at {doors.host}:{doors.http_port} "
        f"(HTTP) and :{doors.grpc_port} (gRPC), the control plane at :{doors.control_port}"
    )


def _sum(plans: Sequence[PoolPlan], of_worker: Callable[[PoolPlan], float]) -> str:
    """Return a sum over all workers: of the fewest to of the most."""
    return _range(
        sum(plan.pool.min_count * of_worker(plan) for plan in plans),
        sum(plan.pool.max_count * of_worker(plan) for plan in plans),
    )


def _range(least: float, most: float) -> str:
    few, many = (f"{n:g}" if isinstance(n, float) else str(n) for n in (least, most))
    return few if few == many else f"{few} to {many}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / _GB:.1f} GB"
