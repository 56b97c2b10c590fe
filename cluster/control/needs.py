"""What a want needs of workers, and which wants need the same.

Sizes are rounded up to whole blocks of the smallest size that divides all pools' block sizes: so
wants of one group have room on a worker, or none, together.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from cluster.config import Preemption
from cluster.policy.tiers import Tiers, tiers_take

if TYPE_CHECKING:
    from collections.abc import Hashable

    from cluster.config import DeployConfig, PoolConfig
    from cluster.control.capacity import Capacity
    from cluster.control.facts import Want
    from cluster.control.local_prefill import LocalPrefillRule


class Kind(NamedTuple):
    """Wants that go the same ways and to whom the same tiers give way."""

    rivals: Hashable
    may_be_local: bool
    """Whether a decode worker may prefill them where that costs less."""
    tier: int


class Needs(NamedTuple):
    """Sizes in tokens."""

    kind: Hashable
    """What decides which workers could serve it at all: a ``Kind``, but for the special ones."""
    rivals: Hashable
    """Equal for wants that compete for the same workers, if not by the same ways."""
    prefill_tokens: int
    """KV on whoever prefills."""
    decode_tokens: int
    """KV that is counted on whoever decodes; more may come, and then grows into free blocks."""

    is_special: bool = False
    """Whether it is the kind of one want alone."""
    tier: int = 0
    """Requests of lower tiers give way to it where there is no room; 0: nobody does."""

    def covers(self, other: Needs) -> bool:
        """Whether whoever has no room for these has none for ``other`` either."""
        return (
            self.kind == other.kind
            and self.prefill_tokens <= other.prefill_tokens
            and self.decode_tokens <= other.decode_tokens
        )


class NeedsRule:
    """Tells what wants need, by a deploy file."""

    def __init__(
        self, config: DeployConfig, capacity: Capacity, local: LocalPrefillRule, growth_tokens: int
    ) -> None:
        """``growth_tokens``: output for which decode room is counted at most, where a worker can
        preempt when it runs short."""
        self._pools = config.pools
        self._capacity = capacity
        self._local = local
        self._unit = math.gcd(*(pool.block_size for pool in config.pools))
        can_grow = config.scheduling.preemption is not Preemption.OFF
        self._kinds: dict[Hashable, int] = {}
        self._growth_tokens = growth_tokens if can_grow else 1 << 62
        self._max_preemptions = config.scheduling.max_preemptions
        self._tiers = Tiers.of(config.scheduling) if takes_from_below(config) else None

    def needs(self, want: Want) -> Needs:
        """Return what it needs."""
        may_be_local = self._local.may_take(want) and not self.is_single(want)
        rivals, tier = self._kind(want), self.tier(want)
        is_special = _is_special(want)
        return Needs(
            kind=rivals if is_special else Kind(rivals, may_be_local, tier),
            rivals=rivals,
            prefill_tokens=self._round(want.num_prompt_tokens),
            decode_tokens=self.decode_tokens(want),
            is_special=is_special,
            tier=tier,
        )

    def tier(self, want: Want) -> int:
        """Return how high its tier is; 0 for all where no tier takes from lower ones."""
        return 0 if self._tiers is None else self._tiers.rank(want.priority)

    @property
    def tiers_take(self) -> bool:
        """Whether higher tiers take from lower ones on some worker."""
        return self._tiers is not None

    @property
    def most_tokens(self) -> int:
        """No want needs more than this of a worker."""
        return self._round(self._capacity.max_model_len)

    def uncached_tokens(self, want: Want) -> int:
        """Return the prompt tokens that somebody has to compute for it at least."""
        return self._local.uncached_tokens(want)

    def decode_tokens(self, want: Want) -> int:
        """Return what is counted for it on whoever decodes."""
        most = want.num_prompt_tokens + self._growth_tokens
        needs_all = want.num_preemptions >= self._max_preemptions
        return self._round(kv_tokens(want) if needs_all else min(kv_tokens(want), most))

    def group(self, want: Want, needs: Needs) -> Hashable:
        """Return its group; a want that avoids workers is alone in its own."""
        if needs.is_special:
            return (want.request_id, want.attempt)
        return (needs.kind, needs.prefill_tokens, needs.decode_tokens)

    def is_single(self, want: Want) -> bool:
        """Whether a prefill worker alone serves it."""
        return want.export is None and self._capacity.is_single(
            want.num_prompt_tokens, want.max_tokens
        )

    def _kind(self, want: Want) -> Hashable:
        prompt, kv = want.num_prompt_tokens, kv_tokens(want)
        fits = tuple((prompt <= p.kv_tokens, kv <= p.kv_tokens) for p in self._pools)
        kind = (self.is_single(want), want.attempt > 0, fits)
        if _is_special(want):
            return kind, want.request_id, want.attempt
        # There is a handful of them, and they are compared often.
        return self._kinds.setdefault(kind, len(self._kinds))

    def _round(self, num_tokens: int) -> int:
        return -(-num_tokens // self._unit) * self._unit


def takes_from_below(config: DeployConfig, pool: PoolConfig | None = None) -> bool:
    """Whether a higher tier takes from lower ones on some worker, or on those of a pool."""
    scheduling = config.scheduling
    preempts = scheduling.preemption is not Preemption.OFF
    pools = config.pools if pool is None else (pool,)
    return any(tiers_take(scheduling.policy, p.batching, preempts=preempts) for p in pools)


def _is_special(want: Want) -> bool:
    return bool(want.avoid) or want.export is not None


def kv_tokens(want: Want) -> int:
    """KV of all of it; the last token's is never computed."""
    return want.num_prompt_tokens + max(0, want.max_tokens - 1)
