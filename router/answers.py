"""One finished or streamed choice in OpenAI's shapes: chat and plain completions."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from router.openai_shapes import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    TextChoice,
    TextCompletion,
    TimelineBody,
    timeline_of,
    usage_of,
)

if TYPE_CHECKING:
    from router.events import Finish


class Answer(ABC):
    """Builds the JSON bodies of one choice; the kinds differ in their shapes only.

    The usage comes in a last chunk of its own, the timeline in the last chunk that there is.
    """

    prefix = ""

    def __init__(
        self, request_id: str, *, model: str, with_usage: bool, with_timeline: bool
    ) -> None:
        self._id = f"{self.prefix}-{request_id}"
        self._model = model
        self._created = int(time.time())
        self._with_usage = with_usage
        self._with_timeline = with_timeline

    @abstractmethod
    def whole(self, text: str, finish: Finish) -> str:
        """Return the one body of an answer that is not streamed."""

    @abstractmethod
    def opening(self) -> list[str]:
        """Return the chunks before any text."""

    @abstractmethod
    def delta(self, text: str) -> str:
        """Return the chunk that adds text."""

    @abstractmethod
    def closing(self, finish: Finish) -> list[str]:
        """Return the chunks that end a stream: the finish, and the usage where asked for."""

    def _timeline(self, finish: Finish) -> TimelineBody | None:
        return timeline_of(finish.timeline) if self._with_timeline else None


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    prefix = "chatcmpl"

    def whole(self, text: str, finish: Finish) -> str:
        """Return a chat.completion."""
        choice = ChatChoice(
            message=AssistantMessage(content=text), finish_reason=finish.finish_reason.value
        )
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[choice],
            usage=usage_of(finish),
            timeline=self._timeline(finish),
        ).model_dump_json()

    def opening(self) -> list[str]:
        """Return the chunk that names the role."""
        delta = ChatDelta(role="assistant", content="")
        return [self._chunk([ChatChunkChoice(delta=delta)])]

    def delta(self, text: str) -> str:
        """Return a chat.completion.chunk with text."""
        return self._chunk([ChatChunkChoice(delta=ChatDelta(content=text))])

    def closing(self, finish: Finish) -> list[str]:
        """Return the rest of the text with the finish reason, then the usage."""
        delta = ChatDelta(content=finish.text or None)
        choice = ChatChunkChoice(delta=delta, finish_reason=finish.finish_reason.value)
        last = None if self._with_usage else finish
        chunks = [self._chunk([choice], finish=last)]
        return [*chunks, self._chunk([], finish=finish)] if self._with_usage else chunks

    def _chunk(self, choices: list[ChatChunkChoice], finish: Finish | None = None) -> str:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=None if choices or finish is None else usage_of(finish),
            timeline=None if finish is None else self._timeline(finish),
        ).model_dump_json()


class TextAnswer(Answer):
    """/v1/completions."""

    prefix = "cmpl"

    def whole(self, text: str, finish: Finish) -> str:
        """Return a text_completion with its usage."""
        choice = TextChoice(text=text, finish_reason=finish.finish_reason.value)
        return self._body([choice], finish=finish, with_usage=True)

    def opening(self) -> list[str]:
        """Return nothing: a completion has no role to name."""
        return []

    def delta(self, text: str) -> str:
        """Return a chunk with text."""
        return self._body([TextChoice(text=text)])

    def closing(self, finish: Finish) -> list[str]:
        """Return the rest of the text with the finish reason, then the usage."""
        choice = TextChoice(text=finish.text, finish_reason=finish.finish_reason.value)
        if not self._with_usage:
            return [self._body([choice], finish=finish)]
        return [self._body([choice]), self._body([], finish=finish, with_usage=True)]

    def _body(
        self, choices: list[TextChoice], finish: Finish | None = None, *, with_usage: bool = False
    ) -> str:
        return TextCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage_of(finish) if finish is not None and with_usage else None,
            timeline=None if finish is None else self._timeline(finish),
        ).model_dump_json()
