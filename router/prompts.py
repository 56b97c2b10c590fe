"""What a call generates from, checked: one or several prompts, each a text or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.errors import InvalidRequest
from router import values

if TYPE_CHECKING:
    from router.served import ServedModel

Prompt = str | tuple[int, ...]
"""A text, not tokenised yet, or token ids."""

_WHAT = "prompt must be a string, a list of token ids, or a list of several of either"


class PromptCheck:
    """Checks prompts against one model's context and vocabulary."""

    def __init__(self, model: ServedModel, *, max_prompts: int, max_chars: int) -> None:
        self._model = model
        self._max_prompts = max_prompts
        self._max_chars = max_chars

    def prompts(self, value: object) -> tuple[Prompt, ...]:
        """Return at least one prompt; raises InvalidRequest that names ``prompt``."""
        if isinstance(value, str):
            return (self.text(value, "prompt"),)
        if not isinstance(value, Sequence) or isinstance(value, bytes):
            raise InvalidRequest(_WHAT, field="prompt")
        if not value:
            raise InvalidRequest("prompt is empty", field="prompt")
        kind = type(value[0])
        if kind is not str and kind is not list:
            return (self._ids(value),)
        if len(value) > self._max_prompts:
            raise InvalidRequest(
                f"prompt holds {self._max_prompts} prompts at most", field="prompt"
            )
        if any(type(item) is not kind for item in value):
            raise InvalidRequest(_WHAT, field="prompt")
        if kind is str:
            return tuple(self.text(item, "prompt") for item in value)
        return tuple(self._ids(item) for item in value)

    def text(self, value: object, field: str) -> str:
        """Return a text that may fit the context, whatever its tokens."""
        if isinstance(value, str) and len(value) > self._max_chars:
            raise InvalidRequest(
                f"{field} is longer than {self._model.max_model_len} tokens, the context, can be",
                field=field,
            )
        return values.string(value, field)

    def _ids(self, value: Sequence[object]) -> tuple[int, ...]:
        if not value:
            raise InvalidRequest("prompt is empty", field="prompt")
        if len(value) >= self._model.max_model_len:
            raise InvalidRequest(
                f"prompt has {len(value)} tokens; with one to generate, the context holds "
                f"{self._model.max_model_len}",
                field="prompt",
            )
        return values.known_ids(value, "prompt", vocab_size=self._model.vocab_size)
