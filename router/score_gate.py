"""An attempt's tokens wait here until its prompt's log-probabilities are all there.

The worker that computes the prompt tells them before its own token; but the decode worker repeats
that token on another stream, and goes on, and may be heard first. Readers get scores before
tokens, and a choice whose scores were lost on the way is computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.request import FinishReason, PromptLogprobs, Token


class ScoreGate:
    """Holds what is due while scores are missing; open from the start where none are asked for."""

    def __init__(self, num_scored_to: int) -> None:
        """The scores are those of prompt positions ``1 .. num_scored_to``; 0: none."""
        self._next = 1
        self._end = num_scored_to
        self._tokens: list[Token] = []
        self._reason: FinishReason | None = None

    @property
    def is_open(self) -> bool:
        """Whether no score is missing."""
        return self._next >= self._end

    @property
    def num_held(self) -> int:
        """Tokens that wait here."""
        return len(self._tokens)

    def scored(self, run: PromptLogprobs) -> bool:
        """Take a run; whether it is the next one, and not told again."""
        is_next = run.start == self._next
        if is_next:
            self._next += len(run.entries)
        return is_next

    def hold(self, come: list[Token] | FinishReason) -> None:
        """Keep what is due; a finish comes after all tokens."""
        if isinstance(come, list):
            self._tokens.extend(come)
        else:
            self._reason = come

    def release(self) -> list[Token] | FinishReason | None:
        """Return what may go now: tokens first, then the finish; None where nothing may."""
        if not self.is_open:
            return None
        if self._tokens:
            tokens, self._tokens = self._tokens, []
            return tokens
        reason, self._reason = self._reason, None
        return reason
