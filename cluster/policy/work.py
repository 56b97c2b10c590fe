"""How much work a request is expected to be, in tokens."""

from __future__ import annotations

_LEARNS = 0.1
"""Weight of one more output in a tenant's estimate."""
_MAX_TENANTS = 4096


class OutputEstimates:
    """How long outputs are, by tenant: a mean in which the last ones weigh most."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def note(self, tenant: str, num_output_tokens: int) -> None:
        """Learn from an output that has ended."""
        if num_output_tokens < 1:
            return
        mean = self._means.pop(tenant, None)
        if mean is None and len(self._means) >= _MAX_TENANTS:
            del self._means[next(iter(self._means))]
        # Entered again at the end: the first one is the one unheard of for longest.
        new = float(num_output_tokens)
        self._means[tenant] = new if mean is None else mean + _LEARNS * (new - mean)

    def expected(self, tenant: str, *, max_tokens: int, hint: int | None = None) -> float:
        """Return the expected output tokens: the client's hint, else what its tenant's outputs
        were like, else the most that may come."""
        guess = self._means.get(tenant) if hint is None else float(hint)
        return float(max_tokens) if guess is None else min(float(max_tokens), guess)
