"""The routers that have or had a stream here. A lost one has a while to come back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Router:
    incarnation: str
    lost_at: float | None = None


class Routers:
    """Who is connected, and who has been away for how long."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._routers: dict[str, _Router] = {}

    @property
    def num_connected(self) -> int:
        """Routers with a stream."""
        return sum(router.lost_at is None for router in self._routers.values())

    def joined(self, router_id: str, incarnation: str) -> bool:
        """Take a stream; whether it replaces another incarnation, which is gone for good."""
        old = self._routers.get(router_id)
        self._routers[router_id] = _Router(incarnation)
        return old is not None and old.incarnation != incarnation

    def left(self, router_id: str, incarnation: str, now: float) -> bool:
        """Note that a stream is gone; False where it was not the router's present one."""
        router = self._routers.get(router_id)
        if router is None or router.incarnation != incarnation:
            return False
        router.lost_at = now
        return True

    def rearm(self, now: float) -> None:
        """Start the graces again: we were the ones who were away."""
        for router in self._routers.values():
            router.lost_at = None if router.lost_at is None else now

    def take_lost(self, now: float) -> list[str]:
        """Forget and return those that did not come back in time."""
        lost = [
            router_id
            for router_id, router in self._routers.items()
            if router.lost_at is not None and now - router.lost_at > self._grace_s
        ]
        for router_id in lost:
            del self._routers[router_id]
        return lost
