"""What a share needs for its sampling besides its params: derived anew for each step.

Nothing is counted along the way, so a choice that was preempted, resumed or handed over needs
what an undisturbed one does. Shares without such wishes need nothing, and cost nothing here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.engine.plan import SamplingNeeds

if TYPE_CHECKING:
    from cluster.engine.sequence import Sequence


def needs_of(sequence: Sequence, start: int, end: int, *, is_sampled: bool) -> SamplingNeeds | None:
    """Return the needs of a share at positions ``start .. end``; None where it has none."""
    params = sequence.params
    looks_back = is_sampled and params.has_penalties
    bans = is_sampled and sequence.num_output_tokens < params.min_tokens
    scored_from, scored_to = 0, 0
    if params.prompt_logprobs:
        # The row at position p tells of p + 1, so this share's rows tell of start + 1 .. end + 1.
        scored_from = max(start + 1, sequence.num_scored_tokens)
        scored_to = min(end + 1, sequence.num_prompt_tokens)
    if not (looks_back or bans or scored_from < scored_to):
        return None
    return SamplingNeeds(
        prompt_ids=sequence.prompt_ids if looks_back else (),
        output_ids=tuple(sequence.output_ids) if looks_back else (),
        banned_ids=(*sequence.eos_ids, *params.stop_token_ids) if bans else (),
        scored_from=scored_from,
        scored_ids=sequence.prompt_ids[scored_from:scored_to],
    )
