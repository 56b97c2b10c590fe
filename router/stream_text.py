"""Tokens into text, one at a time: never half a character, never a character taken back.

    ids ──Detokenizer──▶ whole characters ──StopMatcher──▶ text that no stop string can claim

Joined, the pieces are the text of all ids, cut at the first stop string that completes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"
_MAX_PENDING_IDS, _WINDOW_IDS, _MIN_WINDOW_CHARS = 64, 16, 8
_MAX_HELD_CHARS = 3  # a UTF-8 character that lacks its last byte shows as 3 U+FFFD at most


class Detokenizer:
    """Incremental decoding of one choice.

    Regions of ``_ids``:   | context | pending |
    ``context`` is out already and only there because some decoders treat the first token of a
    text differently (a leading space); ``pending`` are the ids whose text is not all out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden_ids: frozenset[int]) -> None:
        self._decode = decode
        self._hidden_ids = hidden_ids
        self._ids: list[int] = []
        self._num_context = 0
        self._context = ""
        self._num_emitted = 0  # characters of the pending ids that are out

    def push(self, token_id: int) -> str:
        """Take one id and return the text that is settled by it; often empty."""
        if token_id in self._hidden_ids:
            return ""
        self._ids.append(token_id)
        pending = self._pending()
        num_settled = len(pending) - _num_unsettled(pending)
        piece = pending[self._num_emitted : num_settled]
        self._num_emitted = max(self._num_emitted, num_settled)
        if num_settled < len(pending):
            self._shorten(len(pending) - self._num_emitted)
        elif pending:
            # All of it is out: the pending ids become the context of what comes.
            self._ids = self._ids[self._num_context :]
            self._num_context = len(self._ids)
            self._context = self._decode(self._ids)
            self._num_emitted = 0
        return piece

    def _pending(self) -> str:
        """Return the text of the pending ids, out or not."""
        text = self._decode(self._ids)
        if text.startswith(self._context):
            return text[len(self._context) :]
        # A byte fallback breaks its whole run of bytes for the one that is still missing. What is
        # pending began with a byte then, which no decoder treats differently at the beginning.
        return self._decode(self._ids[self._num_context :])

    def _shorten(self, num_held: int) -> None:
        """Forget the beginning of a long run of broken characters, each id of which decodes all.

        The last characters of the window are those of the whole: in 8 of them at least, what is
        broken at its own beginning is over before the ``num_held`` at its end.
        """
        if len(self._ids) <= _MAX_PENDING_IDS:
            return
        window = self._ids[-_WINDOW_IDS:]
        num_chars = len(self._decode(window))
        if num_chars >= _MIN_WINDOW_CHARS:
            self._ids, self._num_context, self._context = window, 0, ""
            self._num_emitted = num_chars - num_held

    def flush(self) -> str:
        """Return what is still held: a character that was never completed."""
        pending = self._pending() if self._ids else ""
        piece = pending[self._num_emitted :]
        self._num_emitted = len(pending)
        return piece


def _num_unsettled(text: str) -> int:
    """Count the characters at the end that may still become another character."""
    tail = text[-_MAX_HELD_CHARS:]
    return len(tail) - len(tail.rstrip(_BROKEN))


class StopMatcher:
    """Finds stop strings in a growing text, wherever its pieces are cut.

    The string that completes first wins; of those that complete at one character, the one that
    began first. So the result doesn't depend on where tokens end. What could still become a
    stop string, ``longest stop - 1`` characters at most, is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._max_held = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""
        self.is_stopped = False

    def push(self, piece: str, *, is_armed: bool = True) -> str:
        """Take more text and return what is safe to show; nothing more once stopped.

        What completes while not armed is no match.
        """
        if self.is_stopped or not piece:
            return ""
        text = self._held + piece
        start = self._first_match(text, len(self._held)) if is_armed else None
        if start is not None:
            self.is_stopped = True
            self._held = ""
            return text[:start]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return the held tail: the text is over, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, num_old: int) -> int | None:
        # Matches end after the old characters: what was complete before was not armed.
        starts = ((stop, max(0, num_old - len(stop) + 1)) for stop in self._stops)
        found = [
            (at + len(stop), at) for stop, first in starts if (at := text.find(stop, first)) >= 0
        ]
        return min(found)[1] if found else None

    def _num_held(self, text: str) -> int:
        for num in range(min(self._max_held, len(text)), 0, -1):
            tail = text[-num:]
            if any(len(stop) > num and stop.startswith(tail) for stop in self._stops):
                return num
        return 0


class ChoiceText:
    """The text of one choice: detokenised, and cut at its stop strings.

    The first ``min_tokens`` tokens but the last of them complete no stop string.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._num_unarmed = min_tokens

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has completed; no text comes after it."""
        return self._matcher.is_stopped

    def push(self, token_id: int) -> str:
        """Take one id; return the text that may be shown now."""
        self._num_unarmed -= 1
        piece = self._detokenizer.push(token_id)
        return self._matcher.push(piece, is_armed=self._num_unarmed <= 0)

    def flush(self) -> str:
        """Return the rest of the text; call once, when no more ids come."""
        text = self._matcher.push(self._detokenizer.flush(), is_armed=self._num_unarmed <= 0)
        return text if self.is_stopped else text + self._matcher.flush()
