"""When a batch takes new members: one small rule for each kind of batching.

``continuous``: whenever there is a slot. ``static``: a batch forms from what waits when the last
one has ended, and runs to its last member. ``dynamic``: as static, but before it starts a batch
collects until it is full, or its first member has waited a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.config import Batching


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
    """Nobody may join a batch that runs."""

    size: int
    opens_at: float | None = None

    def num_open(self, *, num_running: int, num_waiting: int, now: float) -> int:
        """Return the whole batch's slots when it is over, and none before."""
        return 0 if num_running else self.size


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
        if not num_waiting:
            self._since = None
            return 0
        if self._since is None:
            self._since = now
        if num_running:
            return 0
        if num_waiting >= self.size or now >= self._since + self.window_s:
            # Those left over wait for a batch of their own.
            self._since = now if num_waiting > self.size else None
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
