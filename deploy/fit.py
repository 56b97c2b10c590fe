"""Whether a cluster's nodes have room for the pools: asked before anything is deployed.

Ray places each worker by what its pool asks for, and lets it wait for ever where nothing fits. So
the same rules are gone through here first, over the nodes as Ray lists them and without what other
apps use of them, which names the pool that cannot be placed, and why.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.config import PoolConfig

COUNTED = ("CPU", "GPU")
"""What workers take of a node, by Ray's names."""
_MAX_ORDERS = 120
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, with all that it has, and what others than this app are using."""

    name: str
    """What people know it by."""
    address: str
    resources: Mapping[str, float]
    """By Ray's names: CPU, GPU, accelerator_type:H100."""
    labels: Mapping[str, str] = field(default_factory=dict)
    used: Mapping[str, float] = field(default_factory=dict)
    """By others, of what is ``COUNTED``."""

    def free(self, kind: str) -> float:
        """Return what this app can have of it."""
        return max(0.0, self.resources.get(kind, 0.0) - self.used.get(kind, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A way to place the workers, and what stands against placing the others."""

    placed: Mapping[str, Mapping[str, int]]
    """Workers by pool and node."""
    problems: tuple[str, ...]
    """One for each pool that cannot be placed whole, scaled ones at their fewest."""
    at_most: tuple[str, ...] = ()
    """The same for the most workers that scaled pools may have: nodes may come with the load."""


def fit(pools: Sequence[PoolConfig], nodes: Sequence[Node]) -> Fit:
    """Return a way to place all workers, or the reasons why there is none."""
    found = _fit(pools, nodes, {pool.name: pool.min_count for pool in pools})
    if found.problems or not any(pool.is_scaled for pool in pools):
        return found
    most = _fit(pools, nodes, {pool.name: pool.max_count for pool in pools})
    return replace(found, at_most=most.problems)


def _fit(pools: Sequence[PoolConfig], nodes: Sequence[Node], counts: Mapping[str, int]) -> Fit:
    """Try several orders of the pools, scarce hardware first: one pool must not take what only
    another one can use.
    """
    num_suitable = {pool.name: sum(suits(pool, node) for node in nodes) for pool in pools}
    by_need = sorted(pools, key=lambda pool: (num_suitable[pool.name], -pool.gpus_per_worker))
    first: Fit | None = None
    for order in itertools.islice(itertools.permutations(by_need), _MAX_ORDERS):
        found = _fit_in_order(order, nodes, counts)
        if not found.problems:
            return found
        first = first or found
    assert first is not None, "there is one order at least"
    return first


def suits(pool: PoolConfig, node: Node) -> bool:
    """Whether a node is of the kind that a pool asks for, however much room it has."""
    return _has_hardware(pool, node) and _has_labels(pool, node)


def needs(pool: PoolConfig) -> str:
    """Say what a worker of ``pool`` needs of its node; empty: any node does."""
    parts = [f"{pool.gpus_per_worker:g} GPU"] if pool.gpus_per_worker else []
    if pool.accelerator_type:
        parts.append(pool.accelerator_type)
    if pool.cpus_per_worker:
        parts.append(f"{pool.cpus_per_worker:g} CPU")
    parts += [f"{key}={value}" for key, value in pool.node_labels.items()]
    return ", ".join(parts)


class _Room:
    """What is left of one node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._cpus = node.free("CPU")
        gpus = node.free("GPU")
        num_whole = int(gpus + _EPSILON)
        # Ray doesn't tell of which GPUs others have parts: of as few as can be.
        self._gpus = [1.0] * num_whole + [max(0.0, gpus - num_whole)]

    def take(self, pool: PoolConfig) -> bool:
        """Take a worker in; a part of a GPU has to be of one GPU."""
        if self._cpus + _EPSILON < pool.cpus_per_worker:
            return False
        if pool.gpus_per_worker:
            fitting = [
                i for i, free in enumerate(self._gpus) if free + _EPSILON >= pool.gpus_per_worker
            ]
            if not fitting:
                return False
            fullest = min(fitting, key=lambda i: self._gpus[i])
            self._gpus[fullest] -= pool.gpus_per_worker
        self._cpus -= pool.cpus_per_worker
        return True


def _fit_in_order(
    pools: Iterable[PoolConfig], nodes: Sequence[Node], counts: Mapping[str, int]
) -> Fit:
    rooms = [_Room(node) for node in nodes]
    waiting = list(pools)
    placed: dict[str, dict[str, int]] = {}
    problems = []
    while waiting:
        pool = waiting.pop(0)
        # Nodes that others of them cannot use come first.
        suitable = sorted(
            (room for room in rooms if suits(pool, room.node)),
            key=lambda room: sum(suits(other, room.node) for other in waiting),
        )
        where = placed[pool.name] = {}
        count = counts[pool.name]
        for _ in range(count):
            room = next((room for room in suitable if room.take(pool)), None)
            if room is None:
                problems.append(_problem(pool, nodes, sum(where.values()), count))
                break
            where[room.node.name] = where.get(room.node.name, 0) + 1
    return Fit(placed=placed, problems=tuple(problems))


def _has_hardware(pool: PoolConfig, node: Node) -> bool:
    kind = pool.accelerator_type
    return not kind or node.resources.get(f"accelerator_type:{kind}", 0.0) > 0


def _has_labels(pool: PoolConfig, node: Node) -> bool:
    return all(node.labels.get(key) == value for key, value in pool.node_labels.items())


def _problem(pool: PoolConfig, nodes: Sequence[Node], num_placed: int, count: int) -> str:
    with_hardware = [node for node in nodes if _has_hardware(pool, node)]
    if not with_hardware:
        return f"pool {pool.name}: no node has {pool.accelerator_type}; there is {_kinds(nodes)}"
    suitable = [node for node in with_hardware if _has_labels(pool, node)]
    if not suitable:
        labels = ", ".join(f"{key}={value}" for key, value in pool.node_labels.items())
        also = f" with {pool.accelerator_type}" if pool.accelerator_type else ""
        return f"pool {pool.name}: no node{also} has the labels {labels}"
    cpus, gpus = (sum(node.free(kind) for node in suitable) for kind in COUNTED)
    return (
        f"pool {pool.name}: {num_placed} of {count} workers fit; each needs {needs(pool)}, "
        f"and the {len(suitable)} nodes that suit have {gpus:g} GPU and {cpus:g} CPU, "
        f"beside what other pools take{_used(suitable)}"
    )


def _used(nodes: Iterable[Node]) -> str:
    used = {kind: sum(node.used.get(kind, 0.0) for node in nodes) for kind in reversed(COUNTED)}
    told = [f"{amount:g} {kind}" for kind, amount in used.items() if amount > _EPSILON]
    return f"; other apps use {' and '.join(told)} of them" if told else ""


def _kinds(nodes: Sequence[Node]) -> str:
    prefix = "accelerator_type:"
    kinds = {
        name.removeprefix(prefix)
        for node in nodes
        for name in node.resources
        if name.startswith(prefix)
    }
    return ", ".join(sorted(kinds)) or f"no accelerator on {len(nodes)} nodes"
