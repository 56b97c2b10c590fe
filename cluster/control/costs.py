"""What a route costs, in predicted seconds, and which of several is taken.

    cost = wait at the prefill worker + predicted prefill + transfer
           + wait at the decode worker
           + expected output x its step time with this sequence x crowding

Crowding is what a place costs those who come later. It is 1 on an empty worker, and grows to many
as the last places or blocks go: so at a low load the fast workers have all of it, and near the
limit every worker is as full as the others, which is to say that its share of the tokens follows
its measured speed. By step times alone a fast worker is filled to its last block, and preempts,
while a slower one has room. The form is that of the wait in a queue before c servers (Sakasegawa,
"An approximation formula L_q = a p^b / (1 - p)", 1977), with the b of eight servers.

Neutral where nothing differs: a worker whose measured speed is near its pool's mean counts as the
mean (``speeds``), costs within ``_TIE_S`` are equal, and among equals the least recently granted
pair goes first, then the least recently granted workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.control.speeds import Speed, SpeedTable
from cluster.control.worker_entry import WorkerEntry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.control.facts import Want
    from cluster.control.ledger import Ledger

_SPEED_AGE_S = 60.0
"""What a worker showed of its speed counts for nothing after so long without a step."""
_TIE_S = 2e-3
_ALL_BUT_FULL = 0.99
"""What is fuller than this counts as this: it still has a price."""


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
        prefill, decode = self.prefill, self.decode
        if prefill is None:
            return () if decode is None else (decode,)
        return (prefill,) if decode is None else (prefill, decode)

    @property
    def computing(self) -> WorkerEntry:
        """Who prefills, or has."""
        worker = self.prefill or self.decode
        assert worker is not None, "a route has a worker"
        return worker

    @property
    def pools(self) -> tuple[str, str] | None:
        """Their pools, where KV moves between two."""
        if self.prefill is None or self.decode is None:
            return None
        return (self.prefill.registration.pool, self.decode.registration.pool)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Their ids."""
        return tuple([entry.worker_id for entry in self.workers])


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The cheapest route with room."""

    route: Route
    first_token_s: float
    reason: str
    cost_s: float
    why_local: str = ""
    """Why a decode worker prefills by itself (a ``Why`` value); empty where none does."""


class CostModel:
    """Prices routes by the reports and the link estimates of a ledger."""

    def __init__(
        self,
        ledger: Ledger,
        expected_output_tokens: float,
        caching_pools: frozenset[str] = frozenset(),
    ) -> None:
        """``caching_pools``: those with a prefix cache."""
        self._ledger = ledger
        self._caching_pools = caching_pools
        self.expected_output_tokens = expected_output_tokens
        self._speeds = SpeedTable(_SPEED_AGE_S)

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
        prefill_s = {e.worker_id: self.prompt_s(e, want) for e in _computing(routes)}
        num_tokens = min(float(want.max_tokens), self.expected_output_tokens)
        decode_s = {e.worker_id: self.decode_s(e, num_tokens) for e in _decoding(routes)}
        totals = []
        for route in routes:
            total = 0.0 if route.is_export else prefill_s[route.computing.worker_id]
            if route.decode is not None:
                total += decode_s[route.decode.worker_id]
                if route.prefill is not None:
                    total += self._transfer_s(route.prefill, route.decode, want, now)
            totals.append(total)
        lowest = min(totals)
        equal = [i for i, total in enumerate(totals) if total <= lowest + _TIE_S]
        chosen = min(equal, key=lambda i: self._recency(routes[i]))
        total, route = totals[chosen], routes[chosen]
        tie = f", longest idle of {len(equal)} equal" if len(equal) > 1 else ""
        reason = f"{_kind(route)}: lowest cost {total:.3f} s of {len(routes)}{tie}"
        first_token_s = 0.0 if route.is_export else prefill_s[route.computing.worker_id]
        return Choice(route=route, first_token_s=first_token_s, reason=reason, cost_s=total)

    def prompt_s(self, entry: WorkerEntry, want: Want) -> float:
        """Wait for the prompts before a want's, then compute what is not cached."""
        num_cached = self.num_cached_tokens(entry, want)
        num_ahead = entry.run_ahead_tokens
        if entry.registration.incarnation == want.cached_on:
            # It may still count among the prompts before it: the report is on its way.
            num_ahead = max(0, num_ahead - num_cached)
        num_left = num_ahead + want.num_prompt_tokens - num_cached
        return num_left * self._speeds.level(entry, Speed.PREFILL_PER_TOKEN)

    def prefill_s(self, entry: WorkerEntry, num_tokens: int) -> float:
        """Wait for the prompts before it, then compute them all."""
        num_left = entry.run_ahead_tokens + num_tokens
        return num_left * self._speeds.level(entry, Speed.PREFILL_PER_TOKEN)

    def decode_s(self, entry: WorkerEntry, num_tokens: float) -> float:
        """Wait for the step under way, then decode with this sequence added."""
        num_seqs = entry.num_slots_used
        per_seq_s = self._speeds.level(entry, Speed.STEP_PER_SEQ)
        step_s = self._speeds.level(entry, Speed.STEP_BASE) + per_seq_s * num_seqs
        wait_s = step_s if num_seqs > 0 else 0.0
        return wait_s + num_tokens * (step_s + per_seq_s) * _crowding(entry)

    def speeds(self, entry: WorkerEntry, num_seqs: int) -> tuple[float, float]:
        """Return its seconds for a prompt token, and for a step of so many sequences."""
        step_s = self._speeds.level(entry, Speed.STEP_BASE)
        step_s += num_seqs * self._speeds.level(entry, Speed.STEP_PER_SEQ)
        return self._speeds.level(entry, Speed.PREFILL_PER_TOKEN), step_s

    def learn_speeds(self, worker_id: str, entry: WorkerEntry | None) -> None:
        """Take in a worker's speeds as they are now; None: it is gone."""
        if entry is None:
            self._speeds.forget(worker_id)
        else:
            self._speeds.learn(entry)

    def num_cached_tokens(self, entry: WorkerEntry, want: Want) -> int:
        """Predict how much of a prompt a worker has: whole blocks, and never its last token, for a
        draw needs that one computed."""
        registration, most = entry.registration, want.num_prompt_tokens - 1
        if registration.incarnation != want.cached_on:
            known = self._ledger.prefixes.holders(want.prefix).get(registration.worker_id, 0)
            if not known:
                return 0
            most = min(most, known)
        if registration.pool not in self._caching_pools:
            return 0
        return max(0, most - most % registration.block_size)

    def learn_prompt(self, route: Route, want: Want) -> None:
        """Note which caches a prompt comes to by this route."""
        for entry in route.workers:
            registration = entry.registration
            if registration.pool in self._caching_pools:
                num_tokens = registration.num_blocks * registration.block_size
                self._ledger.prefixes.learn(entry.worker_id, num_tokens, want.prefix)

    def _transfer_s(
        self, prefill: WorkerEntry, decode: WorkerEntry, want: Want, now: float
    ) -> float:
        return self._ledger.links.predict_s(
            (prefill.worker_id, decode.worker_id),
            (prefill.registration.pool, decode.registration.pool),
            prefill.blocks_for(want.num_prompt_tokens) * prefill.block_bytes,
            now,
        )

    def _recency(self, route: Route) -> tuple[int, int, int]:
        orders = [entry.last_granted for entry in route.workers]
        return (self._ledger.last_granted(route.worker_ids), max(orders), sum(orders))


def _crowding(entry: WorkerEntry) -> float:
    registration = entry.registration
    slots = entry.num_slots_used / registration.num_slots
    blocks = 1.0 - entry.num_blocks_free / registration.num_blocks
    taken = min(max(slots, blocks), _ALL_BUT_FULL)
    return 1.0 + taken**3 / (1.0 - taken)


def _kind(route: Route) -> str:
    if route.is_export:
        return "export"
    if route.prefill is None:
        return "local"
    return "pair" if route.decode is not None else "prefill only"


def _computing(routes: list[Route]) -> Iterable[WorkerEntry]:
    return {r.computing.worker_id: r.computing for r in routes if not r.is_export}.values()


def _decoding(routes: list[Route]) -> Iterable[WorkerEntry]:
    return {r.decode.worker_id: r.decode for r in routes if r.decode is not None}.values()
