"""What one step computes, and what came of it: plain data between scheduler and runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.errors import PdserveError
from cluster.request import FinishReason, LegKey, SamplingParams, Token


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """One sequence's share of a step.

    ``token_ids`` sit at positions ``start .. start + len(token_ids)``; KV for positions below
    ``start`` is in the cache. ``block_ids`` cover every position up to the share's end.
    """

    key: LegKey
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    is_sampled: bool
    """Whether the share reaches the sequence's last token, so that a new one is drawn."""
    output_index: int
    """Index of the token that is drawn; meaningless where none is."""
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: shares with one token (decodes) first, longer ones after them."""

    shares: tuple[Scheduled, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(share.token_ids) for share in self.shares)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The token drawn for each sampled share."""

    sampled: Mapping[LegKey, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEnd:
    """A sequence left the engine.

    With ``finish_reason`` or ``error`` its blocks are free again; with neither it reached its
    handover point and its blocks are still held under its key: whoever asked for it gives them
    back.
    """

    key: LegKey
    finish_reason: FinishReason | None = None
    error: PdserveError | None = None
    queue_s: float = 0.0
    compute_s: float = 0.0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """What happened since the last report; ``started`` is told before its step runs."""

    started: tuple[LegKey, ...] = ()
    """Sequences whose first share is about to be computed."""
    tokens: tuple[Token, ...] = ()
    ends: tuple[SequenceEnd, ...] = ()
