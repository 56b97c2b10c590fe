"""The bodies that OpenAI's clients expect, field for field; ``pdserve`` holds what we add."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.lifetime import Timeline


class PromptTokensDetails(BaseModel):
    """What is known of the prompt's tokens."""

    cached_tokens: int
    """Whose KV was there already."""


class Usage(BaseModel):
    """Token counts; an EOS token that ended the choice is counted, though it has no text."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class LegTimesBody(BaseModel):
    """``cluster.lifetime.LegTimes`` as JSON."""

    queue_s: float
    compute_s: float
    reserve_wait_s: float
    transfer_s: float
    exposed_s: float
    transfer_bytes: int
    num_steps: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int


class TimelineBody(BaseModel):
    """``cluster.lifetime.Timeline`` as JSON."""

    total_s: float
    first_token_s: float
    queue_s: float
    prefill_worker: str
    decode_worker: str
    reason: str
    prefill: LegTimesBody
    decode: LegTimesBody
    num_attempts: int
    num_resumed: int = 0
    num_redirected: int = 0
    num_preemptions: int = 0


def _is_absent(value: object) -> bool:
    return value is None


def _if_any() -> Any:
    """Return the default of a part that is left out, not null, where nobody asked for it."""
    return Field(default=None, exclude_if=_is_absent)


class Extension(BaseModel):
    """What OpenAI's bodies have no place for; there is one only where it says something."""

    num_resumed: int | None = _if_any()
    """How often another worker went on with a choice after its first token; left out where 0."""
    timeline: TimelineBody | None = _if_any()
    """Where the time went, where the request asked for it."""
    timelines: list[TimelineBody] | None = _if_any()
    """The same in an answer with several choices, by index."""


class TopToken(BaseModel):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TopToken):
    """A token of a chat's answer."""

    top_logprobs: list[TopToken]


class ChatLogprobs(BaseModel):
    """Logprobs of a chat's choice, or of what a chunk adds to it."""

    content: list[ChatToken]
    refusal: None = None


class TextLogprobs(BaseModel):
    """Logprobs of a completion's choice, or of what a chunk adds: lists of one length.

    ``bytes``, which OpenAI doesn't have here, joined are the text. The first token of an echoed
    prompt has no logprob.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    bytes: list[list[int]]


class AssistantMessage(BaseModel):
    """The whole answer of a chat."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One choice of a chat."""

    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    pdserve: Extension | None = _if_any()


class ChatDelta(BaseModel):
    """What one chunk adds."""

    role: Literal["assistant"] | None = _if_any()
    content: str | None = _if_any()


class ChatChunkChoice(BaseModel):
    """The choice of a chat's chunk."""

    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class ChatChunk(BaseModel):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    pdserve: Extension | None = _if_any()


class TextChoice(BaseModel):
    """One choice of a completion, or of its chunk."""

    index: int = 0
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class TextCompletion(BaseModel):
    """The answer of /v1/completions, and one event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    pdserve: Extension | None = _if_any()


class ModelCard(BaseModel):
    """One entry of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pdserve"
    max_model_len: int


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """The answer of /health/live and /health/ready.

    ``missing`` names roles without a worker, ``control plane``, ``link`` where none works, or
    ``router`` where it is shutting down; ``reasons`` tells of these, and of links that fail, in
    words.
    """

    status: str
    missing: list[str] = []
    reasons: list[str] = []


class TokenizeAnswer(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(BaseModel):
    """The answer of /detokenize."""

    prompt: str


def extension_of(timelines: Sequence[Timeline | None], num_resumed: int) -> Extension | None:
    """Return what an answer adds for its choices; None where there is nothing to say."""
    bodies = [timeline_of(timeline) for timeline in timelines if timeline is not None]
    if not bodies and not num_resumed:
        return None
    return Extension(
        num_resumed=num_resumed or None,
        timeline=bodies[0] if len(bodies) == 1 else None,
        timelines=bodies if len(bodies) > 1 else None,
    )


def timeline_of(timeline: Timeline) -> TimelineBody:
    """Return a timeline as JSON."""
    return TimelineBody.model_validate(dataclasses.asdict(timeline))
