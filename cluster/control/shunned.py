"""Links that are broken: no request goes over them, but for one now and then that tries.

A prefill worker reports the decode workers to whom its handoffs go on failing. Such a pair gets no
grant for a while, then one, and if that fails too it has to wait as long again. A request that
tries in vain loses some seconds and is resumed elsewhere; one that succeeds ends the report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from cluster.control.costs import Route

RETRY_S = 10.0
"""Between two tries of a broken link; longer than it takes to see that it still is."""

_Pair = tuple[str, str]
"""(prefill worker, decode worker), by their incarnations."""


class ShunnedLinks:
    """The broken links, and when each may be tried again."""

    def __init__(self) -> None:
        self._retry_at: dict[_Pair, float] = {}

    def learn(self, sender: str, receivers: Collection[str], now: float) -> None:
        """Take in which links of a prefill worker are broken; all others of it are not."""
        if not receivers and not self._retry_at:
            return
        kept = {p: at for p, at in self._retry_at.items() if p[0] != sender or p[1] in receivers}
        for receiver in receivers:
            kept.setdefault((sender, receiver), now + RETRY_S)
        self._retry_at = kept

    def tried(self, pair: _Pair, now: float) -> None:
        """Note a grant: no other tries this link before that may have come to its end."""
        if pair in self._retry_at:
            self._retry_at[pair] = now + RETRY_S

    def working(self, routes: Iterable[Route], now: float) -> list[Route]:
        """Return the routes that move no KV over a link that is shunned now."""
        if not self._retry_at:
            return list(routes)
        return [route for route in routes if now >= self._retry_at.get(_pair_of(route), now)]


def _pair_of(route: Route) -> _Pair:
    ends = (route.prefill, route.decode)
    sender, receiver = (e.registration.incarnation if e is not None else "" for e in ends)
    return sender, receiver
