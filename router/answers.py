"""A call's events in OpenAI's shapes, chat and plain completions, streamed or whole.

event ──``_Choice``──▶ text and logprob entries ──kind of answer──▶ bodies
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from router.events import Delta, Finish
from router.logprob_shapes import chat_logprobs, text_logprobs
from router.logprobs import ChoiceLogprobs, LogprobEntry, prompt_entries
from router.openai_shapes import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    Extension,
    PromptTokensDetails,
    TextChoice,
    TextCompletion,
    Usage,
    extension_of,
)

if TYPE_CHECKING:
    from router.calls import Call
    from router.openai_shapes import ChatLogprobs, TextLogprobs
    from router.text import TextCodec


@dataclass(slots=True)
class _Piece:
    """What one event adds to a choice."""

    index: int
    text: str
    entries: list[LogprobEntry]


@dataclass(slots=True)
class _Choice:
    """One choice as far as it has come."""

    logprobs: ChoiceLogprobs | None
    is_open: bool = False
    pieces: list[_Piece] = field(default_factory=list)
    finish: Finish | None = None

    def take(self, event: Delta | Finish) -> list[LogprobEntry]:
        """Note an event; return the logprobs that may be told with its text."""
        if isinstance(event, Finish):
            self.finish = event
            return [] if self.logprobs is None else self.logprobs.finish(event)
        return [] if self.logprobs is None else self.logprobs.take(event)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def entries(self) -> list[LogprobEntry]:
        return [entry for piece in self.pieces for entry in piece.entries]


class Answer(ABC):
    """Builds the JSON bodies of one call; the kinds differ in their shapes only.

    A stream's usage comes in a last chunk of its own; what we add, in the last that there is.
    """

    prefix = ""

    def __init__(self, call: Call, *, model: str, codec: TextCodec, with_usage: bool) -> None:
        """``with_usage``: a stream ends with it; whole answers always tell it."""
        self._call = call
        self._shows = call.shows
        self._with_usage = with_usage
        self._model = model
        self._tokens = codec.tokens
        self._id = f"{self.prefix}-{call.request_id}"
        self._created = int(time.time())
        self._choices = [
            _Choice(self._logprobs(index, codec)) for index in range(call.num_all_choices)
        ]

    @property
    def is_whole(self) -> bool:
        """Whether every choice is over."""
        return all(choice.finish is not None for choice in self._choices)

    def take(self, event: Delta | Finish) -> None:
        """Take an event of an answer that is not streamed."""
        self._choices[event.index].pieces += self._pieces(event)

    def chunks(self, event: Delta | Finish) -> list[str]:
        """Return the bodies of the chunks that a stream has for an event."""
        opening = [] if self._choices[event.index].is_open else self._opening(event.index)
        pieces = self._pieces(event)
        bodies = [*opening, *(self._chunk(piece) for piece in pieces[:-1])]
        if isinstance(event, Finish):
            return [*bodies, self._chunk(pieces[-1], event)]
        return [*bodies, *(self._chunk(p) for p in pieces[-1:] if p.text or p.entries)]

    @abstractmethod
    def whole(self) -> str:
        """Return the one body of an answer that is not streamed."""

    @abstractmethod
    def closing(self) -> list[str]:
        """Return the chunks after all choices: the usage, where asked for."""

    @abstractmethod
    def _opening(self, index: int) -> list[str]:
        """Return the chunks before a choice's first event."""

    @abstractmethod
    def _chunk(self, piece: _Piece, finish: Finish | None = None) -> str:
        """Return the chunk of a piece."""

    def _pieces(self, event: Delta | Finish) -> list[_Piece]:
        """Return what an event adds: one piece, and the echoed prompt before a choice's first."""
        choice = self._choices[event.index]
        pieces = []
        if not choice.is_open and self._shows.echo:
            prompt = self._call.prompt_of(event.index)
            entries = prompt_entries(prompt) if self._shows.logprobs else []
            pieces.append(_Piece(event.index, prompt.text, entries))
        choice.is_open = True
        pieces.append(_Piece(event.index, event.text, choice.take(event)))
        return pieces

    def _logprobs(self, index: int, codec: TextCodec) -> ChoiceLogprobs | None:
        if not self._shows.logprobs:
            return None
        offset = len(self._call.prompt_of(index).text) if self._shows.echo else 0
        return ChoiceLogprobs(codec, offset=offset)

    def _usage(self) -> Usage:
        prompt = self._call.num_prompt_tokens
        output = sum(c.finish.num_output_tokens for c in self._choices if c.finish is not None)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=prompt + output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._call.num_cached_tokens),
        )

    def _last_words(self, finish: Finish | None) -> Extension | None:
        """Return what a chunk adds where it is a stream's last."""
        is_last = finish is not None and self.is_whole and not self._with_usage
        return self._extension() if is_last else None

    def _extension(self) -> Extension | None:
        finishes = [choice.finish for choice in self._choices if choice.finish is not None]
        return extension_of(
            [finish.timeline if self._shows.timeline else None for finish in finishes],
            sum(finish.num_resumed for finish in finishes),
        )


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    prefix = "chatcmpl"

    def whole(self) -> str:
        """Return a chat.completion."""
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content=choice.text),
                logprobs=self._told(choice.entries),
                finish_reason=choice.finish.finish_reason.value,
            )
            for index, choice in enumerate(self._choices)
            if choice.finish is not None
        ]
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._usage(),
            pdserve=self._extension(),
        ).model_dump_json()

    def closing(self) -> list[str]:
        """Return the usage, where asked for."""
        if not self._with_usage:
            return []
        return [self._body([], usage=self._usage(), extension=self._extension())]

    def _opening(self, index: int) -> list[str]:
        delta = ChatDelta(role="assistant", content="")
        return [self._body([ChatChunkChoice(index=index, delta=delta)])]

    def _chunk(self, piece: _Piece, finish: Finish | None = None) -> str:
        is_silent = finish is not None and not piece.text
        choice = ChatChunkChoice(
            index=piece.index,
            delta=ChatDelta(content=None if is_silent else piece.text),
            logprobs=self._told(piece.entries) if piece.entries else None,
            finish_reason=finish.finish_reason.value if finish is not None else None,
        )
        return self._body([choice], extension=self._last_words(finish))

    def _told(self, entries: list[LogprobEntry]) -> ChatLogprobs | None:
        return chat_logprobs(entries, self._tokens) if self._shows.logprobs else None

    def _body(
        self,
        choices: list[ChatChunkChoice],
        *,
        usage: Usage | None = None,
        extension: Extension | None = None,
    ) -> str:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            pdserve=extension,
        ).model_dump_json()


