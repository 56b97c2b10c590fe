"""Logprobs of one choice beside its text: told when the text they belong to may be seen.

A token's entry waits until its whole text is out, so that no entry tells characters that a stop
string takes back; entries of tokens that a stop string cut off entirely are dropped.

    text so far   |........ out ........|.. held back ..|
    entries       |  told  |  straddles |    waiting    |
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.stream_text import Detokenizer

if TYPE_CHECKING:
    from cluster.request import TokenLogprobs
    from router.calls import CallPrompt
    from router.events import Delta, Finish
    from router.text import TextCodec


@dataclass(frozen=True, slots=True)
class Candidate:
    """One token and its log-probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobEntry:
    """One position: the token that is there, and the best ones; ``offset`` is in the whole text.

    ``logprob`` None: the first token of a prompt, which nothing came before.
    """

    token_id: int
    logprob: float | None
    top: tuple[Candidate, ...]
    offset: int


@dataclass(slots=True)
class _Waiting:
    entry: LogprobEntry
    end: int  # characters of output with which its text is whole


class ChoiceLogprobs:
    """Entries of one choice's output, in order; ``offset`` is where in the text output begins."""

    def __init__(self, codec: TextCodec, *, offset: int = 0) -> None:
        self._hidden_ids = codec.hidden_ids
        self._detokenizer = Detokenizer(codec.decode, codec.hidden_ids)
        self._offset = offset
        self._num_settled = 0
        self._num_out = 0
        self._waiting: deque[_Waiting] = deque()

    def take(self, delta: Delta) -> list[LogprobEntry]:
        """Take a delta; return the entries that may be told with its text."""
        for token_id, logprobs in zip(delta.token_ids, delta.logprobs, strict=True):
            start = self._num_settled
            self._num_settled += len(self._detokenizer.push(token_id))
            end = self._num_settled
            if end == start and token_id not in self._hidden_ids:
                end += 1  # part of a character that is not whole yet
            entry = entry_of(token_id, logprobs, offset=self._offset + start)
            self._waiting.append(_Waiting(entry, end))
        self._num_out += len(delta.text)
        told = []
        while self._waiting and self._waiting[0].end <= self._num_out:
            told.append(self._waiting.popleft().entry)
        return told

    def finish(self, finish: Finish) -> list[LogprobEntry]:
        """Return the entries that are left: of all tokens that begin before the text's end."""
        self._num_out += len(finish.text)
        is_cut = self._num_out < self._num_settled + len(self._detokenizer.flush())
        limit = self._offset + self._num_out
        return [w.entry for w in self._waiting if w.entry.offset < limit or not is_cut]


def entry_of(token_id: int, logprobs: TokenLogprobs, *, offset: int) -> LogprobEntry:
    """Return the entry of a token; it is among the best ones where there is more than none."""
    return LogprobEntry(
        token_id=token_id,
        logprob=logprobs.logprob,
        top=tuple(Candidate(other, logprob) for other, logprob in logprobs.top),
        offset=offset,
    )


def prompt_entries(prompt: CallPrompt) -> list[LogprobEntry]:
    """Return the entries of an echoed prompt; its first token has no logprob."""
    first = LogprobEntry(token_id=prompt.ids[0], logprob=None, top=(), offset=prompt.offsets[0])
    rest = zip(prompt.ids[1:], prompt.scores, prompt.offsets[1:], strict=True)
    return [first, *(entry_of(i, scores, offset=offset) for i, scores, offset in rest)]
