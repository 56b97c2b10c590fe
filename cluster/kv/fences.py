"""Fences around blocks whose holder is gone while something may still read or write them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Fences:
    """Which blocks stand behind which fences; a block may stand behind several.

    ``fenced`` are those of them that nobody holds, so that they are in the state of that name:
    the pool puts a block there when its last holder lets go. Runs under the pool's lock.
    """

    def __init__(self) -> None:
        self._around: dict[int, tuple[int, ...]] = {}
        self._num_fences: Counter[int] = Counter()
        self._last_token = 0
        self.fenced: set[int] = set()

    def __contains__(self, block_id: int) -> bool:
        """Whether a fence is around the block."""
        return block_id in self._num_fences

    def blocks(self) -> frozenset[int]:
        """Return all blocks with a fence around them, held or not."""
        return frozenset(self._num_fences)

    def put(self, block_ids: Iterable[int]) -> int:
        """Put a fence around blocks and return its token."""
        self._last_token += 1
        self._around[self._last_token] = tuple(block_ids)
        self._num_fences.update(self._around[self._last_token])
        return self._last_token

    def lift(self, token: int) -> Sequence[int]:
        """Take a fence away; returns the blocks that are not fenced any more and nobody holds."""
        block_ids = self._around.pop(token, ())
        for block_id in block_ids:
            self._num_fences[block_id] -= 1
            if not self._num_fences[block_id]:
                del self._num_fences[block_id]
        bare = [b for b in block_ids if b in self.fenced and b not in self._num_fences]
        self.fenced.difference_update(bare)
        return bare
