"""Text and token ids, without torch: the tokenizer, the chat template, and their limits.

``TextCodec`` is immutable after loading and may be used from several threads: it calls the Rust
tokenizer directly, since the transformers wrapper changes shared state on each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
from transformers import PreTrainedTokenizerFast

from cluster.errors import InvalidRequest, RequestTooLarge, StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation, checked."""

    role: str
    content: str


class TextCodec:
    """The tokenizer and chat template of one model folder.

    ``hidden_ids`` never show in text: the tokenizer's special tokens and the model's EOS ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._rust: Any = tokenizer.backend_tokenizer
        # A folder may ask for truncation; a prompt cut in silence would be a wrong answer.
        self._rust.no_truncation()
        self._rust.no_padding()
        self.hidden_ids = frozenset(tokenizer.all_special_ids) | eos_ids
        longest = max(self._rust.get_vocab(with_added_tokens=True), key=len, default="")
        self.max_token_chars = max(1, len(longest))
        """Characters of text that one token covers at most (bytes, in byte-level models)."""

    @classmethod
    def load(cls, folder: Path, *, eos_ids: frozenset[int]) -> TextCodec:
        """Load from a local folder; raises StartupError where it holds no fast tokenizer."""
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise StartupError(f"{folder} holds no tokenizer.json that can be read") from error
        return cls(tokenizer, eos_ids=eos_ids)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a raw prompt, with the special tokens that the model puts around."""
        return tuple(self._rust.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[ChatMessage], *, max_chars: int) -> tuple[int, ...]:
        """Return the ids of a conversation that asks for the assistant's next turn.

        The template runs in transformers' sandbox. Raises InvalidRequest where the model has no
        template or the template refuses the turns, RequestTooLarge above ``max_chars``.
        """
        if self._tokenizer.chat_template is None:
            raise InvalidRequest("this model has no chat template", field="messages")
        turns = [{"role": turn.role, "content": turn.content} for turn in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            reason = f"the model's chat template refuses these messages: {error.message}"
            raise InvalidRequest(reason, field="messages") from error
        if len(text) > max_chars:
            raise RequestTooLarge("the conversation is too long", field="messages")
        return tuple(self._rust.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; hidden ids leave no trace, broken characters U+FFFD."""
        shown = [token_id for token_id in ids if token_id not in self.hidden_ids]
        return str(self._rust.decode(shown, skip_special_tokens=True))
