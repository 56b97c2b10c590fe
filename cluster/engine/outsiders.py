"""Who gives up blocks that are held outside the engine, when a higher tier may take them.

They are exports and imports. The engine's own victims and they are chosen from together
(``victims``), by one rule: the lowest tier's youngest. What they give comes a moment after the
step's plan was made, so those chosen are asked once it is made, all at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from cluster.engine.rules import Rules
    from cluster.kv.block_pool import BlockPool
    from cluster.kv.outside import Demand, Outsider


class Outsiders:
    """Those outside one engine; on its step thread, or to be counted on another."""

    def __init__(self, pool: BlockPool, rules: Rules) -> None:
        self._pool = pool
        self._rules = rules
        pool.outside.has_takers = rules.takes_from_below
        self._chosen: dict[tuple[str, str], None] = {}
        self._demand: Demand | None = None
        self.num_waits = 0
        """How often somebody was to wait for blocks that come from outside."""

    @property
    def are_coming(self) -> bool:
        """Whether blocks are to come from outside, in the plan that is being made."""
        return self._demand is not None

    @property
    def num_coming(self) -> int:
        """Blocks that were given up already, and are free once no byte reaches them any more."""
        return self._pool.counts().fenced if self._rules.takes_from_below else 0

    def below(self, tier: int, now: float) -> list[Outsider]:
        """Return those of lower tiers who give way: they haven't aged, nor given way too often."""
        has_aged, is_spared = self._rules.ordering.has_aged, self._rules.needs_all
        return [
            outsider
            for outsider in self._pool.outside.below(tier)
            if not (is_spared(outsider.num_preemptions) or has_aged(outsider.arrived, now))
        ]

    def giving(self, now: float) -> list[Outsider]:
        """Return those who give way to any tier."""
        return self.below(len(self._rules.tiers.names), now)

    def choose(self, outsiders: Collection[Outsider], demand: Demand) -> None:
        """Have these asked for whom ``demand`` so many blocks have to be free; nobody where enough
        are coming already."""
        self.num_waits += 1
        self._chosen.update(dict.fromkeys(outsider.holder for outsider in outsiders))
        last = self._demand
        if last is None or (demand.tier, demand.num_blocks) > (last.tier, last.num_blocks):
            self._demand = demand

    def ask(self) -> None:
        """Ask those chosen since the last call, and nobody else any more."""
        chosen, self._chosen = self._chosen, {}
        demand, self._demand = self._demand, None
        self._pool.outside.ask(chosen, demand)