class TextAnswer(Answer):
    """/v1/completions."""

    prefix = "cmpl"

    def whole(self) -> str:
        """Return a text_completion with its usage."""
        choices = [
            TextChoice(
                index=index,
                text=choice.text,
                logprobs=self._told(choice.entries),
                finish_reason=choice.finish.finish_reason.value,
            )
            for index, choice in enumerate(self._choices)
            if choice.finish is not None
        ]
        return self._body(choices, usage=self._usage(), extension=self._extension())

    def closing(self) -> list[str]:
        """Return the usage, where asked for."""
        if not self._with_usage:
            return []
        return [self._body([], usage=self._usage(), extension=self._extension())]

    def _opening(self, index: int) -> list[str]:
        return []  # a completion has no role to name

    def _chunk(self, piece: _Piece, finish: Finish | None = None) -> str:
        choice = TextChoice(
            index=piece.index,
            text=piece.text,
            logprobs=self._told(piece.entries) if piece.entries else None,
            finish_reason=finish.finish_reason.value if finish is not None else None,
        )
        return self._body([choice], extension=self._last_words(finish))

    def _told(self, entries: list[LogprobEntry]) -> TextLogprobs | None:
        return text_logprobs(entries, self._tokens) if self._shows.logprobs else None

    def _body(
        self,
        choices: list[TextChoice],
        *,
        usage: Usage | None = None,
        extension: Extension | None = None,
    ) -> str:
        return TextCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            pdserve=extension,
        ).model_dump_json()
