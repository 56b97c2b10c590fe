"""Cancels across routers: who was asked, who has answered, what to tell the one that asks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the asking router is told; ``cancel_id`` is its own."""

    router_id: str
    cancel_id: int
    was_running: bool


@dataclass(slots=True)
class _Pending:
    router_id: str
    cancel_id: int
    deadline: float
    unanswered: set[str]


class CancelDesk:
    """Open questions. Each is answered once: by the first yes, the last no, or the clock."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}

    def ask(
        self, router_id: str, cancel_id: int, others: Collection[str], now: float
    ) -> int | Answer:
        """Open a question to the other routers; returns its id, or the answer if there is none."""
        if not others:
            return Answer(router_id=router_id, cancel_id=cancel_id, was_running=False)
        desk_id = next(self._ids)
        deadline = now + self._timeout_s
        self._pending[desk_id] = _Pending(router_id, cancel_id, deadline, set(others))
        return desk_id

    def answered(self, router_id: str, desk_id: int, was_running: bool) -> list[Answer]:
        """Take one router's answer; late and foreign ones change nothing."""
        pending = self._pending.get(desk_id)
        if pending is None or router_id not in pending.unanswered:
            return []
        pending.unanswered.discard(router_id)
        if was_running or not pending.unanswered:
            return [self._close(desk_id, was_running)]
        return []

    def router_gone(self, router_id: str) -> list[Answer]:
        """Expect nothing more of a router, and answer it nothing."""
        for desk_id, pending in list(self._pending.items()):
            if pending.router_id == router_id:
                del self._pending[desk_id]
        answers: list[Answer] = []
        for desk_id in list(self._pending):
            answers += self.answered(router_id, desk_id, was_running=False)
        return answers

    def tick(self, now: float) -> list[Answer]:
        """Close the questions whose time is up."""
        late = [desk_id for desk_id, pending in self._pending.items() if now >= pending.deadline]
        return [self._close(desk_id, was_running=False) for desk_id in late]

    def _close(self, desk_id: int, was_running: bool) -> Answer:
        pending = self._pending.pop(desk_id)
        return Answer(
            router_id=pending.router_id, cancel_id=pending.cancel_id, was_running=was_running
        )
