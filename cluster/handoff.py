"""One attempt to pass an export to one decode worker: its states, its legal moves, its messages.

    OFFERED ──credit──▶ RESERVED ──manifest──▶ SENDING ──commit──▶ COMMITTED
       │                   │                      │
       └───────────────────┴──────────────────────┴──────▶ ABORTED(cause)

Both sides keep one ``Handoff`` each and move it by ``advance`` alone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from cluster.request import LegKey


class HandoffState(enum.Enum):
    """Where a handoff stands."""

    OFFERED = "offered"
    RESERVED = "reserved"
    SENDING = "sending"
    COMMITTED = "committed"
    ABORTED = "aborted"


class AbortCause(enum.Enum):
    """Why a handoff, or a leg, was given up."""

    FINISHED = "finished"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    DEADLINE = "deadline"
    LEASE = "lease"
    FAULT = "fault"


LEGAL_MOVES: dict[HandoffState, frozenset[HandoffState]] = {
    HandoffState.OFFERED: frozenset({HandoffState.RESERVED, HandoffState.ABORTED}),
    HandoffState.RESERVED: frozenset({HandoffState.SENDING, HandoffState.ABORTED}),
    HandoffState.SENDING: frozenset({HandoffState.COMMITTED, HandoffState.ABORTED}),
    HandoffState.COMMITTED: frozenset(),
    HandoffState.ABORTED: frozenset(),
}


class IllegalTransition(AssertionError):
    """A handoff was moved against the table: our own bug."""


@dataclass(slots=True)
class Handoff:
    """The state of one handoff on one side; ``cause`` is set exactly when it is ABORTED."""

    handoff_id: str
    key: LegKey
    num_blocks: int
    state: HandoffState = HandoffState.OFFERED
    cause: AbortCause | None = field(default=None)

    def advance(self, new: HandoffState, cause: AbortCause | None = None) -> None:
        """Move to ``new``; raises IllegalTransition where the table has no such move."""
        if new not in LEGAL_MOVES[self.state]:
            raise IllegalTransition(f"{self.handoff_id}: {self.state} -> {new}")
        if (new is HandoffState.ABORTED) != (cause is not None):
            raise IllegalTransition(f"{self.handoff_id}: {new} with cause {cause}")
        self.state = new
        self.cause = cause

    @property
    def is_over(self) -> bool:
        """Whether no further move is legal."""
        return not LEGAL_MOVES[self.state]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Sender to receiver: this much KV will come; reserve for it."""

    handoff_id: str
    key: LegKey
    num_blocks: int
    """In the sender's layout."""
    num_tokens: int
    is_redirected: bool = False
    """An earlier handoff of this export failed: it goes before those that never waited."""
    num_preemptions: int = 0
    """Of the choice so far, on all its ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Receiver to sender: blocks are reserved, send."""

    handoff_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestBytes:
    """Sender to receiver: a segment's msgpack manifest; its bytes follow on the channel."""

    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Receiver to sender: the KV is whole and mine; give yours back."""

    handoff_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortHandoff:
    """Either side: this handoff is over."""

    handoff_id: str
    cause: AbortCause
    detail: str = ""
    num_preemptions: int = 0
    """Of the choice so far: a receiver whose blocks went to a higher tier has counted one more."""


LinkSignal = Offer | Credit | ManifestBytes | Commit | AbortHandoff
"""Everything about handoffs that travels on a link's ordered signalling stream."""
