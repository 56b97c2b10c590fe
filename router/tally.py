"""Counts the choices of one call as the one request that they are to its client."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.errors import Cancelled, PdserveError
from cluster.request import FinishReason
from router.events import Finish

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.events import Counter


class Tally:
    """What the choices of one call have come to; tells the metrics once, when all are over."""

    def __init__(
        self,
        metrics: Counter,
        *,
        num_prompt_tokens: int,
        num_requests: int,
        on_over: Callable[[], None],
    ) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._num_missing = num_requests
        self._num_running = 0
        self._num_output_tokens = 0
        self._end: Finish | PdserveError | None = None
        self._phase = ""
        self._on_over = on_over
        self.is_over = False

    def started(self) -> None:
        """One more choice runs."""
        if self._num_running == 0 and self._end is None:
            self._metrics.started()
        self._num_running += 1
        self._num_missing = max(0, self._num_missing - 1)

    def ended(self, end: Finish | PdserveError, *, phase: str, num_output_tokens: int) -> None:
        """One choice is over."""
        self._num_running -= 1
        self._num_output_tokens += num_output_tokens
        if isinstance(end, PdserveError):
            self._num_missing = 0
        self._note(end, phase)
        self._look()

    def close(self) -> None:
        """No further choice will start."""
        if self._num_missing:
            self._note(Cancelled("the request was cancelled", stage="queue"), "queue")
            self._num_missing = 0
        self._look()

    def _note(self, end: Finish | PdserveError, phase: str) -> None:
        """The first error is the call's end; of good ends, one that hit a limit."""
        known = self._end
        if isinstance(known, PdserveError):
            return
        if known is not None and isinstance(end, Finish):
            end = _joined(known, end)
        self._end, self._phase = end, phase

    def _look(self) -> None:
        if self.is_over or self._num_running or self._num_missing or self._end is None:
            return
        self.is_over = True
        end = self._end
        if isinstance(end, Finish):
            end = replace(
                end,
                num_prompt_tokens=self._num_prompt_tokens,
                num_output_tokens=self._num_output_tokens,
            )
        self._metrics.ended(end, phase=self._phase, num_output_tokens=self._num_output_tokens)
        self._on_over()


def _joined(known: Finish, end: Finish) -> Finish:
    """The end of both: the last one, with the first token of either."""
    was_cut = known.finish_reason is FinishReason.LENGTH
    first, last = known.timeline, end.timeline
    timeline = replace(
        last,
        first_token_s=min(first.first_token_s, last.first_token_s),
        queue_s=min(first.queue_s, last.queue_s),
    )
    reason = FinishReason.LENGTH if was_cut else end.finish_reason
    return replace(end, finish_reason=reason, timeline=timeline)
