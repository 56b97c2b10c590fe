"""Whether a decode worker prefills a prompt by itself though there are prefill workers.

It pays where there is little to compute: no KV is moved, and no prompt waited for. But each stream
that runs there stands still meanwhile, so its price is

    wait there + compute + compute x streams that run there (at least one) + decode

against what the cheapest pair with room would cost, or, where prefill workers are full, one whose
run-ahead is used up. It has to be lower by ``_MARGIN_S``, and what it computes is bounded whatever
it costs. The answer depends on nothing but the loads as they are: there is no state to flap.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from cluster.config import LocalPrefill, Role
from cluster.control.costs import Choice, Route
from cluster.control.facts import Health

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.config import SchedulingConfig
    from cluster.control.costs import CostModel
    from cluster.control.facts import Want
    from cluster.control.ledger import Ledger
    from cluster.control.worker_entry import WorkerEntry

_MARGIN_S = 5e-3


class Why(enum.Enum):
    """Why a decode worker prefills: each is a counter of its own."""

    FALLBACK = "fallback"
    """No prefill worker can."""
    FORCED = "forced"
    """By configuration."""
    SHORT = "short"
    """The prompt is short, and this costs less."""
    CACHED = "cached"
    """All but little of the prompt is cached there, and this costs less."""


class LocalPrefillRule:
    """Decides by configuration and by price."""

    def __init__(self, scheduling: SchedulingConfig, ledger: Ledger, costs: CostModel) -> None:
        self.is_forced = scheduling.local_prefill is LocalPrefill.ALWAYS
        self._is_auto = scheduling.local_prefill is LocalPrefill.AUTO
        self._max_tokens = scheduling.local_prefill_tokens
        self._run_ahead_tokens = scheduling.run_ahead_tokens
        self._ledger = ledger
        self._costs = costs

    def may_take(self, want: Want) -> bool:
        """Whether a fresh want has little enough to compute."""
        if not self._is_auto or want.attempt > 0 or want.avoid or want.export is not None:
            return False
        if want.num_prompt_tokens <= self._max_tokens:
            return True
        known = self._ledger.prefixes.holders(want.prefix)
        most_known = want.num_prompt_tokens if want.cached_on else max(known.values(), default=0)
        if want.num_prompt_tokens - most_known > self._max_tokens:
            return False
        return any(
            entry.registration.role is Role.DECODE
            and want.num_prompt_tokens - self._costs.num_cached_tokens(entry, want)
            <= self._max_tokens
            for worker_id in known
            if (entry := self._ledger.workers.get(worker_id)) is not None
        )

    def uncached_tokens(self, want: Want) -> int:
        """Return what whoever has most of a prompt would have to compute of it."""
        workers = self._ledger.workers
        cached = [
            self._costs.num_cached_tokens(workers[worker_id], want)
            for worker_id in self._ledger.prefixes.holders(want.prefix)
            if worker_id in workers
        ]
        return want.num_prompt_tokens - max(cached, default=0)

    def cheaper(
        self, pair: Choice | None, decodes: Sequence[WorkerEntry], want: Want, prefill: Role
    ) -> Choice | None:
        """Return the better of the best pair, if one has room, and of decode workers with room.

        ``prefill``: the role of those that prefill in pairs.
        """
        priced = [(cost, e) for e in decodes if (cost := self._cost_s(e, want)) is not None]
        if not priced:
            return pair
        cost_s, entry = min(priced, key=lambda price: (price[0], price[1].last_granted))
        limit_s = self._full_cost_s(prefill, entry, want) if pair is None else pair.cost_s
        if cost_s + _MARGIN_S >= limit_s:
            return pair
        why = Why.SHORT if want.num_prompt_tokens <= self._max_tokens else Why.CACHED
        other = "the best pair" if pair is not None else "any pair, whose prefill is full"
        return Choice(
            route=Route(prefill=None, decode=entry),
            first_token_s=self._costs.prompt_s(entry, want),
            reason=f"local, {why.value}: {cost_s:.3f} s, {limit_s:.3f} s by {other}",
            cost_s=cost_s,
            why_local=why.value,
        )

    def _cost_s(self, entry: WorkerEntry, want: Want) -> float | None:
        """Return the price on one decode worker; None where it would compute too much."""
        num_tokens = want.num_prompt_tokens - self._costs.num_cached_tokens(entry, want)
        token_s, _ = self._costs.speeds(entry, 0)
        if num_tokens > self._max_tokens or token_s <= 0.0:
            return None
        harm_s = num_tokens * token_s * max(1, entry.num_slots_used)
        return self._costs.prompt_s(entry, want) + harm_s + self._decode_s(entry, want)

    def _full_cost_s(self, prefill: Role, entry: WorkerEntry, want: Want) -> float:
        """Return the least that a pair costs whose prefill worker has all that it may have.

        Who is suspected is no fuller than before: it is waited for.
        """
        workers = self._ledger.of_role(prefill)
        alive = next((e for e in workers if e.health is Health.ALIVE), None)
        if alive is None:
            return 0.0
        token_s, _ = self._costs.speeds(alive, 0)
        return self._run_ahead_tokens * token_s + self._decode_s(entry, want)

    def _decode_s(self, entry: WorkerEntry, want: Want) -> float:
        num_tokens = min(float(want.max_tokens), self._costs.expected_output_tokens)
        return self._costs.decode_s(entry, num_tokens)
