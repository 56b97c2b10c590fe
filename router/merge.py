"""Two legs, one choice: tokens in index order, each once, and the one verdict about an attempt.

Token 0 comes from the prefill leg at once and again from the decode leg; the two legs are two
streams, so anything may overtake anything. The decode worker's COMMIT decides a handoff: once it
has spoken, a prefill leg that failed is no failure.
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

    def __init__(self, kinds: Iterable[LegKind], *, max_tokens: int) -> None:
        self.open_kinds = set(kinds)
        self._max_tokens = max_tokens
        self._first_id: int | None = None
        self._early: dict[int, int] = {}  # output index -> id, where an earlier one is missing
        self._has_decode_spoken = False
        self._times: dict[LegKind, LegTimes] = {}
        self.num_output_tokens = 0
        self.num_repeats = 0
        """Tokens dropped since they were out already; the repeat of token 0 is not counted."""
        self.doubt: PdserveError | None = None
        """The prefill leg failed after its first token; whether the decode worker committed
        before that is not known yet."""

    @property
    def times(self) -> Mapping[LegKind, LegTimes]:
        """What the ended legs cost."""
        return self._times

    def token(self, kind: LegKind, token: Token) -> list[int]:
        """Take a token; return the ids that are due now, in order.

        Raises HandoffFailed where the decode worker repeats another first token than was sent.
        """
        index = token.output_index
        if kind is LegKind.DECODE:
            self._has_decode_spoken = True
            self.doubt = None
        if index == 0 and self._first_id is not None and token.token_id != self._first_id:
            raise HandoffFailed("the first token changed on its way", stage="handoff")
        if index < self.num_output_tokens or index in self._early or index >= self._max_tokens:
            self.num_repeats += not (index == 0 and kind is LegKind.DECODE)
            return []
        if index == 0:
            self._first_id = token.token_id
        self._early[index] = token.token_id
        due = []
        while (token_id := self._early.pop(self.num_output_tokens, None)) is not None:
            due.append(token_id)
            self.num_output_tokens += 1
        return due

    def end(self, kind: LegKind, end: LegEnd) -> FinishReason | None:
        """Take a leg's last word; return the choice's finish, None where it isn't over.

        Raises the error that ends the attempt.
        """
        self.open_kinds.discard(kind)
        self._times[kind] = end.times
        if end.finish_reason is not None:
            if self._early or not self.num_output_tokens:
                raise EngineFault("a choice finished with a token missing", stage=kind.value)
            return end.finish_reason
        if end.error is not None:
            self._failed(kind, end.error)
        elif not self.open_kinds:
            raise self.doubt or EngineFault("both legs ended without a finish", stage=kind.value)
        return None

    def last_word(self, kind: LegKind, end: LegEnd) -> None:
        """Note what a leg cost that ends after the choice did."""
        self.open_kinds.discard(kind)
        self._times[kind] = end.times

    def _failed(self, kind: LegKind, error: PdserveError) -> None:
        if kind is LegKind.PREFILL and self.open_kinds:
            if self._has_decode_spoken:
                return
            if self.num_output_tokens and error.is_retryable:
                self.doubt = error
                return
        raise error
