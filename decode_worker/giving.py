"""Reservations of a decode worker that a request of a higher tier may have.

    reserved ─────────▶ may be asked ──leave──▶ committed (its sequence gives from now on), or over
                             └──asked──▶ ``give_way``: refused, so that its KV stays where it is

Asked is a reservation whether bytes are under way to it or not: its prompt may still be computed
for long, and bytes that come late are thrown away, as after every abort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.kv.outside import Outsider

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.handoff import Handoff
    from cluster.kv.block_pool import BlockPool
    from cluster.rpc.errands import Errands
    from cluster.rpc.legs import OpenLeg
    from decode_worker.reservations import Import


class GivingImports:
    """Tells the pool whose reservations may be asked for; event loop only."""

    def __init__(
        self,
        pool: BlockPool,
        errands: Errands,
        give_way: Callable[[Import, OpenLeg], None],
        *,
        gives: bool,
    ) -> None:
        """``give_way`` ends an import that is asked for; without ``gives`` none is."""
        self._pool = pool
        self._errands = errands
        self._give_way = give_way
        self._gives = gives
        self._imports: dict[tuple[str, str], Import] = {}
        pool.subscribe(self._on_told)

    def reserve(self, entry: Import, handoff: Handoff, num_blocks: int) -> bool:
        """Reserve so many blocks for one, which may be asked for them from now on.

        False where they are not there, beside those that others give for a higher tier.
        """
        pool = self._pool
        if num_blocks + pool.outside.kept_from(entry.tier) > pool.num_free:
            return False
        if pool.reserve(num_blocks, handoff.handoff_id, handoff.key) is None:
            return False
        self._enter(entry)
        return True

    def preempted(self, entry: Import, num_preemptions: int) -> None:
        """Note how often the choice of one that has blocks was preempted in all: it may give no
        more."""
        assert entry.opened is not None, "joined before it has blocks"
        if num_preemptions > entry.opened.leg.num_preemptions:
            entry.opened.preempted(num_preemptions)
            self._enter(entry)

    def leave(self, entry: Import) -> None:
        """Let it be asked no more; nothing happens where it has no blocks."""
        if self._imports.pop(_holder(entry), None) is not None:
            self._pool.outside.leave(_holder(entry))

    def give(self) -> None:
        """End the imports that the engine asks for; what others are asked is theirs to do."""
        asked = [self._imports.get(holder) for holder in self._pool.outside.asked()]
        for entry in asked:
            if entry is not None and entry.opened is not None:
                self._give_way(entry, entry.opened)

    def _enter(self, entry: Import) -> None:
        if not self._gives:
            return
        assert entry.opened is not None, "joined before it has blocks"
        holder = _holder(entry)
        self._imports[holder] = entry
        self._pool.outside.enter(
            Outsider(
                holder=holder,
                tier=entry.tier,
                arrived=entry.opened.arrived,
                num_preemptions=entry.opened.leg.num_preemptions,
                num_importing=len(self._pool.importing(entry.handoff_id) or ()),
            )
        )

    def _on_told(self) -> None:
        # On whichever thread changed something in the pool.
        if self._imports and self._pool.outside.asked():
            self._errands.soon(self.give)


def _holder(entry: Import) -> tuple[str, str]:
    return ("import", entry.handoff_id)
