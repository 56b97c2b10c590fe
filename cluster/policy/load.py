"""The load of a cluster at one instant, as scaling sees it: by pool, and what waits for any.

It travels as flat names and numbers (``to_stats``), since that is what Ray Serve carries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """Sums over the workers of one pool that are there; speeds are their mean, 0 where unknown."""

    num_workers: float = 0
    queued_tokens: float = 0.0
    """Prompt tokens that it has been given and not computed yet."""
    behind_tokens: float = 0.0
    """Those of them that wait behind other prompts."""
    computed_tokens: float = 0.0
    """Prompt tokens computed so far; it falls where a worker leaves."""
    num_sequences: float = 0
    """That its engines have."""
    num_coming: float = 0
    """With a slot there, and still to be prefilled or handed over."""
    held_tokens: float = 0.0
    """KV of both, held or promised."""
    prefill_token_s: float = 0.0
    step_base_s: float = 0.0
    """A step of n sequences takes about ``step_base_s + n * step_per_seq_s``."""
    step_per_seq_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """All pools, and the requests that have no worker yet."""

    pools: Mapping[str, PoolLoad] = field(default_factory=dict)
    num_waiting: float = 0
    waiting_tokens: float = 0.0
    """Of their prompts."""
    expected_output_tokens: float = 0.0
    """Of a request."""

    def pool(self, name: str) -> PoolLoad:
        """Return one pool's; of a pool without workers it is all 0."""
        return self.pools.get(name, _EMPTY)


_EMPTY = PoolLoad()
_FIELDS = tuple(f.name for f in dataclasses.fields(PoolLoad))
_OF_ALL = ("num_waiting", "waiting_tokens", "expected_output_tokens")


def to_stats(load: Load) -> dict[str, float]:
    """Return the same as flat names and numbers; the names of pools have no dots."""
    stats = {name: float(getattr(load, name)) for name in _OF_ALL}
    for name, pool in load.pools.items():
        stats |= {f"{name}.{each}": float(getattr(pool, each)) for each in _FIELDS}
    return stats


def from_stats(stats: Mapping[str, float]) -> Load:
    """Return the load that ``to_stats`` was given; names that it does not know are left out."""
    pools: dict[str, dict[str, float]] = {}
    for key, value in stats.items():
        name, dot, each = key.partition(".")
        if dot and each in _FIELDS:
            pools.setdefault(name, {})[each] = value
    return Load(
        pools={name: PoolLoad(**values) for name, values in pools.items()},
        **{name: stats.get(name, 0.0) for name in _OF_ALL},
    )
