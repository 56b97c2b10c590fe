"""What a client gave, unchecked and alike for both doors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateInput:
    """One call as a door parsed it: any value may be of any type; None is absent.

    Either ``messages``, a chat, or ``prompt``: a text, a list of token ids, or a list of several
    of either. Names are the HTTP API's; what a name means is told at ``Checked`` and
    ``SamplingParams``.
    """

    model: object = None
    prompt: object = None
    messages: object = None
    tools: object = None
    tool_choice: object = None
    n: object = None
    max_tokens: object = None
    max_completion_tokens: object = None
    """The newer name of ``max_tokens``; both are accepted where they agree."""
    min_tokens: object = None
    temperature: object = None
    top_p: object = None
    top_k: object = None
    min_p: object = None
    presence_penalty: object = None
    frequency_penalty: object = None
    repetition_penalty: object = None
    logit_bias: object = None
    seed: object = None
    stop: object = None
    stop_token_ids: object = None
    ignore_eos: object = None
    echo: object = None
    logprobs: object = None
    """Of a prompt: how many best tokens; of a chat: whether."""
    top_logprobs: object = None
    """Of a chat: how many best tokens."""
    user: object = None
    priority: object = None
    expected_tokens: object = None
    timeout_s: object = None
    call_remaining_s: float | None = None
    """What the door's own deadline leaves; the earlier one counts."""
    timeline: object = None
    client_request_id: object = None
    extras: Mapping[str, object] = field(default_factory=dict)
    """Everything, by the client's names: unknown names are ignored, unserved ones refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeInput:
    """A text or a chat to be turned into token ids, unchecked."""

    model: object = None
    prompt: object = None
    messages: object = None
    tools: object = None
    add_special_tokens: object = None
    extras: Mapping[str, object] = field(default_factory=dict)
    """As of a ``GenerateInput``."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a door let in: the tenant of the key, and which key it was; both empty without keys."""

    tenant: str = ""
    key: str = ""
    tier: str = ""
    """Of its requests that name none; empty: the cluster's default one."""
    ceiling: str = ""
    """The highest tier that it may ask for; empty: any."""


ANYBODY = Caller()
