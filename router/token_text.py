"""What single tokens look like in text and in bytes, for logprobs.

Byte-level models keep bytes as printable stand-ins, others as ``<0xE2>``; a token alone may be
part of a character, so its bytes are the whole truth and its text is for reading.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "▁"
_NUM_KEPT = 1 << 14  # tokens: an answer with logprobs asks for the same ones over and over


class TokenTexts:
    """Texts and bytes of a tokenizer's tokens; ``hidden_ids`` have a name and no bytes."""

    def __init__(self, rust: Tokenizer, hidden_ids: frozenset[int]) -> None:
        self._rust = rust
        self._hidden_ids = hidden_ids
        decoder = json.dumps(json.loads(rust.to_str()).get("decoder"))
        self._is_byte_level = '"ByteLevel"' in decoder
        self._added = {i: token.content for i, token in rust.get_added_tokens_decoder().items()}
        self._bytes_of = {char: byte for byte, char in _stand_ins().items()}
        self.bytes_of: Callable[[int], bytes] = lru_cache(_NUM_KEPT)(self._read)
        """What a token adds to the UTF-8 of a text; nothing for hidden ids."""

    def _read(self, token_id: int) -> bytes:
        if token_id in self._hidden_ids:
            return b""
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        piece: str = self._rust.id_to_token(token_id) or ""
        if self._is_byte_level:
            known = [self._bytes_of.get(char) for char in piece]
            if None not in known:
                return bytes(byte for byte in known if byte is not None)
            return piece.encode()
        if (match := _BYTE.fullmatch(piece)) is not None:
            return bytes([int(match[1], 16)])
        return piece.replace(_WORD_START, " ").encode()

    def text_of(self, token_id: int) -> str:
        """Return a token's text; U+FFFD where its bytes are no whole characters."""
        name = self._name_of(token_id)
        return self.bytes_of(token_id).decode(errors="replace") if name is None else name

    def key_of(self, token_id: int) -> str:
        """Return a text that differs from token to token: ``bytes:\\xe2\\x82`` for half a one."""
        if (name := self._name_of(token_id)) is not None:
            return name
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _name_of(self, token_id: int) -> str | None:
        """Return what stands for a token without text: a special one, or an unused row."""
        piece = self._rust.id_to_token(token_id)
        if piece is not None and token_id not in self._hidden_ids:
            return None
        return self._added.get(token_id) or piece or f"<{token_id}>"


def _stand_ins() -> dict[int, str]:
    """Return the printable character that byte-level models write for each byte (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    moved = {byte: chr(256 + number) for number, byte in enumerate(others)}
    return {**{byte: chr(byte) for byte in kept}, **moved}


def special_tokens(tokenizer: Any) -> dict[str, Any]:
    """Return what chat templates may write by name: ``bos_token`` and its like."""
    return {name: str(token) for name, token in tokenizer.special_tokens_map.items() if token}
