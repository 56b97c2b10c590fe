"""Fair shares of a tier's tokens between tenants: virtual token counters.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each tenant has a
counter of the tokens it was served, the waiting tenant with the lowest one is next, and a tenant
that comes, or comes back, is lifted to the lowest of those that wait, so that nobody saves up
credit by staying away. Prompt and output tokens weigh the same here, so that shares are in tokens.

What a request is expected to take is counted when it begins, and settled when it ends. The lift
leaves out what is not settled: a newcomer that were lifted to guesses which turn out too high would
wait until the others have been served as much.
"""

from __future__ import annotations

_MAX_TENANTS = 65_536


class TenantCounters:
    """The counters of one tier, and how many requests of each tenant wait in it."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._unsettled: dict[str, float] = {}
        """What is expected, and is in the counters."""
        self._num_waiting: dict[str, int] = {}
        self._last_left = ""
        self.moved: set[str] = set()
        """Those that wait and whose counters have changed; emptied by whoever sorts them."""

    def counter(self, tenant: str) -> float:
        """Tokens that the tenant was served, and what it was lifted by."""
        return self._counters.get(tenant, 0.0)

    def charge(self, tenant: str, num_tokens: float) -> None:
        """Count tokens as served; a negative number takes back what was charged too much."""
        self._counters[tenant] = self.counter(tenant) + num_tokens
        if tenant in self._num_waiting:
            self.moved.add(tenant)

    def expect(self, tenant: str, num_tokens: float) -> None:
        """Count tokens that the tenant is expected to be served, until they are settled."""
        self.charge(tenant, num_tokens)
        self._unsettled[tenant] = self._unsettled.get(tenant, 0.0) + num_tokens

    def settle(self, tenant: str, num_expected: float, num_tokens: float) -> None:
        """Count what it was served in place of what was expected."""
        self.charge(tenant, num_tokens - num_expected)
        left = self._unsettled.pop(tenant, 0.0) - num_expected
        if left >= 1.0:  # less than a token is rounding
            self._unsettled[tenant] = left

    def settled(self, tenant: str) -> float:
        """Return the counter without what is only expected."""
        return self.counter(tenant) - self._unsettled.get(tenant, 0.0)

    def enters(self, tenant: str) -> None:
        """One more request of the tenant waits."""
        count = self._num_waiting.get(tenant, 0)
        if count == 0:
            others = self._num_waiting or (self._last_left,)
            self._counters[tenant] = max(self.counter(tenant), min(map(self.settled, others)))
        self._num_waiting[tenant] = count + 1

    def leaves(self, tenant: str) -> None:
        """One request of the tenant waits no more."""
        count = self._num_waiting.pop(tenant) - 1
        if count:
            self._num_waiting[tenant] = count
            return
        self._last_left = tenant
        if len(self._counters) > _MAX_TENANTS:
            # Those that do not wait begin anew when they come back, by the lift.
            kept = {*self._num_waiting, *self._unsettled, tenant}
            self._counters = {name: self.counter(name) for name in kept}
