"""The states of a worker, from its start to its end, and what each means for new legs.

    STARTING ──accepted──▶ SERVING ──told to──▶ DRAINING ──▶ STOPPING
        │                     │ fault, or told to go at once     ▲
        └─────────────────────┴──────────────────────────────────┘

The control plane places nothing on a worker from the report on that says it drains. What it had
granted before that may still be on its way, and is served.
"""

from __future__ import annotations

import enum

LAST_GRANTS_S = 1.0
"""So long legs may still come to a worker that drains; none is granted any more."""


class WorkerState(enum.Enum):
    """Where a worker is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    """Takes nothing new, ends what it has."""
    STOPPING = "stopping"
    """Ends whatever is left."""


_NEXT = {
    WorkerState.STARTING: {WorkerState.SERVING, WorkerState.STOPPING},
    WorkerState.SERVING: {WorkerState.DRAINING, WorkerState.STOPPING},
    WorkerState.DRAINING: {WorkerState.STOPPING},
    WorkerState.STOPPING: set[WorkerState](),
}


class WorkerLife:
    """The state of one worker."""

    def __init__(self) -> None:
        self.state = WorkerState.STARTING
        self._drains_since = 0.0

    @property
    def is_draining(self) -> bool:
        """Whether nothing new shall be placed on it."""
        return self.state in (WorkerState.DRAINING, WorkerState.STOPPING)

    def advance(self, state: WorkerState, now: float) -> bool:
        """Go on to a state; False, and nothing changes, where that does not follow from this."""
        if state not in _NEXT[self.state]:
            return False
        self.state = state
        if state is WorkerState.DRAINING:
            self._drains_since = now
        return True

    def refusal(self, now: float) -> str:
        """Return why no leg is taken; empty where one is."""
        if self.state is WorkerState.STOPPING:
            return "the worker is stopping"
        return "" if self.last_grants_s(now) > 0.0 else "the worker drains"

    def last_grants_s(self, now: float) -> float:
        """Return for how long legs may still come."""
        if self.state is not WorkerState.DRAINING:
            return LAST_GRANTS_S
        return max(0.0, self._drains_since + LAST_GRANTS_S - now)
