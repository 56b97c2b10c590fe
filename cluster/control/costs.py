"""What a route costs, in predicted seconds, and which of several is taken.

    cost = wait at the prefill worker + predicted prefill + transfer
           + wait at the decode worker + expected output x its step time with this sequence

Neutral where nothing differs: a worker whose measured speed is within ``_SPEED_NOISE`` of its
pool's mean counts as the mean, costs within ``_TIE_S`` are equal, and among equals the least
recently granted pair goes first, then the least recently granted workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.control.worker_entry import WorkerEntry

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.control.facts import Want
    from cluster.control.ledger import Ledger

_SPEED_NOISE = 0.15
_TIE_S = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A way to serve a request; LOCAL where ``prefill`` is None."""

    prefill: WorkerEntry | None
    decode: WorkerEntry | None
    is_export: bool = False
    """Whether the prefill worker has computed the prompt already."""

    @property
    def workers(self) -> tuple[WorkerEntry, ...]:
        """The workers that it uses."""
        return tuple(entry for entry in (self.prefill, self.decode) if entry is not None)

    @property
    def pools(self) -> tuple[str, str] | None:
        """Their pools, where KV moves between two."""
        if self.prefill is None or self.decode is None:
            return None
        return (self.prefill.registration.pool, self.decode.registration.pool)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Their ids."""
        return tuple(entry.worker_id for entry in self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The cheapest route with room."""

    route: Route
    first_token_s: float
    reason: str
    is_fallback: bool = False
    """Whether a decode worker prefills because no prefill worker can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Speeds:
    step_base_s: float
    step_per_seq_s: float
    prefill_per_token_s: float


class CostModel:
    """Prices routes by the reports and the link estimates of a ledger."""

    def __init__(self, ledger: Ledger, expected_output_tokens: float) -> None:
        self._ledger = ledger
        self.expected_output_tokens = expected_output_tokens

    def transfer_bytes(self, route: Route, want: Want) -> int:
        """Bytes of KV that the route moves."""
        if route.prefill is None or route.decode is None:
            return 0
        return route.prefill.blocks_for(want.num_prompt_tokens) * route.prefill.block_bytes

    def note_output(self, num_output_tokens: int) -> None:
        """Learn how long outputs are."""
        if num_output_tokens > 0:
            self.expected_output_tokens += 0.1 * (num_output_tokens - self.expected_output_tokens)

    def cheapest(self, routes: list[Route], want: Want, now: float) -> Choice:
        """Return the route of lowest cost; ``routes`` is not empty."""
        speeds = {e.worker_id: self._speeds(e) for route in routes for e in route.workers}
        priced = [(self._cost(route, want, speeds, now), route) for route in routes]
        lowest = min(total for (total, _), _ in priced)
        equal = [item for item in priced if item[0][0] <= lowest + _TIE_S]
        (total, first_token_s), route = min(equal, key=lambda item: self._recency(item[1]))
        tie = f", longest idle of {len(equal)} equal" if len(equal) > 1 else ""
        reason = f"{_kind(route)}: lowest cost {total:.3f} s of {len(routes)}{tie}"
        return Choice(route=route, first_token_s=first_token_s, reason=reason)

    def _cost(
        self, route: Route, want: Want, speeds: dict[str, _Speeds], now: float
    ) -> tuple[float, float]:
        """Return (cost, its share up to the first token), in seconds."""
        total = first_token_s = 0.0
        computing = route.prefill or route.decode
        assert computing is not None
        if not route.is_export:
            per_token_s = speeds[computing.worker_id].prefill_per_token_s
            first_token_s = (computing.run_ahead_tokens + want.num_prompt_tokens) * per_token_s
            total = first_token_s
        if route.prefill is not None and route.decode is not None:
            total += self._ledger.links.predict_s(
                (route.prefill.worker_id, route.decode.worker_id),
                (route.prefill.registration.pool, route.decode.registration.pool),
                self.transfer_bytes(route, want),
                now,
            )
        if route.decode is not None:
            total += self._decode_s(route.decode, want, speeds[route.decode.worker_id])
        return total, first_token_s

    def _decode_s(self, entry: WorkerEntry, want: Want, speeds: _Speeds) -> float:
        """Wait for the step under way, then decode with this sequence added."""
        num_seqs = entry.num_slots_used
        step_s = speeds.step_base_s + speeds.step_per_seq_s * num_seqs
        wait_s = step_s if num_seqs > 0 else 0.0
        num_tokens = min(float(want.max_tokens), self.expected_output_tokens)
        return wait_s + num_tokens * (step_s + speeds.step_per_seq_s)

    def _recency(self, route: Route) -> tuple[int, int, int]:
        orders = [entry.last_granted for entry in route.workers]
        return (self._ledger.last_granted(route.worker_ids), max(orders), sum(orders))

    def _speeds(self, entry: WorkerEntry) -> _Speeds:
        mates = [
            mate
            for mate in self._ledger.workers.values()
            if mate.registration.pool == entry.registration.pool
        ]
        return _Speeds(
            step_base_s=_level(entry, mates, _step_base_s),
            step_per_seq_s=_level(entry, mates, _step_per_seq_s),
            prefill_per_token_s=_level(entry, mates, _prefill_per_token_s),
        )


def _kind(route: Route) -> str:
    if route.is_export:
        return "export"
    if route.prefill is None:
        return "local"
    return "pair" if route.decode is not None else "prefill only"


def _level(
    entry: WorkerEntry, mates: list[WorkerEntry], read: Callable[[WorkerEntry], float]
) -> float:
    """Return the worker's own value, or the pool's mean where it is unknown or about the same."""
    known = [value for value in map(read, mates) if value > 0.0]
    if not known:
        return 0.0
    mean, own = sum(known) / len(known), read(entry)
    return mean if own <= 0.0 or abs(own - mean) <= _SPEED_NOISE * mean else own


def _step_base_s(entry: WorkerEntry) -> float:
    return entry.report.step_base_s or entry.registration.step_base_s


def _step_per_seq_s(entry: WorkerEntry) -> float:
    return entry.report.step_per_seq_s or entry.registration.step_per_seq_s


def _prefill_per_token_s(entry: WorkerEntry) -> float:
    return entry.report.prefill_per_token_s or entry.registration.prefill_per_token_s
