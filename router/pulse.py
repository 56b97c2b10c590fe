"""Whether a worker that has legs still works on them: a judge without clock or network.

Workers say at least each second how far their engine is. A stopped process says nothing; one whose
event loop lives while its engine hangs says that one step has been running for too long. An
engine that waits, for KV or for work, hangs on nothing.
"""

from __future__ import annotations

from cluster.request import Beat

PATIENCE_S = 5.0
"""At least so long may a worker say nothing, and a step take; longer where the worker predicts a
long step."""
GAP_S = 1.0
"""After a longer gap between two looks it was this router that had been stopped."""


class Pulse:
    """One worker's signs of life, as of the last look."""

    def __init__(self) -> None:
        self._beat = Beat()
        self._is_fresh = False
        self._num_steps = 0
        self._heard_at = self._moved_at = self._looked_at = float("-inf")

    def heard(self, beat: Beat) -> None:
        """Take a sign of life."""
        self._beat = beat
        self._is_fresh = True

    def look(self, now: float) -> str | None:
        """Say what is wrong with a worker that has legs; None where nothing is.

        Looks that are far apart, the first one too, start the clocks anew.
        """
        is_gap = now - self._looked_at > GAP_S
        self._looked_at = now
        if self._is_fresh or is_gap:
            self._heard_at = now
        has_moved = self._beat.num_steps != self._num_steps or not self._beat.patience_s
        if has_moved or is_gap:
            self._moved_at = now
        self._num_steps = self._beat.num_steps
        self._is_fresh = False
        patience_s = max(PATIENCE_S, self._beat.patience_s)
        if now - self._heard_at > patience_s:
            return f"it said nothing for {patience_s:.1f} s"
        if now - self._moved_at > patience_s:
            return f"its engine is in one step for more than {patience_s:.1f} s"
        return None
