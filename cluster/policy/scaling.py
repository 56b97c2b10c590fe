"""How many workers each pool should have: loads and ``now`` in, targets out; no I/O, no clock.

Each look goes by the sums of a role's pools, mixed ones counted for both:

    up      at once, where what is asked is over ``_FULL`` of what the targets could do: the pool
            with the lowest cost for what a worker of it adds first, then the next
    down    where the remaining ones could do the most that was asked within the last ``quiet_s``
            at ``_LOOSE`` of their capacity, for both roles of a mixed pool: the dearest first

Between the two shares nothing moves, and after a step down what is asked has to grow by a third
before a step up: a load that stands still settles, one that comes and goes faster than ``quiet_s``
keeps what its peaks need. Prefill is decided first, since decoding can be asked for no more than
prompts are computed.

A pool whose workers don't come within ``start_s`` counts with those that are there, and is asked
for no more: another one is taken, however dear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.config import Role
from cluster.policy import demand
from cluster.policy.demand import HALVES, ArrivalRate, Capacities, Peak, serves

if TYPE_CHECKING:
    from cluster.config import DeployConfig, PoolConfig
    from cluster.policy.load import Load

_FULL = 0.8
"""Of a role's capacity: more asks for another worker."""
_LOOSE = 0.6
"""Of what would remain: less lets a worker go."""
_UNITS = {Role.PREFILL: "prompt tokens/s", Role.DECODE: "sequences"}

Counts = Mapping[str, int]
"""Workers by pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The targets of all pools that are scaled, and why those changed that did."""

    targets: Counts
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Standing:
    """What a pool should have and has, and since when that is so."""

    target: int
    num_workers: float
    since: float


