"""Who may join: a worker's registration against the deploy file and against its peers.

KV moves between any two workers of a cluster, so all must agree on what a block's bytes mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.config import Dtype
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.config import DeployConfig, PoolConfig
    from cluster.control.facts import Registration


def objection(
    config: DeployConfig, new: Registration, others: Iterable[Registration]
) -> str | None:
    """Return why ``new`` may not join, naming the field and both values; None where it may.

    ``others`` are the registered workers that will stay.
    """
    try:
        pool = config.pool(new.pool)
    except ConfigError as error:
        return error.message
    layout = _fields_of(new.layout)
    for field, expected, got in _expectations(config, pool, new, layout):
        if expected != got:
            return f"{field}: {expected} in the deploy file, {got} at {new.worker_id}"
    if not 0 < new.max_model_len <= config.model.max_model_len:
        allowed = config.model.max_model_len
        return f"max_model_len: 1 to {allowed} in the deploy file, {new.max_model_len} there"
    for other in others:
        mismatch = _mismatch(_fields_of(other.layout), layout)
        if mismatch is not None:
            field, theirs, ours = mismatch
            return f"{field}: {theirs} at {other.worker_id}, {ours} at {new.worker_id}"
    return None


def block_bytes(layout: str) -> int:
    """Bytes of a block by its layout line; 0 where the line does not say."""
    fields = _fields_of(layout)
    try:
        elements = 2 * int(fields["num_layers"]) * int(fields["num_kv_heads"])
        elements *= int(fields["head_dim"]) * int(fields["block_size"])
        return elements * {"fp32": 4, "bf16": 2}[fields["dtype"]]
    except (KeyError, ValueError):
        return 0


def _expectations(
    config: DeployConfig, pool: PoolConfig, new: Registration, layout: dict[str, str]
) -> list[tuple[str, object, object]]:
    expectations: list[tuple[str, object, object]] = [
        ("role", pool.role.value, new.role.value),
        ("transport", config.transport.value, new.transport),
        ("max_num_seqs", pool.max_num_seqs, new.num_slots),
        ("num_blocks", pool.num_blocks, new.num_blocks),
        ("block_size", pool.block_size, new.block_size),
        ("layout.block_size", str(pool.block_size), layout.get("block_size")),
    ]
    if pool.dtype is not Dtype.AUTO:
        expectations.append(("layout.dtype", pool.dtype.value, layout.get("dtype")))
    return expectations


def _mismatch(
    old: dict[str, str], new: dict[str, str]
) -> tuple[str, str | None, str | None] | None:
    for field in [*old, *(name for name in new if name not in old)]:
        if old.get(field) != new.get(field):
            return f"layout.{field}", old.get(field), new.get(field)
    return None


def _fields_of(layout: str) -> dict[str, str]:
    pairs = (item.partition("=") for item in layout.split())
    return {name: value for name, _, value in pairs}
