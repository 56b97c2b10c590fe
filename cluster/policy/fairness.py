"""Fair shares of a tier's tokens between tenants: virtual token counters.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each tenant has a
counter of the tokens it was served, the waiting tenant with the lowest one is next, and a tenant
that comes, or comes back, is lifted to the lowest of those that wait, so that nobody saves up
credit by staying away. Prompt and output tokens weigh the same here, so that shares are in tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_TENANTS = 65_536


class TenantCounters:
    """The counters of one tier, and how many requests of each tenant wait in it."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._num_waiting: dict[str, int] = {}
        self._last_left = 0.0

    def counter(self, tenant: str) -> float:
        """Tokens that the tenant was served, and what it was lifted by."""
        return self._counters.get(tenant, 0.0)

    def counters(self, tenants: Iterable[str]) -> list[tuple[float, str]]:
        """Return (counter, tenant) of each."""
        known = self._counters
        return [(known.get(tenant, 0.0), tenant) for tenant in tenants]

    def charge(self, tenant: str, num_tokens: float) -> None:
        """Count tokens as served; a negative number takes back what was charged too much."""
        self._counters[tenant] = self.counter(tenant) + num_tokens

    def enters(self, tenant: str) -> None:
        """One more request of the tenant waits."""
        count = self._num_waiting.get(tenant, 0)
        if count == 0:
            waiting = [self.counter(other) for other in self._num_waiting]
            least = min(waiting, default=self._last_left)
            self._counters[tenant] = max(self.counter(tenant), least)
        self._num_waiting[tenant] = count + 1

    def leaves(self, tenant: str) -> None:
        """One request of the tenant waits no more."""
        count = self._num_waiting.pop(tenant) - 1
        if count:
            self._num_waiting[tenant] = count
            return
        self._last_left = self.counter(tenant)
        if len(self._counters) > _MAX_TENANTS:
            # Those that do not wait begin anew when they come back, by the lift.
            self._counters = {name: self.counter(name) for name in self._num_waiting}
