"""Two legs, one choice: tokens in index order, each once, and the one verdict about an attempt.

An attempt's first token comes from the prefill leg at once and again from the decode leg; the two
legs are two streams, so anything may overtake anything. The decode worker's COMMIT decides a
handoff: once it has spoken, a prefill leg that failed is no failure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.errors import EngineFault, HandoffFailed, PdserveError
from cluster.request import FinishReason, LegEnd, LegKind, Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cluster.lifetime import LegTimes


class Merger:
    """What the legs of one attempt said so far. Sync, without clock or network."""

    def __init__(
        self, kinds: Iterable[LegKind], *, max_tokens: int, num_output_tokens: int = 0
    ) -> None:
        """``num_output_tokens`` are out by earlier attempts; this one goes on at that index."""
        self.open_kinds = set(kinds)
        self.first_index = num_output_tokens
        self._max_tokens = max_tokens
        self._first_id: int | None = None
        self._early: dict[int, Token] = {}  # by output index, where an earlier one is missing
        self._times: dict[LegKind, LegTimes] = {}
        self.has_decode_spoken = False
        """The decode worker has the KV: nothing that the prefill leg says can end the attempt."""
        self.num_output_tokens = num_output_tokens
        self.num_repeats = 0
        """Tokens dropped since they were out already; the decode leg's repeat of the attempt's
        first token is not counted."""
        self.doubt: PdserveError | None = None
        """The prefill leg is over after its first token; whether the decode worker has the KV
        is not known yet."""

    @property
    def times(self) -> Mapping[LegKind, LegTimes]:
        """What the ended legs cost."""
        return self._times

    @property
    def num_held(self) -> int:
        """Tokens that are not out, since one before them is missing."""
        return len(self._early)

    def token(self, kind: LegKind, token: Token) -> list[Token]:
        """Take a token; return those that are due now, in order.

        Raises HandoffFailed where the decode worker repeats another first token than was sent.
        """
        index, is_first = token.output_index, token.output_index == self.first_index
        if kind is LegKind.DECODE:
            self.has_decode_spoken = True
            self.doubt = None
        if is_first and self._first_id is not None and token.token_id != self._first_id:
            raise HandoffFailed("the first token changed on its way", stage="handoff")
        if not self._is_new(index):
            self.num_repeats += not (is_first and kind is LegKind.DECODE)
            return []
        if is_first:
            self._first_id = token.token_id
        self._early[index] = token
        due = []
        while (next_token := self._early.pop(self.num_output_tokens, None)) is not None:
            due.append(next_token)
            self.num_output_tokens += 1
        return due

    def surplus(self, token: Token) -> int:
        """Take a token that nobody waits for any more; how many that nobody has are in it."""
        if not self._is_new(token.output_index):
            return 0
        self._early[token.output_index] = token
        return 1

    def end(self, kind: LegKind, end: LegEnd) -> FinishReason | None:
        """Take a leg's last word; return the choice's finish, None where it isn't over.

        Raises the error that ends the attempt.
        """
        self.last_word(kind, end)
        if end.finish_reason is not None:
            is_empty = self.num_output_tokens == self.first_index < self._max_tokens
            if self._early or is_empty:
                raise EngineFault("a choice finished with a token missing", stage=kind.value)
            return end.finish_reason
        if end.error is not None:
            self._failed(kind, end.error)
        elif not self.open_kinds:
            raise self.doubt or EngineFault("both legs ended without a finish", stage=kind.value)
        return None

    def last_word(self, kind: LegKind, end: LegEnd) -> None:
        """Note that a leg is over, and what it cost."""
        self.open_kinds.discard(kind)
        self._times[kind] = end.times

    def close(self, kind: LegKind) -> None:
        """Expect nothing more of a leg."""
        self.open_kinds.discard(kind)

    def reopen(self, kind: LegKind) -> None:
        """Expect another leg of this kind, in place of one that failed."""
        self.open_kinds.add(kind)
        self.doubt = None

    def _is_new(self, index: int) -> bool:
        return self.num_output_tokens <= index < self._max_tokens and index not in self._early

    def _failed(self, kind: LegKind, error: PdserveError) -> None:
        if kind is LegKind.PREFILL and self.open_kinds:
            if self.has_decode_spoken:
                return
            if self.num_output_tokens > self.first_index and error.is_retryable:
                self.doubt = error
                return
        raise error
