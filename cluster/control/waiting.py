"""The wants that wait for a placement: exports first, then oldest first.

Both orders are FCFS by the time waited in all. An export holds blocks of a prefill worker under a
lease that runs out; placing it frees them, and needs nothing of any prefill worker.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.control.facts import Want

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.control.ledger import WantKey


@dataclass(slots=True, kw_only=True)
class Waiting:
    """A want in the queue; instants are on the planner's clock."""

    want: Want
    router_id: str
    arrived: float
    """Now less what it had already waited when it came here."""
    deadline: float
    order: int
    """Breaks ties of ``arrived``."""
    routeless_since: float | None = None
    """Since when no worker is there that could serve it."""

    @property
    def key(self) -> WantKey:
        """Its name."""
        return (self.want.request_id, self.want.attempt)


class WaitingQueue:
    """A sorted list with an index. A want that comes twice keeps its time."""

    def __init__(self) -> None:
        self._sorted: list[Waiting] = []
        self._by_key: dict[WantKey, Waiting] = {}
        self._orders = itertools.count()
        self.num_tokens = 0
        """Prompt tokens that wait."""

    def __len__(self) -> int:
        """Return the number of wants."""
        return len(self._sorted)

    def __iter__(self) -> Iterator[Waiting]:
        """Walk over a copy, in order."""
        return iter(list(self._sorted))

    def __contains__(self, key: WantKey) -> bool:
        """Tell whether the want waits."""
        return key in self._by_key

    def add(self, want: Want, router_id: str, now: float) -> Waiting:
        """Enter a want, in place of its former self if it was there."""
        old = self.remove((want.request_id, want.attempt))
        waiting = Waiting(
            want=want,
            router_id=router_id,
            arrived=now - want.waited_s if old is None else old.arrived,
            deadline=now + want.remaining_s,
            order=next(self._orders) if old is None else old.order,
            routeless_since=None if old is None else old.routeless_since,
        )
        bisect.insort(self._sorted, waiting, key=_place)
        self._by_key[waiting.key] = waiting
        self.num_tokens += want.num_prompt_tokens
        return waiting

    def remove(self, key: WantKey) -> Waiting | None:
        """Take a want out; None where it does not wait."""
        waiting = self._by_key.pop(key, None)
        if waiting is not None:
            del self._sorted[bisect.bisect_left(self._sorted, _place(waiting), key=_place)]
            self.num_tokens -= waiting.want.num_prompt_tokens
        return waiting

    def remove_router(self, router_id: str) -> list[Waiting]:
        """Take out all wants of a router."""
        gone = [waiting for waiting in self._sorted if waiting.router_id == router_id]
        for waiting in gone:
            self.remove(waiting.key)
        return gone


def _place(waiting: Waiting) -> tuple[bool, float, int]:
    return (waiting.want.export is None, waiting.arrived, waiting.order)
