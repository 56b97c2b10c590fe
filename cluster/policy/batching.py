"""When a batch takes new members: one small rule for each kind of batching.

``continuous``: whenever there is a slot. ``static``: a batch forms from what waits when the last
one has ended, and runs to its last member. ``dynamic``: as static, but before it starts a batch
collects until it is full, or its first member has waited a window.

Nothing is granted to a worker whose batch runs, so what waits comes one by one when it has ended,
and what is sent at once comes so too: a static batch starts when they have stopped coming.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.config import Batching

SETTLE_S = 0.01
"""Twice as long as a worker's report may be held back: whoever waited elsewhere is here by then."""


class Gate(Protocol):
    """Decides how many may join the batch of one worker."""

    opens_at: float | None
    """The instant at which it opens if nothing happens before; None: no instant alone opens it."""

    def num_open(self, *, num_running: int, num_waiting: int, now: float) -> int:
        """Return how many may be admitted now; to be asked before each step."""
        ...


@dataclass(slots=True)
class Continuous:
    """Everybody may join, while there is a slot."""

    num_slots: int
    opens_at: float | None = None

    def num_open(self, *, num_running: int, num_waiting: int, now: float) -> int:
        """Return the free slots."""
        return self.num_slots - num_running


@dataclass(slots=True)
class Static:
    """Nobody may join a batch that runs, and none starts while others are still coming."""

    size: int
    opens_at: float | None = None
    _num_seen: int = 0
    _since: float | None = None

    def num_open(self, *, num_running: int, num_waiting: int, now: float) -> int:
        """Return the whole batch's slots when it is over and has its members, none before."""
        self.opens_at = None
        if num_running or not num_waiting:
            self._since = None
            return 0
        if self._since is None or num_waiting > self._num_seen:
            self._since = now
        self._num_seen = num_waiting
        if num_waiting >= self.size or now >= self._since + SETTLE_S:
            return self.size
        self.opens_at = self._since + SETTLE_S
        return 0


@dataclass(slots=True)
class Dynamic:
    """As static, and a batch waits for ``window_s`` at most until it is full."""

    size: int
    window_s: float
    opens_at: float | None = None
    _since: float | None = None

    def num_open(self, *, num_running: int, num_waiting: int, now: float) -> int:
        """Return the whole batch's slots when it has collected for long enough."""
        self.opens_at = None
        if num_running or not num_waiting:
            self._since = None
            return 0
        if self._since is None:
            self._since = now
        if num_waiting >= self.size or now >= self._since + self.window_s:
            return self.size
        self.opens_at = self._since + self.window_s
        return 0


def make_gate(batching: Batching, *, num_slots: int, size: int, window_s: float) -> Gate:
    """Return the gate of a worker with ``num_slots``; ``size`` 0 stands for all of them."""
    size = min(size or num_slots, num_slots)
    if batching is Batching.STATIC:
        return Static(size)
    if batching is Batching.DYNAMIC:
        return Dynamic(size, window_s)
    return Continuous(num_slots)


def is_closed(batching: Batching, *, num_running: int) -> bool:
    """Whether a worker's batch takes nobody now, as the control plane sees it."""
    return batching is not Batching.CONTINUOUS and num_running > 0
