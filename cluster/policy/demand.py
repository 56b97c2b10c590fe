"""What is asked of each role now, what was asked of it lately, and what one worker can do.

    prefill, in tokens a second = prompt tokens that came + tokens that wait behind others / target
    decode, in sequences        = there + those to come, as fast as they can

The first says that whoever waits is computed within the TTFT target beside what comes meanwhile.
While workers are still starting only what comes counts: what waits because of that is not load.
Neither half is asked for what the other cannot give it: requests that find no place to decode in,
not even with all workers that may come, are no work for prefill; prompts that nobody computes are
none for decoding.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.config import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cluster.config import DeployConfig, PoolConfig
    from cluster.policy.load import Load

HALVES = (Role.PREFILL, Role.DECODE)
"""What capacity is summed by; a mixed pool has some of both."""

_RATE_WINDOW_S = 10.0
"""Over so long tokens are counted for their rate; before the first look none came."""
_LEARNS = 0.4
"""Weight of one more reading in a speed."""
_MIXED_SHARE = 0.5
"""Of a mixed worker's time, for each half; its memory is shared as it comes."""


def serves(pool: PoolConfig, half: Role) -> bool:
    """Whether a pool's workers run this half."""
    return pool.role in (half, Role.MIXED)


class Peak:
    """The highest of the values seen within a window, however many there were."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._falling: deque[tuple[float, float]] = deque()

    def add(self, value: float, now: float) -> float:
        """Take one in; returns the highest of the window."""
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((now, value))
        while now - self._falling[0][0] > self._window_s:
            self._falling.popleft()
        return self._falling[0][1]


class ArrivalRate:
    """Prompt tokens a second: those that were computed, and those by which what waits has grown."""

    def __init__(self) -> None:
        self._computed: dict[str, float] = {}
        self._total = 0.0
        self._seen: deque[tuple[float, float]] = deque()

    def add(self, computed: Mapping[str, float], waiting_tokens: float, now: float) -> float:
        """Take in each pool's count and what waits anywhere; returns the rate."""
        for name, count in computed.items():
            known = self._computed.get(name, count)
            # It falls where a worker leaves: what that one had computed was counted before.
            self._total += max(0.0, count - known)
        self._computed = dict(computed)
        self._seen.append((now, self._total + waiting_tokens))
        while now - self._seen[0][0] > _RATE_WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        return max(0.0, (after - before) / max(last - first, _RATE_WINDOW_S))


@dataclass(frozen=True, slots=True)
class _Speed:
    prefill_token_s: float
    step_base_s: float
    step_per_seq_s: float


class Capacities:
    """What one worker of each pool can do, by what its workers have shown or the file declares."""

    def __init__(self, config: DeployConfig) -> None:
        self._pools = config.pools
        self._tpot_s = config.scaling.tpot_target_s
        self._speeds: dict[str, _Speed] = {}
        self._sequence_tokens = 0.0

    def learn(self, load: Load) -> None:
        """Take in what the workers show now; what a pool has shown is kept while it is empty."""
        num_sequences = held_tokens = 0.0
        for pool in self._pools:
            now = load.pool(pool.name)
            if serves(pool, Role.DECODE):
                num_sequences += now.num_sequences + now.num_coming
                held_tokens += now.held_tokens
            if not now.num_workers:
                continue
            old = self._speeds.get(pool.name)
            self._speeds[pool.name] = _Speed(
                _learned(old.prefill_token_s if old else 0.0, now.prefill_token_s),
                _learned(old.step_base_s if old else 0.0, now.step_base_s),
                _learned(old.step_per_seq_s if old else 0.0, now.step_per_seq_s),
            )
        if num_sequences:
            self._sequence_tokens = _learned(self._sequence_tokens, held_tokens / num_sequences)

    def of(self, pool: PoolConfig, half: Role) -> float:
        """Return what one worker adds: prompt tokens a second, or sequences; 0 where unknown."""
        if not serves(pool, half):
            return 0.0
        return self._prefill(pool) if half is Role.PREFILL else self._decode(pool)

    def why(self, pool: PoolConfig, half: Role) -> str:
        """Return in words what decides how much one worker adds."""
        if half is Role.DECODE:
            bounds = self._seats(pool)
            return min(bounds, key=bounds.__getitem__)
        if self._shown_rate(pool):
            return "as measured"
        return "as declared" if pool.prefill_tokens_per_s else "as others do"

    def step_s(self, pool: PoolConfig) -> float:
        """Return how long a step of a full worker takes; 0 where unknown."""
        speed = self._speeds.get(pool.name)
        if speed is None:
            return 0.0
        return speed.step_base_s + self._decode(pool) * speed.step_per_seq_s

    def _prefill(self, pool: PoolConfig) -> float:
        own = _share(pool) * self._prefill_rate(pool)
        if own:
            return own
        known = [
            rate
            for other in self._pools
            if serves(other, Role.PREFILL) and (rate := self._prefill_rate(other))
        ]
        return _share(pool) * sum(known) / len(known) if known else 0.0

    def _prefill_rate(self, pool: PoolConfig) -> float:
        return self._shown_rate(pool) or pool.prefill_tokens_per_s

    def _shown_rate(self, pool: PoolConfig) -> float:
        speed = self._speeds.get(pool.name)
        if speed is None or speed.prefill_token_s <= 0.0:
            return 0.0
        return 1.0 / speed.prefill_token_s

    def _decode(self, pool: PoolConfig) -> float:
        return max(1.0, min(self._seats(pool).values()))

    def _seats(self, pool: PoolConfig) -> dict[str, float]:
        """Return how many sequences each of a worker's bounds lets in, by its name in words."""
        seats = {"by slots": float(pool.num_batch_slots)}
        if self._sequence_tokens:
            name = f"by KV, {self._sequence_tokens:.0f} tokens each"
            seats[name] = math.floor(pool.kv_tokens / self._sequence_tokens)
        seats[f"by steps of {self._tpot_s * 1e3:.0f} ms"] = self._within_tpot(pool)
        return seats

    def _within_tpot(self, pool: PoolConfig) -> float:
        """Return how many sequences share a step that keeps the target; if none can, any number:
        more workers would not help."""
        speed = self._speeds.get(pool.name)
        if not self._tpot_s or speed is None:
            return math.inf
        for_sequences_s = _share(pool) * self._tpot_s - speed.step_base_s
        if for_sequences_s <= 0.0 or speed.step_per_seq_s <= 0.0:
            return math.inf
        return math.floor(for_sequences_s / speed.step_per_seq_s)


