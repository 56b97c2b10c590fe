"""What a worker looks after by itself: deadlines outside the engine, a stuck step, its own books.

A tick that fails, a step thread that is stuck and blocks that are not in exactly one place all end
in the worker's fault: its process is replaced, instead of going on with legs that hang.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cluster.errors import EngineFault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cluster.clock import Clock
    from cluster.engine.loop import EngineLoop
    from cluster.kv.block_pool import BlockPool
    from decode_worker.streams import DecodeHalf
    from prefill_worker.intake import PrefillHalf

TICK_S = 0.1
"""How late a deadline outside the engine may be noticed."""
_GAP_S = 1.0
"""After a longer gap between two ticks the whole process had been stopped, not a step."""
_IDLE_S = 1.0
"""Without legs for so long, the pool is checked; the first leg after a pause shall not wait."""
_LEAK_S = 60.0
"""Without legs for so long, and with nothing under way over a link, nobody holds blocks."""


class WorkerWatch:
    """Looks after one worker; event loop only."""

    def __init__(
        self,
        *,
        clock: Clock,
        engine: EngineLoop,
        pool: BlockPool,
        halves: Sequence[PrefillHalf | DecodeHalf],
        are_links_moving: Callable[[], bool],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        """``are_links_moving``: what was announced goes on moving when its leg is over."""
        self._clock = clock
        self._engine = engine
        self._pool = pool
        self._halves = halves
        self._are_links_moving = are_links_moving
        self._on_fault = on_fault
        self._ticked_at = self._awake_since = clock.now()
        self.is_hanging = False
        """Whether a step takes longer than it may: nobody else gives it work."""
        self._idle_since = clock.now()
        self._num_legs = self._num_legs_checked = 0
        self.num_pool_checks = 0
        """Checks of the pool's books, those that failed included."""
        self.num_pool_faults = 0
        """Checks that failed; the first one ends the worker."""

    async def run(self) -> None:
        """Tick until cancelled, or until a tick fails."""
        try:
            while True:
                await asyncio.sleep(TICK_S)
                self.tick(self._clock.now())
        except Exception as error:
            self._on_fault(error)

    def tick(self, now: float) -> None:
        """Look at everything once."""
        if now - self._ticked_at > _GAP_S:
            self._awake_since = now
        self._ticked_at = now
        for half in self._halves:
            half.expire(now)
        self.is_hanging = self._engine.is_hanging(now, self._awake_since)
        if self._engine.is_stalled(now, self._awake_since):
            self._on_fault(EngineFault("the step thread is stuck", stage="step"))
        self._check_pool(now)

    def _check_pool(self, now: float) -> None:
        """Prove the pool's books when there was work and nobody has any now; then find leaks."""
        num_legs = sum(half.book.counts["received"] for half in self._halves)
        is_busy = any(half.book for half in self._halves) or self._are_links_moving()
        if num_legs != self._num_legs or is_busy:
            self._num_legs, self._idle_since = num_legs, now
            return
        try:
            if num_legs != self._num_legs_checked and now - self._idle_since >= _IDLE_S:
                self._num_legs_checked = num_legs
                self.num_pool_checks += 1
                self._pool.check()
            if now - max(self._idle_since, self._awake_since) >= _LEAK_S:
                self._check_nothing_is_kept()
        except AssertionError:
            self.num_pool_faults += 1
            raise

    def _check_nothing_is_kept(self) -> None:
        counts = self._pool.counts()
        swap = self._pool.swap
        is_swapped = swap is not None and swap.num_free < swap.num_slots
        if counts.held or counts.importing or counts.fenced or is_swapped:
            raise AssertionError(f"KV pool: blocks are kept for nobody: {counts}")
