"""The bytes of the swap buffer: CPU memory behind its slots, and the copies from and to the pool.

Beside a GPU the memory is pinned, so that copies run at the bus's speed. On a CPU it is ordinary
memory, taken page by page as slots are first written. Which slot is whose is ``swap_buffer``'s
business; the step thread copies between two steps, and a copy is done when its method returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cluster.kv.cache import lazy_zeros, runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from cluster.kv.cache import PagedCache


class SwapMemory:
    """``num_slots`` times the bytes of one of the cache's blocks."""

    def __init__(self, cache: PagedCache, num_slots: int) -> None:
        """Raises OSError, OverflowError or RuntimeError where there is not that much memory."""
        self._cache = cache
        num_bytes = num_slots * cache.layout.block_bytes
        if cache.device.type == "cpu":
            slots_B = lazy_zeros(num_bytes)
        else:
            slots_B = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._slots_NB = slots_B.view(num_slots, -1)

    @property
    def is_pinned(self) -> bool:
        """Whether a GPU copies from and to it directly."""
        return self._slots_NB.is_pinned()

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to slots, given as (block, slot)."""
        block_ids, slots = [block for block, _ in pairs], [slot for _, slot in pairs]
        for first, offset, length in runs(slots):
            self._cache.export_blocks(
                block_ids[offset : offset + length], self._bytes(first, length)
            )

    def copy_back(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots to blocks, given as (slot, block)."""
        slots, block_ids = [slot for slot, _ in pairs], [block for _, block in pairs]
        for first, offset, length in runs(slots):
            self._cache.import_blocks(
                block_ids[offset : offset + length], self._bytes(first, length)
            )

    def _bytes(self, first: int, length: int) -> Tensor:
        return self._slots_NB[first : first + length].view(-1)