class Scaler:
    """Remembers what was asked within ``quiet_s``, what workers have shown, and who is starting.

    One that has just begun remembers nothing, and so takes nobody away for ``quiet_s``.
    """

    def __init__(self, config: DeployConfig) -> None:
        self._pools = config.pools
        self._scaling = config.scaling
        self._capacities = Capacities(config)
        self._arrivals = ArrivalRate()
        self._peaks = {half: Peak(config.scaling.quiet_s) for half in HALVES}
        self._standings: dict[str, _Standing] = {}
        self._began: float | None = None

    def decide(self, load: Load, targets: Counts, now: float) -> Decision:
        """Return the targets from now on; ``targets`` are those that hold, by pool."""
        self._began = now if self._began is None else self._began
        self._capacities.learn(load)
        held = {p.name: _bounded(p, targets.get(p.name, p.min_count)) for p in self._pools}
        self._note_standings(load, held, now)
        counts, peaks = dict(held), dict.fromkeys(HALVES, 0.0)
        reasons: dict[str, str] = {}
        for half in HALVES:
            asked = self._asked(half, load, counts, now)
            peaks[half] = self._peaks[half].add(asked, now)
            reasons |= self._grow(half, asked, counts, now)
        if not reasons and now - self._began >= self._scaling.quiet_s:
            reasons = self._shrink(peaks, counts, now)
        scaled = {pool.name: counts[pool.name] for pool in self._pools if pool.is_scaled}
        return Decision(targets=scaled, reasons=reasons)

    # ---- what is asked

    def _asked(self, half: Role, load: Load, counts: Counts, now: float) -> float:
        ttft_s = self._scaling.ttft_target_s
        left, behind = demand.prefill_backlog(self._pools, load)
        if half is Role.PREFILL:
            computed = {
                pool.name: load.pool(pool.name).computed_tokens
                for pool in self._pools
                if serves(pool, Role.PREFILL)
            }
            came = self._arrivals.add(computed, left, now)
            return came if self._is_starting(half, now) else came + behind / ttft_s
        num_there, num_coming = demand.sequences(self._pools, load)
        inflow = demand.Inflow(
            ttft_s=ttft_s,
            prompt_tokens_per_s=self._capacity(Role.PREFILL, counts, now),
            residence_s=load.expected_output_tokens * self._step_s(),
        )
        return num_there + inflow.joining(num_coming, left)

    def _step_s(self) -> float:
        """Return how long a step takes where workers are full; the target where nobody knows."""
        known = [
            step_s
            for pool in self._pools
            if serves(pool, Role.DECODE) and (step_s := self._capacities.step_s(pool))
        ]
        return sum(known) / len(known) if known else self._scaling.tpot_target_s

    # ---- what is there

    def _note_standings(self, load: Load, held: Counts, now: float) -> None:
        for name, target in held.items():
            num_workers, old = load.pool(name).num_workers, self._standings.get(name)
            if old is None or (old.target, old.num_workers) != (target, num_workers):
                self._standings[name] = _Standing(target, num_workers, now)

    def _is_late(self, name: str, now: float) -> bool:
        """Whether workers of a pool should have been there by now."""
        standing = self._standings[name]
        is_short = standing.num_workers < standing.target
        return is_short and now - standing.since >= self._scaling.start_s

    def _is_starting(self, half: Role, now: float) -> bool:
        return any(
            standing.num_workers < standing.target and not self._is_late(pool.name, now)
            for pool in self._pools
            if serves(pool, half) and (standing := self._standings[pool.name])
        )

    def _capacity(self, half: Role, counts: Counts, now: float) -> float:
        total = 0.0
        for pool in self._pools:
            count = float(counts[pool.name])
            if self._is_late(pool.name, now):
                count = min(count, self._standings[pool.name].num_workers)
            total += count * self._capacities.of(pool, half)
        return total

    # ---- what to do

    def _grow(self, half: Role, asked: float, counts: dict[str, int], now: float) -> dict[str, str]:
        could, reasons = self._capacity(half, counts, now), {}
        for pool in self._by_cost(half):
            while (
                self._capacity(half, counts, now) * _FULL < asked
                and counts[pool.name] < pool.max_count
                and not self._is_late(pool.name, now)
            ):
                counts[pool.name] += 1
                reasons[pool.name] = (
                    f"{half.value} is asked for {asked:.1f} {_UNITS[half]} of {could:.1f}"
                )
        return reasons

    def _shrink(
        self, peaks: Mapping[Role, float], counts: dict[str, int], now: float
    ) -> dict[str, str]:
        reasons = {}
        for half in HALVES:
            for pool in reversed(self._by_cost(half)):
                while counts[pool.name] > pool.min_count and self._can_spare(
                    pool, peaks, counts, now
                ):
                    counts[pool.name] -= 1
                    reasons[pool.name] = (
                        f"{half.value} was asked for {peaks[half]:.1f} {_UNITS[half]} at most "
                        f"within {self._scaling.quiet_s:g} s"
                    )
        return reasons

    def _can_spare(
        self, pool: PoolConfig, peaks: Mapping[Role, float], counts: Counts, now: float
    ) -> bool:
        fewer = {**counts, pool.name: counts[pool.name] - 1}
        return all(
            self._capacity(half, fewer, now) * _LOOSE >= peaks[half]
            for half in HALVES
            if serves(pool, half)
        )

    def _by_cost(self, half: Role) -> list[PoolConfig]:
        """Return the pools of a role of which anything is known, the cheapest capacity first."""
        known = [pool for pool in self._pools if self._capacities.of(pool, half) > 0.0]
        return sorted(known, key=lambda pool: self._price(pool, half))

    def _price(self, pool: PoolConfig, half: Role) -> tuple[float, float]:
        """Cost for what one worker adds; where nothing costs anything the larger one is first.

        Half of a mixed worker's cost is for the other half.
        """
        capacity = self._capacities.of(pool, half)
        cost = pool.cost_per_hour * (0.5 if pool.role is Role.MIXED else 1.0)
        return cost / capacity, -capacity


def _bounded(pool: PoolConfig, count: int) -> int:
    return max(pool.min_count, min(pool.max_count, count))
