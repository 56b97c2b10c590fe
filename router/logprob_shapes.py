"""Logprob entries in OpenAI's two shapes: a list of objects for chats, columns for completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.openai_shapes import ChatLogprobs, ChatToken, TextLogprobs, TopToken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.logprobs import LogprobEntry
    from router.token_text import TokenTexts


def chat_logprobs(entries: Sequence[LogprobEntry], tokens: TokenTexts) -> ChatLogprobs:
    """Return the entries of a chat; its tokens all have a logprob."""
    return ChatLogprobs(
        content=[
            ChatToken(
                token=tokens.text_of(entry.token_id),
                logprob=entry.logprob or 0.0,
                bytes=list(tokens.bytes_of(entry.token_id)),
                top_logprobs=[
                    TopToken(
                        token=tokens.text_of(other.token_id),
                        logprob=other.logprob,
                        bytes=list(tokens.bytes_of(other.token_id)),
                    )
                    for other in entry.top
                ],
            )
            for entry in entries
        ]
    )


def text_logprobs(entries: Sequence[LogprobEntry], tokens: TokenTexts) -> TextLogprobs:
    """Return the entries of a completion, as columns of one length."""
    return TextLogprobs(
        tokens=[tokens.key_of(entry.token_id) for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[_top(entry, tokens) for entry in entries],
        text_offset=[entry.offset for entry in entries],
        bytes=[list(tokens.bytes_of(entry.token_id)) for entry in entries],
    )


def _top(entry: LogprobEntry, tokens: TokenTexts) -> dict[str, float] | None:
    """Return the best tokens, the chosen one always among them; of two alike the better."""
    if entry.logprob is None:
        return None
    top: dict[str, float] = {}
    for other in entry.top:
        top.setdefault(tokens.key_of(other.token_id), other.logprob)
    top.setdefault(tokens.key_of(entry.token_id), entry.logprob)
    return top
