"""An engine's load, as others read it between two steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.engine.victims import Holdings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """An engine's load, speed and counts since its start."""

    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    """Prompt tokens still to compute, of sequences that wait or have begun."""
    num_steps: int = 0
    step_base_s: float = 0.0
    step_per_seq_s: float = 0.0
    prefill_per_token_s: float = 0.0
    num_preemptions: int = 0
    num_swapped: int = 0
    """Preemptions whose KV was kept in the swap buffer."""
    num_swaps_refused: int = 0
    """Preemptions by recompute, because the swap buffer was too full."""
    num_blocks_swapped: int = 0
    """Copied to the swap buffer and back."""
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens computed, each once, however often a preemption had them computed again."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the cache instead."""
    holdings: Holdings = field(default_factory=Holdings)
    """Who would give way to higher tiers."""
