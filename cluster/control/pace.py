"""How fast the queue is served: by the grants made while it was never empty, else by the workers.

What was granted while others waited tells all there is to know about prompts, outputs, caches and
links. Before enough of it was seen, or when that is long ago, the workers' speeds tell something:
a request takes the larger of what its prompt takes of all prefill, and its output of all decoding.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cluster.config import Role
from cluster.control.facts import Health

if TYPE_CHECKING:
    from cluster.control.costs import CostModel
    from cluster.control.ledger import Ledger

_MAX_SEEN = 64
_MIN_SEEN = 8
_KEPT_S = 60.0
_MODEL_AGE_S = 0.5


class Pace:
    """Seconds for each request that waits."""

    def __init__(self, ledger: Ledger, costs: CostModel) -> None:
        self._ledger = ledger
        self._costs = costs
        self._seen: deque[tuple[float, float]] = deque()
        """When something was granted, and how long after what was granted before it."""
        self._total_s = 0.0
        self._busy_since: float | None = None
        """Since the last grant, or since somebody waits."""
        self._decode_s = self._token_s = 0.0
        self._priced_at = float("-inf")

    def granted(self, now: float, *, has_waited: bool) -> None:
        """Learn from a grant; one that did not have to wait says nothing of those that do."""
        if has_waited and self._busy_since is not None:
            self._seen.append((now, now - self._busy_since))
            self._total_s += now - self._busy_since
            if len(self._seen) > _MAX_SEEN:
                self._forget()
        self._busy_since = now

    def looked(self, now: float, *, is_waiting: bool) -> None:
        """Note whether somebody is left in the queue."""
        if not is_waiting:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = now

    def request_s(self, now: float, mean_prompt_tokens: float) -> float:
        """Return the seconds in which one of those that wait is placed; 0 where it is unknown."""
        while self._seen and now - self._seen[0][0] > _KEPT_S:
            self._forget()
        num_seen = len(self._seen)
        if num_seen < _MIN_SEEN:
            return self._by_speeds(now, mean_prompt_tokens)
        since = now if self._busy_since is None else self._busy_since
        # A grant that is overdue counts before it comes.
        return max(self._total_s / num_seen, (self._total_s + now - since) / (num_seen + 1))

    def _forget(self) -> None:
        self._total_s -= self._seen.popleft()[1]
        if not self._seen:
            self._total_s = 0.0  # what rounding left

    def _by_speeds(self, now: float, mean_prompt_tokens: float) -> float:
        if now - self._priced_at > _MODEL_AGE_S:
            self._priced_at = now
            self._price()
        return max(self._decode_s, self._token_s * mean_prompt_tokens)

    def _price(self) -> None:
        tokens_by_s = requests_by_s = 0.0
        num_tokens = self._costs.expected_output_tokens
        for entry in self._ledger.workers.values():
            if entry.health is not Health.ALIVE or entry.report.is_draining:
                continue
            role, num_slots = entry.registration.role, entry.registration.num_slots
            token_s, step_s = self._costs.speeds(entry, num_slots)
            if role is not Role.DECODE and token_s > 0.0:
                tokens_by_s += 1.0 / token_s
            if role is not Role.PREFILL and step_s > 0.0 and num_tokens > 0.0:
                requests_by_s += num_slots / (num_tokens * step_s)
        self._token_s = 1.0 / tokens_by_s if tokens_by_s else 0.0
        self._decode_s = 1.0 / requests_by_s if requests_by_s else 0.0
