"""An accepted request, and what its reader is told: deltas, then exactly one end."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.lifetime import Timeline
from cluster.request import FinishReason, Request
from router.stream_text import ChoiceText


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One more output token; its text may be empty, or hold earlier tokens' text too."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The last event of a choice that ended well; ``text`` is what was held back until now."""

    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    timeline: Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A checked request on its way: what it asks, since when, and how its text is made."""

    request: Request
    accepted: float
    """Instant on the router's clock."""
    text: ChoiceText
    wants_timeline: bool = False
