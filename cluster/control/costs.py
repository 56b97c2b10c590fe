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

from typing import TYPE_CHECKING, NamedTuple

from cluster.control.speeds import Speed, SpeedTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.control.facts import Want
    from cluster.control.ledger import Ledger
    from cluster.control.worker_entry import WorkerEntry

_SPEED_AGE_S = 60.0
"""What a worker showed of its speed counts for nothing after so long without a step."""
_TIE_S = 2e-3
_ALL_BUT_FULL = 0.99
"""What is fuller than this counts as this: it still has a price."""


class Route(NamedTuple):
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
    def pools(self) -> tuple[str, str] | None:
        """Their pools, where KV moves between two."""
        if self.prefill is None or self.decode is None:
            return None
        return (self.prefill.registration.pool, self.decode.registration.pool)


class Choice(NamedTuple):
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
        num_tokens = min(float(want.max_tokens), self.expected_output_tokens)
        # Each worker is in many routes, and priced once.
        firsts: dict[str, float] = {}
        decodes: dict[str, float] = {}
        transfer_s, totals = self._ledger.links.predict_s, []
        for prefill, decode, is_export in routes:
            total, first = 0.0, prefill or decode
            if not is_export and first is not None:
                if first.worker_id not in firsts:
                    firsts[first.worker_id] = self.prompt_s(first, want)
                total = firsts[first.worker_id]
            if decode is not None:
                if decode.worker_id not in decodes:
                    decodes[decode.worker_id] = self.decode_s(decode, num_tokens)
                total += decodes[decode.worker_id]
                if prefill is not None:
                    pair = (prefill.worker_id, decode.worker_id)
                    pools = (prefill.placed.pool, decode.placed.pool)
                    num_blocks = prefill.blocks_for(want.num_prompt_tokens)
                    total += transfer_s(pair, pools, num_blocks * prefill.block_bytes, now)
            totals.append(total)
        most = min(totals) + _TIE_S
        equal = [i for i, total in enumerate(totals) if total <= most]
        chosen = equal[0] if len(equal) == 1 else min(equal, key=self._recency_of(routes))
        total, route = totals[chosen], routes[chosen]
        tie = f", longest idle of {len(equal)} equal" if len(equal) > 1 else ""
        reason = f"{_kind(route)}: lowest cost {total:.3f} s of {len(routes)}{tie}"
        first_token_s = 0.0 if route.is_export else firsts[route.workers[0].worker_id]
        return Choice(route=route, first_token_s=first_token_s, reason=reason, cost_s=total)

    def prompt_s(self, entry: WorkerEntry, want: Want) -> float:
        """Wait for the prompts before a want's, then compute what is not cached."""
        num_ahead, num_cached = entry.run_ahead_tokens, self.num_cached_tokens(entry, want)
        if num_cached and entry.placed.incarnation == want.cached_on:
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
        most, registration = want.num_prompt_tokens - 1, entry.registration
        if not want.cached_on or registration.incarnation != want.cached_on:
            known = self._ledger.prefixes.holders(want.prefix).get(entry.worker_id)
            if known is None:
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

    def _recency_of(self, routes: list[Route]) -> Callable[[int], tuple[int, ...]]:
        def recency(index: int) -> tuple[int, ...]:
            workers = routes[index].workers
            ids, orders = [e.worker_id for e in workers], [e.last_granted for e in workers]
            return (self._ledger.last_granted(tuple(ids)), max(orders), sum(orders))

        return recency


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
