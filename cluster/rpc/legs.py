"""What a worker keeps about the legs it was given.

The server hands legs to a ``LegHandler``; whoever serves them answers through the ``LegSink``
that came with the leg. ``LegBook`` is where a half writes its open legs down: it makes sure that
each leg ends exactly once and that a step's news reach each router as one message.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from cluster.engine import sequence as engine_sequence
from cluster.errors import Cancelled, DeadlineExceeded, HandoffFailed, PdserveError
from cluster.handoff import AbortCause
from cluster.lifetime import LegTimes
from cluster.request import (
    ExportWaiting,
    FinishReason,
    Leg,
    LegEnd,
    LegKey,
    LegKind,
    LegNotice,
    Preempted,
    PromptLogprobs,
    PromptPrefix,
    Redirect,
    Token,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence

    from cluster.engine.plan import SequenceEnd


_MAX_ENDED = 1024
_MOMENT_S = 0.25
"""What a leg waited is measured in two processes, and on its way between them nobody counts: legs
that differ by less go in the order in which they came."""


class LegSink(Protocol):
    """Where the tokens and ends of one attached router go; used on the event loop only."""

    def emit(
        self,
        tokens: Sequence[Token],
        ends: Sequence[LegEnd],
        notices: Sequence[LegNotice] = (),
        prompts: Sequence[PromptLogprobs] = (),
    ) -> None:
        """Queue one message for the router; never blocks, never raises."""
        ...


class LegHandler(Protocol):
    """The worker behind a server; called on the event loop only."""

    def start_leg(self, leg: Leg, sink: LegSink) -> None:
        """Take a leg; a bad one is ended through ``sink``, never raised."""
        ...

    def abort_leg(self, key: LegKey, cause: AbortCause, grant_id: str, sink: LegSink) -> None:
        """Give up the leg of a grant; an empty ``grant_id`` is that of whichever leg has the key.

        One that is not here has crossed with its end, or its start was lost or is late: its end is
        said again through ``sink``, and it is not taken should it still come.
        """
        ...

    def redirect_leg(self, redirect: Redirect) -> None:
        """Pass a waiting export on to another decode worker; unknown keys crossed with their end.

        One that cannot be followed is answered by another ``ExportWaiting``, or by the leg's end.
        """
        ...

    def router_lost(self, sink: LegSink) -> None:
        """Give up all legs that answer through ``sink``: nobody reads them any more."""
        ...


class LegEngine(Protocol):
    """What a half needs of the engine; both calls may come from any thread."""

    def add(self, sequence: engine_sequence.Sequence) -> None:
        """Queue a sequence; it ends by an event, whatever happens."""
        ...

    def abort(self, key: LegKey, error: PdserveError) -> None:
        """End a sequence with ``error``; unknown keys are those that crossed with their end."""
        ...


def abort_error(cause: AbortCause, stage: str, detail: str = "") -> PdserveError | None:
    """Return what an abort means to whoever waits for the leg; None where all is well."""
    if cause in (AbortCause.FINISHED, AbortCause.STOPPED):
        return None
    if cause is AbortCause.CANCELLED:
        return Cancelled(detail or "cancelled", stage=stage)
    if cause is AbortCause.DEADLINE:
        return DeadlineExceeded(detail or "the deadline passed", stage=stage)
    return HandoffFailed(detail or f"handoff aborted: {cause.value}", stage=stage)


def abort_cause(error: PdserveError | None) -> AbortCause:
    """Return how the other worker is told that a leg ended with ``error``."""
    if error is None:
        return AbortCause.FINISHED
    if isinstance(error, Cancelled):
        return AbortCause.CANCELLED
    return AbortCause.DEADLINE if isinstance(error, DeadlineExceeded) else AbortCause.FAULT


def times_of(end: SequenceEnd) -> LegTimes:
    """Return what the engine measured of a leg."""
    return LegTimes(
        queue_s=end.queue_s,
        compute_s=end.compute_s,
        num_steps=end.num_steps,
        num_computed_tokens=end.num_computed_tokens,
        num_cached_tokens=end.num_cached_tokens,
        num_preemptions=end.num_preemptions,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class OpenLeg:
    """A leg that has not ended; instants are on this worker's clock."""

    leg: Leg
    sink: LegSink
    arrived: float
    """When its router took the request: it goes on aging here."""
    deadline: float
    aborted: AbortCause | None = None
    """Set when it is given up while the engine still has it."""
    error: PdserveError | None = None
    """What its end will say then."""

    @property
    def key(self) -> LegKey:
        """The leg's key."""
        return self.leg.key

    def give_up(self, cause: AbortCause, error: PdserveError | None) -> None:
        """Note why it is given up; the first reason stands."""
        if self.aborted is None:
            self.aborted, self.error = cause, error

    def preempted(self, num_preemptions: int) -> None:
        """Note how often its choice was preempted in all; nobody knows of more than there were."""
        if num_preemptions > self.leg.num_preemptions:
            self.leg = replace(self.leg, num_preemptions=num_preemptions)

    def sequence(self, eos_ids: frozenset[int], now: float) -> engine_sequence.Sequence:
        """Return what the engine computes for this leg, nothing of it computed yet."""
        leg = self.leg
        return engine_sequence.Sequence(
            key=leg.key,
            prompt_ids=leg.prompt_ids,
            params=leg.params,
            deadline=self.deadline,
            arrived=self.arrived,
            waited_s=now - self.arrived,
            output_ids=list(leg.output_ids),
            tenant=leg.tenant,
            priority=leg.priority,
            expected_tokens=leg.expected_tokens,
            prefix=leg.prefix,
            num_preemptions_before=leg.num_preemptions,
            eos_ids=frozenset() if leg.params.ignore_eos else eos_ids,
        )


