"""Who may join: a worker's registration against the deploy file, its model and its peers.

KV moves between any two workers of a cluster. Block size and KV dtype are each pool's own, since
receivers convert them; in all else a block must mean the same everywhere. So must token ids, and
the longest context: any worker may be given any request. Of the model only the KV's shape may be
known here; of the rest whoever comes first decides.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster import config_rules
from cluster.config import Dtype
from cluster.control.facts import RefusedWorker
from cluster.errors import ConfigError
from cluster.kv.layout import KVLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cluster.config import DeployConfig, PoolConfig, Role
    from cluster.control.facts import Registration

_MAX_REFUSED = 64
_MAX_REASON_CHARS = 300


def objection(
    config: DeployConfig,
    new: Registration,
    others: Iterable[Registration],
    model_layout: Mapping[str, int],
) -> str | None:
    """Return why ``new`` may not join, naming the field and both values; None where it may.

    ``others`` are the registered workers that will stay; ``model_layout`` is what is known of the
    model. The reason names no worker and no host: clients see it too.
    """
    try:
        pool = config.pool(new.pool)
        layout = KVLayout.parse(new.layout)
    except ConfigError as error:
        return error.message
    except ValueError as error:
        return str(error)
    for field, expected, got in _expectations(config, pool, new, layout):
        if expected != got:
            return f"{field}: {expected} in the deploy file, {got} at the worker"
    for field, number in model_layout.items():
        if (got := getattr(layout, field)) != number:
            return f"layout.{field}: {number} in the model's config.json, {got} at the worker"
    if (obstacle := role_obstacle(config, pool, new.role)) is not None:
        return obstacle
    if not 0 < new.max_model_len <= config.model.max_model_len:
        allowed = config.model.max_model_len
        return (
            f"max_model_len: 1 to {allowed} in the deploy file, {new.max_model_len} at the worker"
        )
    return _difference(new, layout, others)


def role_obstacle(config: DeployConfig, pool: PoolConfig, role: Role) -> str | None:
    """Return why no worker of a pool may serve in a role; None where one may."""
    try:
        config_rules.check_role(config, pool, role)
    except ConfigError as error:
        return f"role {role.value}: {error.message}"
    return None


def block_bytes(layout: str) -> int:
    """Bytes of a block by its layout line; 0 where the line does not say."""
    try:
        return KVLayout.parse(layout).block_bytes
    except ValueError:
        return 0


def _expectations(
    config: DeployConfig, pool: PoolConfig, new: Registration, layout: KVLayout
) -> list[tuple[str, object, object]]:
    expectations: list[tuple[str, object, object]] = [
        ("role", pool.role.value, (new.pool_role or new.role).value),
        ("transport", config.transport_of(pool).value, new.transport),
        ("max_num_seqs", pool.max_num_seqs, new.num_slots),
        ("num_blocks", pool.num_blocks, new.num_blocks),
        ("block_size", pool.block_size, new.block_size),
        ("layout.block_size", pool.block_size, layout.block_size),
        # No pool says otherwise: a worker has the whole model.
        ("layout.num_shards", 1, layout.num_shards),
        ("layout.shard_index", 0, layout.shard_index),
    ]
    if pool.stored_dtype is not Dtype.AUTO:
        expectations.append(("layout.dtype", pool.stored_dtype.value, layout.dtype))
    return expectations


def _difference(new: Registration, layout: KVLayout, others: Iterable[Registration]) -> str | None:
    # Thousands of workers are of a handful of kinds.
    for other in {(o.pool, o.layout, o.tokenizer, o.max_model_len): o for o in others}.values():
        for field in ("max_model_len", "tokenizer"):
            theirs, own = getattr(other, field), getattr(new, field)
            if theirs != own:
                return f"{field}: {theirs} at the other workers, {own} at this one"
        is_mate = other.pool == new.pool
        for difference in KVLayout.parse(other.layout).differences(layout):
            if is_mate or not difference.is_convertible:
                who = f"other workers of pool {new.pool}" if is_mate else "the other workers"
                return (
                    f"layout.{difference.field}: {difference.ours} at {who}, "
                    f"{difference.theirs} at this one"
                )
    return None


@dataclass(frozen=True, slots=True)
class _Refusal:
    pool: str
    reason: str
    at: float


class Refusals:
    """The workers that may not join: each with its last reason, until it joins or is forgotten."""

    def __init__(self, config: DeployConfig, keep_s: float) -> None:
        self._roles = {pool.name: pool.role for pool in config.pools}
        self._keep_s = keep_s
        self._refused: OrderedDict[str, _Refusal] = OrderedDict()
        self.num_refused = 0

    def add(self, worker_id: str, pool: str, reason: str, now: float) -> None:
        """Keep a refusal in place of the worker's last one."""
        self.num_refused += 1
        self._refused[worker_id] = _Refusal(pool, reason[:_MAX_REASON_CHARS], now)
        self._refused.move_to_end(worker_id)
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)

    def forget(self, worker_id: str) -> None:
        """Drop the refusal of a worker that has joined after all."""
        self._refused.pop(worker_id, None)

    def view(self, now: float) -> tuple[RefusedWorker, ...]:
        """Show them, the newest last."""
        return tuple(
            RefusedWorker(
                worker_id=worker_id,
                pool=refusal.pool,
                role=role.value if (role := self._roles.get(refusal.pool)) else "",
                reason=refusal.reason,
                age_s=now - refusal.at,
            )
            for worker_id, refusal in self._refused.items()
            if now - refusal.at <= self._keep_s
        )
