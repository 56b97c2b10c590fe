"""Where the bytes of one handoff land: its state and its blocks change hands together.

The link's thread writes, the event loop may take the blocks away at any moment. Both do so under
the landing's own lock, one slice at a time, so that an abort waits for one slice's copy at most and
nobody else waits at all: neither the step thread nor other handoffs.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from cluster.handoff import AbortCause, Handoff, HandoffState

if TYPE_CHECKING:
    from torch import Tensor

    from cluster.kv.block_pool import BlockPool

SLICE_BYTES = 1 << 20
"""Copied under the lock at a time."""


class BlockWriter(Protocol):
    """The cache, as the receiver needs it; called on link threads."""

    def import_blocks(self, block_ids: tuple[int, ...], staged_B: Tensor) -> None:
        """Copy whole blocks out of ``staged_B``."""
        ...


class Landing:
    """One handoff on the receiver's side, with its reservation in the pool."""

    def __init__(self, handoff: Handoff, pool: BlockPool, cache: BlockWriter) -> None:
        self.handoff = handoff
        self._pool = pool
        self._cache = cache
        self._lock = threading.Lock()

    def write(self, start: int, num_blocks: int, staged_B: Tensor, block_bytes: int) -> None:
        """Write that part of the handoff's blocks; nothing once it is not being sent any more."""
        step = max(1, SLICE_BYTES // block_bytes)
        for first in range(0, num_blocks, step):
            last = min(first + step, num_blocks)
            with self._lock:
                # Whoever ends the handoff does so under this lock: these blocks are still ours.
                block_ids = self._pool.importing(self.handoff.handoff_id)
                if block_ids is None or self.handoff.state is not HandoffState.SENDING:
                    return
                self._cache.import_blocks(
                    block_ids[start + first : start + last],
                    staged_B[first * block_bytes : last * block_bytes],
                )

    def commit(self) -> None:
        """Give the blocks to the handoff's sequence."""
        with self._lock:
            self.handoff.advance(HandoffState.COMMITTED)
            self._pool.adopt(self.handoff.handoff_id)

    def abort(self, cause: AbortCause) -> None:
        """Give the blocks back, if it has any; not one byte reaches them after that."""
        with self._lock:
            self.handoff.advance(HandoffState.ABORTED, cause)
            self._pool.cancel(self.handoff.handoff_id)
