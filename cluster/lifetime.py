"""The one list of spans in a request's life, used by workers, responses and benchmarks alike.

Each span is measured on one clock by whoever lives through it; only durations cross wires.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LegTimes:
    """What one leg cost on its worker; seconds, tokens, bytes. Zero where it did not happen."""

    queue_s: float = 0.0
    """From the leg's arrival (DECODE: its commit) to the start of its first step."""
    compute_s: float = 0.0
    """PREFILL: from the first step to the first token. Else: from the first step to the end."""
    reserve_wait_s: float = 0.0
    """PREFILL: from the first offer to the credit that was used."""
    transfer_s: float = 0.0
    """PREFILL: with the link: each segment from its manifest until it left, the last to COMMIT."""
    exposed_s: float = 0.0
    """PREFILL: from the first token to the COMMIT: what the transfer delays the second token."""
    transfer_bytes: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Where one choice's time went, from the router's accept to its last token."""

    total_s: float
    first_token_s: float
    queue_s: float
    """From accept to the grant that led to the first token: tokenising, and waiting at the
    control plane."""
    prefill_worker: str
    decode_worker: str
    reason: str
    """Why this pair."""
    prefill: LegTimes
    decode: LegTimes
    num_attempts: int
    num_resumed: int = 0
    """Attempts that started after a token was out: another worker went on with the choice."""
    num_redirected: int = 0
    """Exports that another decode worker took than the one they were made for."""
    num_preemptions: int = 0
    """Of all attempts; those of legs that ended are in their times too."""
