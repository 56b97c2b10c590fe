"""Links whose handoffs fail, and go on failing: what the control plane shall know of them."""

from __future__ import annotations

from dataclasses import dataclass

_LASTING_S = 1.0
"""All handoffs of a link that breaks fail together, which says nothing of the next link."""
_KEPT_S = 60.0
"""Whoever was not tried for so long may well be reached by now, or be gone."""


@dataclass(slots=True)
class _Failing:
    since: float
    last: float


class BrokenLinks:
    """Counts nothing but time: a link is broken where failures lie apart, without a success."""

    def __init__(self) -> None:
        self._failing: dict[str, _Failing] = {}

    def failed(self, incarnation: str, now: float) -> None:
        """Note that a handoff to a decode worker failed by no fault of its KV."""
        failing = self._failing.setdefault(incarnation, _Failing(now, now))
        failing.last = now

    def worked(self, incarnation: str) -> None:
        """Note that one was committed."""
        self._failing.pop(incarnation, None)

    def names(self, now: float) -> tuple[str, ...]:
        """Return the incarnations to which links are broken."""
        self._failing = {i: f for i, f in self._failing.items() if now - f.last < _KEPT_S}
        return tuple(i for i, f in self._failing.items() if f.last - f.since >= _LASTING_S)
