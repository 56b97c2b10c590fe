"""What one step computes, and what came of it: plain data between scheduler and runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.engine.sequence import StoredLayers
from cluster.errors import PdserveError
from cluster.request import (
    FinishReason,
    LegKey,
    Preempted,
    PromptLogprobs,
    SamplingParams,
    Token,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNeeds:
    """What some shares need for their sampling besides their params."""

    prompt_ids: tuple[int, ...] = ()
    """The whole prompt, where the share has penalties."""
    output_ids: tuple[int, ...] = ()
    """The output so far, where the share has penalties."""
    banned_ids: tuple[int, ...] = ()
    """Tokens that must not be drawn yet."""
    scored_from: int = 0
    """Position of the first of ``scored_ids``; the row before it tells its log-probability."""
    scored_ids: tuple[int, ...] = ()
    """Prompt tokens whose log-probabilities are asked for; the last may be the next share's."""


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
    needs: SamplingNeeds | None = None
    stored: StoredLayers | None = None
    """Where to note layers that are stored, for whoever passes its KV on meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swaps:
    """KV to copy between two steps; nobody else has these blocks and slots until it is committed.

    First what goes out, then what comes back.
    """

    out: tuple[tuple[int, int], ...] = ()
    """(block, slot of the swap buffer)."""
    back: tuple[tuple[int, int], ...] = ()
    """(slot of the swap buffer, block)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: shares with one token (decodes) first, longer ones after them.

    Or copies alone, which make room or bring KV back before the next step is planned.
    """

    shares: tuple[Scheduled, ...]
    swaps: Swaps | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(share.token_ids) for share in self.shares)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The token drawn for each sampled share, and the log-probabilities that were asked for."""

    sampled: Mapping[LegKey, int]
    logprobs: Mapping[LegKey, TokenLogprobs] = field(default_factory=dict)
    """Of drawn tokens."""
    prompt_logprobs: Mapping[LegKey, tuple[PromptLogprobs, ...]] = field(default_factory=dict)
    """Of prompt tokens, in order."""


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
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found in this worker's cache, so that it was not computed."""
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """What happened since the last report; ``started`` is told before its step runs."""

    started: tuple[LegKey, ...] = ()
    """Sequences whose first share is about to be computed."""
    computed: tuple[tuple[LegKey, int], ...] = ()
    """Of those that will hand their KV over: tokens computed so far, where a step added some."""
    stored: tuple[LegKey, ...] = ()
    """Those of which a running step has stored more layers; told alone, amid the step."""
    preempted: tuple[Preempted, ...] = ()
    tokens: tuple[Token, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    ends: tuple[SequenceEnd, ...] = ()


@dataclass(slots=True)
class StepNews:
    """What has happened since it was last taken."""

    started: list[LegKey] = field(default_factory=list)
    computed: list[tuple[LegKey, int]] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    ends: list[SequenceEnd] = field(default_factory=list)

    def take(self) -> StepEvents:
        """Return it, and begin anew."""
        events = StepEvents(
            started=tuple(self.started),
            computed=tuple(self.computed),
            preempted=tuple(self.preempted),
            tokens=tuple(self.tokens),
            prompt_logprobs=tuple(self.prompt_logprobs),
            ends=tuple(self.ends),
        )
        self.started, self.computed, self.preempted = [], [], []
        self.tokens, self.prompt_logprobs, self.ends = [], [], []
        return events
