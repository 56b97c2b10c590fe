"""How one engine orders, batches and preempts: the deploy file's words as the scheduler's rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.config import Batching, Policy, Preemption
from cluster.policy.batching import Gate, make_gate
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers, tiers_take

if TYPE_CHECKING:
    from cluster.config import PoolConfig, SchedulingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """By default: first come, first served, continuous batching, recompute preemption."""

    ordering: Ordering = field(default_factory=Ordering)
    tiers: Tiers = field(default_factory=lambda: Tiers(names=("default",), default="default"))
    batching: Batching = Batching.CONTINUOUS
    batch_size: int = 0
    """0: all slots."""
    batch_window_s: float = 0.0
    preempts: bool = True
    """Otherwise each sequence starts with room for all that may come."""
    max_preemptions: int = 3
    """Of one choice, on all its workers; after these it starts only with room for all that may
    come."""

    @classmethod
    def of(cls, scheduling: SchedulingConfig, pool: PoolConfig) -> Rules:
        """Return the rules of a pool's workers."""
        return cls(
            ordering=Ordering.of(scheduling),
            tiers=Tiers.of(scheduling),
            batching=pool.batching,
            batch_size=pool.batch_size,
            batch_window_s=pool.batch_window_ms / 1000.0,
            preempts=scheduling.preemption is not Preemption.OFF,
            max_preemptions=scheduling.max_preemptions,
        )

    @property
    def takes_from_below(self) -> bool:
        """Whether a sequence may take the slot or the blocks of one of a lower tier."""
        return tiers_take(self.ordering.policy, self.batching, preempts=self.preempts)

    def needs_all(self, num_preemptions: int) -> bool:
        """Whether a choice that was preempted so often starts only with blocks for all that may
        come: nobody will give it any later, or it gives up none any more."""
        return not self.preempts or num_preemptions >= self.max_preemptions

    def taking_tier(self, name: str, arrived: float, now: float) -> int:
        """Return how high an import stands that arrived then, where tiers take from lower ones:
        as the highest once it has aged; else 0 for all."""
        if self.is_firm(arrived, now):
            return len(self.tiers.names) - 1
        return self.tier(name) if self.takes_from_below else 0

    def is_firm(self, arrived: float, now: float) -> bool:
        """Whether tiers take from lower ones, but nothing from one that arrived then: it has
        aged."""
        return self.takes_from_below and self.ordering.has_aged(arrived, now)

    def gate(self, num_slots: int) -> Gate:
        """Return a new gate for a batch of at most ``num_slots``."""
        return make_gate(
            self.batching,
            num_slots=num_slots,
            size=self.batch_size,
            window_s=self.batch_window_s,
        )

    def tier(self, name: str) -> int:
        """Return how high a sequence's tier is; the same for all where tiers have no say."""
        return self.tiers.rank(name) if self.ordering.policy is Policy.PRIORITY else 0
