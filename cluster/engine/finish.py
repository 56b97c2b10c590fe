"""When a sequence is over, and which sequences can never be computed here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.engine.plan import SequenceEnd
from cluster.errors import DeadlineExceeded, EngineFault, InvalidRequest, PdserveError
from cluster.request import FinishReason

if TYPE_CHECKING:
    from cluster.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds one sequence on this worker, in tokens."""

    max_model_len: int
    """Prompt and output of one sequence."""
    capacity_tokens: int
    """KV that the whole pool holds."""

    def finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Why the sequence is over with its last output token; None while it goes on.

        An end token is told before a limit, so that an answer that ends exactly at its limit is
        a STOP.
        """
        params = sequence.params
        if not sequence.output_ids:
            is_over = not params.max_tokens and not sequence.num_tokens_left
            return FinishReason.LENGTH if is_over else None
        last = sequence.output_ids[-1]
        is_end = last in sequence.eos_ids or last in params.stop_token_ids
        # Before min_tokens none is drawn, unless nothing else may be.
        if is_end and sequence.num_output_tokens > params.min_tokens:
            return FinishReason.STOP
        if sequence.num_tokens >= self._longest(sequence):
            return FinishReason.LENGTH
        return None

    def max_kv_tokens(self, sequence: Sequence) -> int:
        """Tokens whose KV it holds at most; the last one drawn is never computed."""
        longest = self._longest(sequence)
        if sequence.hands_over_at is not None:
            longest = min(longest, sequence.num_prompt_tokens + sequence.hands_over_at)
        return max(longest - 1, sequence.num_tokens)

    def refusal(self, sequence: Sequence) -> PdserveError | None:
        """Why this sequence can never be computed here; None where it can."""
        num_prompt, params = sequence.num_prompt_tokens, sequence.params
        if num_prompt < 1:
            return InvalidRequest("the prompt has no tokens", stage="queue", field="prompt")
        if params.max_tokens < 0:
            text = f"max_tokens must be at least 0, got {params.max_tokens}"
            return InvalidRequest(text, stage="queue", field="max_tokens")
        if num_prompt + min(params.max_tokens, 1) > self.max_model_len:
            text = f"prompt of {num_prompt} tokens; the context holds {self.max_model_len}"
            return InvalidRequest(text, stage="queue", field="prompt")
        if num_prompt > self.capacity_tokens:
            text = f"prompt of {num_prompt} tokens; the KV pool holds {self.capacity_tokens}"
            return InvalidRequest(text, stage="queue", field="prompt")
        if self.max_kv_tokens(sequence) > self.capacity_tokens:
            text = (
                f"prompt of {num_prompt} tokens and max_tokens {params.max_tokens}; "
                f"the KV pool holds {self.capacity_tokens} tokens"
            )
            return InvalidRequest(text, stage="queue", field="max_tokens")
        return None

    def _longest(self, sequence: Sequence) -> int:
        return min(sequence.num_prompt_tokens + sequence.params.max_tokens, self.max_model_len)


def stage_of(sequence: Sequence) -> str:
    """Name where in a request's life this sequence stands, as errors and timelines do."""
    if sequence.started_at is None:
        return "decode queue" if sequence.output_ids else "queue"
    return "decode" if sequence.output_ids else "prefill"


def deadline_error(sequence: Sequence) -> DeadlineExceeded:
    """Say that its deadline passed, and where it stood."""
    stage = stage_of(sequence)
    return DeadlineExceeded(f"deadline passed in {stage}", stage=stage)


def end_of(
    sequence: Sequence, now: float, reason: FinishReason | None, error: PdserveError | None
) -> SequenceEnd:
    """Return what is told of a sequence that leaves."""
    started_at = sequence.started_at
    return SequenceEnd(
        key=sequence.key,
        finish_reason=reason,
        error=error,
        queue_s=max(0.0, (now if started_at is None else started_at) - sequence.entered),
        compute_s=0.0 if started_at is None else now - started_at,
        num_steps=sequence.num_steps,
        num_computed_tokens=sequence.num_worked_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
    )


def import_fault(sequence: Sequence, block_size: int) -> PdserveError | None:
    """Tell an import whose KV is not all in its blocks, which is a bug of ours."""
    held = len(sequence.block_ids) * block_size
    if 0 <= sequence.num_computed_tokens <= held:
        return None
    return EngineFault(
        f"{sequence.num_computed_tokens} computed tokens in blocks for {held}", stage="decode queue"
    )
