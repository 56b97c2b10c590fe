"""The bodies that OpenAI's clients expect, field for field; ``timeline`` is our one addition."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

if TYPE_CHECKING:
    from cluster.lifetime import Timeline
    from router.events import Finish


class Usage(BaseModel):
    """Token counts; an EOS token that ended the choice is counted, though it has no text."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


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


class _Sparse(BaseModel):
    """A body that leaves out those of its optional parts that nobody asked for."""

    @model_serializer(mode="wrap")
    def _leave_out(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        body: dict[str, Any] = handler(self)
        return {k: v for k, v in body.items() if v is not None or k not in _OPTIONAL}


_OPTIONAL = frozenset({"timeline", "role", "content"})


class AssistantMessage(BaseModel):
    """The whole answer of a chat."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """The one choice of a chat."""

    index: int = 0
    message: AssistantMessage
    logprobs: None = None
    finish_reason: str


class ChatCompletion(_Sparse):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timeline: TimelineBody | None = None


class ChatDelta(_Sparse):
    """What one chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """The one choice of a chat's chunk."""

    index: int = 0
    delta: ChatDelta
    logprobs: None = None
    finish_reason: str | None = None


class ChatChunk(_Sparse):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    timeline: TimelineBody | None = None


class TextChoice(BaseModel):
    """The one choice of a completion, or of its chunk."""

    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: str | None = None


class TextCompletion(_Sparse):
    """The answer of /v1/completions, and one event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    timeline: TimelineBody | None = None


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
    """The answer of /health/live and /health/ready; ``missing`` names roles without a worker."""

    status: str
    missing: list[str] = []


def usage_of(finish: Finish) -> Usage:
    """Return a finished choice's token counts."""
    prompt, output = finish.num_prompt_tokens, finish.num_output_tokens
    return Usage(prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output)


def timeline_of(timeline: Timeline) -> TimelineBody:
    """Return a timeline as JSON."""
    return TimelineBody.model_validate(dataclasses.asdict(timeline))
