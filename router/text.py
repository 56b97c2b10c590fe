"""Text and token ids, without torch: the tokenizer, the chat template, and their limits.

``TextCodec`` is immutable after loading and may be used from several threads: it calls the Rust
tokenizer directly, since the transformers wrapper changes shared state on each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerFast

from cluster.errors import StartupError
from router.chat_template import ChatTemplate, refuse_without_template
from router.token_text import TokenTexts, special_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from router.messages import Chat


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of a text, and at which of its characters each begins."""

    ids: tuple[int, ...]
    offsets: tuple[int, ...]


class TextCodec:
    """The tokenizer and chat template of one model folder.

    ``hidden_ids`` never show in text: the tokenizer's special tokens and the model's EOS ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, eos_ids: frozenset[int]) -> None:
        self._rust: Any = tokenizer.backend_tokenizer
        # A folder may ask for truncation; a prompt cut in silence would be a wrong answer.
        self._rust.no_truncation()
        self._rust.no_padding()
        self.hidden_ids = frozenset(tokenizer.all_special_ids) | eos_ids
        longest = max(self._rust.get_vocab(with_added_tokens=True), key=len, default="")
        self.max_token_chars = max(1, len(longest))
        """Characters of text that one token covers at most (bytes, in byte-level models)."""
        self.tokens = TokenTexts(self._rust, self.hidden_ids)
        source = tokenizer.chat_template
        self._template = (
            ChatTemplate(source, special_tokens(tokenizer)) if isinstance(source, str) else None
        )

    @classmethod
    def load(cls, folder: Path, *, eos_ids: frozenset[int]) -> TextCodec:
        """Load from a local folder; raises StartupError where it holds no fast tokenizer."""
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise StartupError(f"{folder} holds no tokenizer.json that can be read") from error
        return cls(tokenizer, eos_ids=eos_ids)

    def encode(self, text: str, *, has_special_tokens: bool = True) -> Encoded:
        """Return a raw prompt's ids, with the special tokens that the model puts around it."""
        encoding = self._rust.encode(text, add_special_tokens=has_special_tokens)
        return Encoded(tuple(encoding.ids), tuple(start for start, _ in encoding.offsets))

    def encode_chat(self, chat: Chat, *, max_chars: int) -> tuple[int, ...]:
        """Return the ids of a conversation that asks for the assistant's next turn.

        The template runs in transformers' sandbox. Raises InvalidRequest where the model has no
        template or the template refuses a turn, RequestTooLarge above ``max_chars``.
        """
        if self._template is None:
            raise refuse_without_template()
        text = self._template.render(chat, max_chars=max_chars)
        return tuple(self._rust.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; hidden ids leave no trace, broken characters U+FFFD."""
        shown = [token_id for token_id in ids if token_id not in self.hidden_ids]
        return str(self._rust.decode(shown, skip_special_tokens=True))
