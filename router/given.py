"""What a client gave, unchecked and alike for both doors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateInput:
    """One call as a door parsed it: any value may be of any type; None is absent.

    Exactly one of ``prompt`` (text), ``messages`` and ``prompt_ids`` should be there.
    """

    model: object = None
    prompt: object = None
    messages: object = None
    prompt_ids: object = None
    max_tokens: object = None
    max_tokens_field: str = "max_tokens"
    """What the client called it; errors name that."""
    temperature: object = None
    top_p: object = None
    top_k: object = None
    seed: object = None
    stop: object = None
    ignore_eos: object = None
    timeout_s: object = None
    call_remaining_s: float | None = None
    """What the door's own deadline leaves; the earlier one counts."""
    timeline: object = None
    extras: Mapping[str, object] = field(default_factory=dict)
    """Everything else, by the client's names: unknown names are ignored, known ones refused."""
