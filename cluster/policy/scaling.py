"""How many workers each pool should have: loads and ``now`` in, targets out; no I/O, no clock.

Each look goes by the sums of a role's pools, mixed ones counted for both:

    up      at once, where what is asked is over ``_FULL`` of what the targets could do: the pool
            with the lowest cost for what a worker of it adds first, then the next
    down    where the remaining ones could do the most that was asked within the last ``quiet_s``
            at ``_LOOSE`` of their capacity, for both roles of a mixed pool, and nobody was asked
            for meanwhile, whatever workers have come to show: the dearest first

Between the two shares nothing moves, and after a step down what is asked has to grow by a third
before a step up: a load that stands still settles, one that comes and goes faster than ``quiet_s``
keeps what its peaks need. Prefill is decided first, since decoding can be asked for no more than
prompts are computed; prefill itself for no more than decoding has places for, with all workers that
may still come to it.

Workers that were asked for count before they are there. One that was there and is gone doesn't,
until the next has come in its place: what waits meanwhile is work for those that are left.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    """What a pool should have and has, and since when that is so."""

    target: int
    num_workers: float
    num_lost: float
    """Of those that are missing: they were there, and nobody has come in their place yet."""
    since: float

    @property
    def num_starting(self) -> float:
        """Of those that are missing: they were asked for, and have not been there yet."""
        return max(0.0, self.target - self.num_workers - self.num_lost)

    def lost_by(self, target: int, num_workers: float) -> float:
        """Return how many are lost once this pool should have and has so many."""
        num_gone = self.num_lost + self.num_workers - num_workers
        return max(0.0, min(num_gone, target - num_workers))


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
        self._grew: dict[Role, float] = {}
        """When workers were last asked for, by half; at first, when this began."""

    def decide(self, load: Load, targets: Counts, now: float) -> Decision:
        """Return the targets from now on; ``targets`` are those that hold, by pool."""
        self._grew = self._grew or dict.fromkeys(HALVES, now)
        self._capacities.learn(load)
        held = {p.name: _bounded(p, targets.get(p.name, p.min_count)) for p in self._pools}
        self._note_standings(load, held, now)
        counts, peaks = dict(held), dict.fromkeys(HALVES, 0.0)
        reasons: dict[str, str] = {}
        for half in HALVES:
            asked = self._asked(half, load, counts, now)
            peaks[half] = self._peaks[half].add(asked, now)
            if grown := self._grow(half, asked, counts, now):
                self._grew[half] = now
                reasons |= grown
        if not reasons:
            reasons = self._shrink(peaks, counts, now)
        scaled = {pool.name: counts[pool.name] for pool in self._pools if pool.is_scaled}
        return Decision(targets=scaled, reasons=reasons)

    # ---- what is asked

    def _asked(self, half: Role, load: Load, counts: Counts, now: float) -> float:
        if half is Role.PREFILL:
            return self._asked_of_prefill(load, now)
        num_there, num_coming = demand.sequences(self._pools, load)
        inflow = demand.Inflow(
            ttft_s=self._scaling.ttft_target_s,
            prompt_tokens_per_s=self._capacity(Role.PREFILL, counts, now),
            residence_s=self._residence_s(load),
        )
        left, _ = demand.prefill_backlog(self._pools, load)
        return num_there + inflow.joining(num_coming, left)

    def _asked_of_prefill(self, load: Load, now: float) -> float:
        ttft_s, most = self._scaling.ttft_target_s, {p.name: p.max_count for p in self._pools}
        num_there, num_coming = demand.sequences(self._pools, load)
        places = demand.Places(
            capacity=self._capacity(Role.DECODE, most, now),
            num_taken=num_there + num_coming - load.num_waiting,
            # Who ends with his first token, which prefill draws, needs no place.
            residence_s=max(0.0, load.expected_output_tokens - 1.0) * self._step_s(),
        )
        admitted = places.admitted(load.num_waiting, ttft_s)
        left, behind = demand.prefill_backlog(self._pools, load, admitted)
        computed = {
            pool.name: load.pool(pool.name).computed_tokens
            for pool in self._pools
            if serves(pool, Role.PREFILL)
        }
        came = self._arrivals.add(computed, left, now)
        return came if self._is_starting(Role.PREFILL, now) else came + behind / ttft_s

    def _residence_s(self, load: Load) -> float:
        return load.expected_output_tokens * self._step_s()

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
                self._standings[name] = _Standing(
                    target=target,
                    num_workers=num_workers,
                    num_lost=old.lost_by(target, num_workers) if old else 0.0,
                    since=now,
                )

    def _is_late(self, name: str, now: float) -> bool:
        """Whether workers of a pool should have been there by now."""
        standing = self._standings[name]
        is_short = standing.num_workers < standing.target
        return is_short and now - standing.since >= self._scaling.start_s

    def _is_starting(self, half: Role, now: float) -> bool:
        return any(
            self._standings[pool.name].num_starting > 0 and not self._is_late(pool.name, now)
            for pool in self._pools
            if serves(pool, half)
        )

    def _capacity(self, half: Role, counts: Counts, now: float) -> float:
        return sum(
            self._counted(pool, counts, now) * self._capacities.of(pool, half)
            for pool in self._pools
        )

    def _counted(self, pool: PoolConfig, counts: Counts, now: float) -> float:
        """Return how many of a pool's workers capacity is made of."""
        count, standing = float(counts[pool.name]), self._standings[pool.name]
        if self._is_late(pool.name, now):
            return min(count, standing.num_workers)
        left = min(count, standing.target - standing.num_lost)
        return left + max(0.0, count - standing.target)

    def _parts(self, half: Role, counts: Counts, now: float) -> str:
        """Say what a role's capacity is the sum of, and what bounds each pool's."""
        return ", ".join(
            f"{pool.name} {count:.0f} x {capacity:.0f} {self._capacities.why(pool, half)}"
            for pool in self._pools
            if (count := self._counted(pool, counts, now))
            and (capacity := self._capacities.of(pool, half))
        )

    # ---- what to do

    def _grow(self, half: Role, asked: float, counts: dict[str, int], now: float) -> dict[str, str]:
        could, parts = self._capacity(half, counts, now), self._parts(half, counts, now)
        reasons = {}
        for pool in self._by_cost(half):
            while (
                self._capacity(half, counts, now) * _FULL < asked
                and counts[pool.name] < pool.max_count
                and not self._is_late(pool.name, now)
            ):
                counts[pool.name] += 1
                reasons[pool.name] = (
                    f"{half.value} is asked for {asked:.1f} {_UNITS[half]} of {could:.1f}: {parts}"
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
            now - self._grew[half] >= self._scaling.quiet_s
            and self._capacity(half, fewer, now) * _LOOSE >= peaks[half]
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