class LegBook:
    """The open legs of one half, by key. Each is ended once; what is sent waits for ``flush``."""

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        """``on_change`` is told whenever a leg opened or ended; it may only wake somebody."""
        self._on_change = on_change or (lambda: None)
        self._open: dict[LegKey, OpenLeg] = {}
        self._news: dict[LegSink, _News] = {}
        self._ended: deque[PromptPrefix] = deque(maxlen=_MAX_ENDED)
        self._latest = float("-inf")
        self.counts: Counter[str] = Counter()
        """``received`` and, by outcome, ended legs; their sums agree when none is open."""

    def __contains__(self, key: LegKey) -> bool:
        """Whether the leg is open here."""
        return key in self._open

    def __len__(self) -> int:
        """Return the number of open legs."""
        return len(self._open)

    def __iter__(self) -> Iterator[OpenLeg]:
        """Iterate over a copy: ending legs on the way is fine."""
        return iter(list(self._open.values()))

    def get(self, key: LegKey) -> OpenLeg | None:
        """Return the open leg, or None."""
        return self._open.get(key)

    def open(self, leg: Leg, sink: LegSink, now: float) -> OpenLeg:
        """Write a leg down; its key must not be open."""
        assert leg.key not in self._open, f"leg {leg.key} is open already"
        opened = OpenLeg(
            leg=leg,
            sink=sink,
            arrived=self._arrived(now - leg.waited_s),
            deadline=now + leg.remaining_s,
        )
        self._open[leg.key] = opened
        self.counts["received"] += 1
        self._on_change()
        return opened

    def _arrived(self, measured: float) -> float:
        """Return since when a leg waits: as measured, but not a moment before the last one's."""
        if self._latest - _MOMENT_S < measured:
            self._latest = max(self._latest, measured)
            return self._latest
        return measured

    def grants(self) -> Iterable[str]:
        """Return the grants of the open legs."""
        return {opened.leg.grant_id for opened in self._open.values() if opened.leg.grant_id}

    def answering_to(self, sink: LegSink) -> list[OpenLeg]:
        """Return the open legs of one router."""
        return [opened for opened in self._open.values() if opened.sink is sink]

    def token(self, opened: OpenLeg, token: Token) -> None:
        """Add a token to the next message; one of a leg that was given up is not sent."""
        if opened.aborted is None:
            self._news_for(opened).tokens.append(token)

    def prompts(self, runs: Iterable[PromptLogprobs], mine: Container[LegKey]) -> None:
        """Add log-probabilities of prompts, of the legs in ``mine``, to the next message."""
        for run in runs:
            opened = self._open.get(run.key)
            if opened is not None and run.key in mine and opened.aborted is None:
                self._news_for(opened).prompts.append(run)

    def waiting(self, opened: OpenLeg, waiting: ExportWaiting) -> None:
        """Add to the next message that the leg's export waits for a redirect."""
        if opened.aborted is None:
            self._news_for(opened).notices.append(waiting)

    def preempted(self, notices: Iterable[Preempted], mine: Container[LegKey]) -> None:
        """Add to the next message which legs, of those in ``mine``, were preempted."""
        for notice in notices:
            opened = self._open.get(notice.key)
            if opened is not None and notice.key in mine:
                opened.preempted(notice.num_preemptions)
                self._news_for(opened).notices.append(notice)

    def end(
        self,
        opened: OpenLeg,
        *,
        finish_reason: FinishReason | None = None,
        error: PdserveError | None = None,
        times: LegTimes | None = None,
    ) -> None:
        """Close a leg and add its one last word to the next message."""
        del self._open[opened.key]
        if opened.leg.prefix.names:
            self._ended.append(opened.leg.prefix)
        self.counts[_outcome(opened, finish_reason, error)] += 1
        end = LegEnd(
            key=opened.key, finish_reason=finish_reason, error=error, times=times or LegTimes()
        )
        self._news_for(opened).ends.append(end)
        self._on_change()

    def take_ended(self) -> list[PromptPrefix]:
        """Return which beginnings of prompts the legs had that ended since the last call."""
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def flush(self) -> None:
        """Send what was added, one message for each router."""
        news, self._news = self._news, {}
        for sink, told in news.items():
            sink.emit(told.tokens, told.ends, told.notices, told.prompts)

    def _news_for(self, opened: OpenLeg) -> _News:
        return self._news.setdefault(opened.sink, _News())


@dataclass(slots=True)
class _News:
    """What waits for one router."""

    tokens: list[Token] = field(default_factory=list)
    ends: list[LegEnd] = field(default_factory=list)
    notices: list[LegNotice] = field(default_factory=list)
    prompts: list[PromptLogprobs] = field(default_factory=list)


def _outcome(
    opened: OpenLeg, finish_reason: FinishReason | None, error: PdserveError | None
) -> str:
    if isinstance(error, Cancelled):
        return "aborted"
    if error is not None:
        return "failed"
    if finish_reason is not None:
        return finish_reason.value
    if opened.aborted is AbortCause.STOPPED:
        return FinishReason.STOP.value
    return "handed_over" if opened.leg.kind is LegKind.PREFILL else "finished_at_prefill"