def prefill_backlog(
    pools: Iterable[PoolConfig], load: Load, admitted: float = 1.0
) -> tuple[float, float]:
    """Return the prompt tokens that are not computed yet, and those of them behind others.

    Of requests that have no worker yet the ``admitted`` share counts.
    """
    loads = [load.pool(pool.name) for pool in pools if serves(pool, Role.PREFILL)]
    waiting = admitted * load.waiting_tokens
    left = waiting + sum(pool.queued_tokens for pool in loads)
    return left, waiting + sum(pool.behind_tokens for pool in loads)


def sequences(pools: Iterable[PoolConfig], load: Load) -> tuple[float, float]:
    """Return how many sequences decode workers have, and how many are still to come to any."""
    loads = [load.pool(pool.name) for pool in pools if serves(pool, Role.DECODE)]
    coming = load.num_waiting + sum(pool.num_coming for pool in loads)
    return sum(pool.num_sequences for pool in loads), coming


@dataclass(frozen=True, slots=True, kw_only=True)
class Inflow:
    """How fast sequences can come to decode workers; an unknown speed is 0, and limits nothing."""

    ttft_s: float
    """Within which all that are to come shall have come."""
    prompt_tokens_per_s: float
    """What all prefill workers compute."""
    residence_s: float
    """For how long each stays."""

    def joining(self, num_coming: float, num_tokens: float) -> float:
        """Return how many of those to come there has to be room for at once.

        ``num_tokens`` are left to compute of their prompts.
        """
        if not num_coming or not self.residence_s:
            return num_coming
        by_target = num_coming / self.ttft_s * self.residence_s
        if not self.prompt_tokens_per_s or not num_tokens:
            return min(num_coming, by_target)
        a_second = self.prompt_tokens_per_s * num_coming / num_tokens
        return min(num_coming, by_target, a_second * self.residence_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What decode workers have for sequences; an unknown residence, or none, limits nothing."""

    capacity: float
    """Sequences that all of them hold."""
    num_taken: float
    """Of those, by sequences that are there or have been given one."""
    residence_s: float
    """For how long each stays."""

    def admitted(self, num_waiting: float, within_s: float) -> float:
        """Return the share of those that wait that finds a place within this time: one that is
        free now, or that is free again, however often."""
        if not num_waiting or not self.residence_s:
            return 1.0
        num_ending = self.capacity * within_s / self.residence_s
        num_free = max(0.0, self.capacity - self.num_taken)
        return min(1.0, (num_free + num_ending) / num_waiting)


def _learned(old: float, new: float) -> float:
    if new <= 0.0:
        return old
    return new if old <= 0.0 else old + _LEARNS * (new - old)


def _share(pool: PoolConfig) -> float:
    return _MIXED_SHARE if pool.role is Role.MIXED else 1.0
