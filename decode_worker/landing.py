"""Where the bytes of one handoff land: its state and its blocks change hands together.

The link's thread writes, the event loop may take the blocks away at any moment. Before each slice
the link's thread looks again whether the blocks are still the handoff's; an abort in the midst of
a slice fences them, and they are free when that copy is over. So nobody waits for a copy, and no
block is another's while one byte can still reach it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from cluster.errors import HandoffFailed
from cluster.handoff import AbortCause, Handoff, HandoffState

if TYPE_CHECKING:
    from torch import Tensor

    from cluster.kv.block_pool import BlockPool
    from cluster.kv.layout import KVLayout
    from cluster.transport.manifest import Manifest

SLICE_BYTES = 1 << 20
"""Copied between two looks at the handoff's state."""


class BlockWriter(Protocol):
    """The cache, as the receiver needs it; called on link threads."""

    def import_blocks(
        self, block_ids: tuple[int, ...], staged_B: Tensor, layers: range | None = None
    ) -> None:
        """Copy these layers of blocks of our layout out of ``staged_B``."""
        ...

    def import_foreign(
        self,
        block_ids: tuple[int, ...],
        tokens: range,
        staged_B: Tensor,
        theirs: KVLayout,
        layers: range | None = None,
    ) -> None:
        """Convert these layers of blocks of another layout: ``tokens`` of the export whose blocks
        here are ``block_ids``."""
        ...


def discard(start: int, num_blocks: int, staged_B: Tensor) -> None:
    """Take bytes that are nobody's."""


class Landing:
    """One handoff on the receiver's side, with its reservation in the pool."""

    def __init__(
        self, handoff: Handoff, pool: BlockPool, cache: BlockWriter, layout: KVLayout
    ) -> None:
        self.handoff = handoff
        self._pool = pool
        self._cache = cache
        self._layout = layout
        self._lock = threading.Lock()
        self._is_copying = False
        self._theirs: KVLayout | None = None
        self._band = range(0)
        """Of the sender's blocks: the one that was announced last."""
        self._num_layers = 0
        """Of that band, announced so far."""
        self._num_announced_bytes = 0
        self._last: Manifest | None = None
        """The last segment's, once it was announced."""
        self.num_bytes = 0
        """Of the segments that were written."""

    def announce(self, manifest: Manifest) -> bool:
        """Expect a segment, and return whether it is the first one.

        The manifest was checked for itself: its layout can be taken, and it ends within its
        export. Raises HandoffFailed unless it begins where the last one ended: it goes on with
        the layers of its band, or begins the next band with the first layer. So when the last
        one is due, every layer of every block is due exactly once.
        """
        theirs = manifest.sender_layout()
        if self._last is not None:
            raise HandoffFailed(
                "manifest.is_last: nothing was to follow the last segment",
                stage="handoff",
                field="is_last",
            )
        if 0 < self._num_layers < theirs.num_layers:
            self._expect(manifest, "first_block", self._band.start)
            self._expect(manifest, "num_blocks", len(self._band))
            self._expect(manifest, "first_layer", self._num_layers)
        else:
            self._expect(manifest, "first_block", self._band.stop)
            self._expect(manifest, "first_layer", 0)
        if self._theirs not in (None, theirs):
            raise HandoffFailed(
                "manifest.layout: not that of the segments before it",
                stage="handoff",
                field="layout",
            )
        is_first = self._theirs is None
        if is_first:
            self.handoff.advance(HandoffState.SENDING)
        self._theirs = theirs
        self._band, self._num_layers = manifest.blocks, manifest.layers.stop
        self._num_announced_bytes += manifest.num_bytes
        self._last = manifest if manifest.is_last else None
        return is_first

    def landed(self, manifest: Manifest) -> Manifest | None:
        """Note that all bytes of a segment were written.

        Returns the last segment's manifest once the export is whole: one without bytes is there
        before the bytes of those before it.
        """
        self.num_bytes += manifest.num_bytes
        return self._last if self.num_bytes == self._num_announced_bytes else None

    def write(self, manifest: Manifest, start: int, num_blocks: int, staged_B: Tensor) -> None:
        """Write that part of a segment; nothing once the handoff is not being sent any more.

        ``start`` counts the sender's blocks from the segment's first.
        """
        block_bytes = manifest.block_bytes
        step = max(1, SLICE_BYTES // block_bytes)
        for first in range(0, num_blocks, step):
            last = min(first + step, num_blocks)
            slice_B = staged_B[first * block_bytes : last * block_bytes]
            block_ids = self._begin_copy()
            if block_ids is None:
                return
            try:
                first_block = manifest.first_block + start + first
                self._copy(block_ids, manifest, first_block, last - first, slice_B)
            finally:
                self._end_copy()

    def writable(self) -> tuple[int, ...] | None:
        """Return the handoff's blocks while it is being sent; to be called under the lock."""
        if self.handoff.state is not HandoffState.SENDING:
            return None
        block_ids = self._pool.importing(self.handoff.handoff_id)
        # Those after them are for tokens to come.
        return None if block_ids is None else block_ids[: self.handoff.num_blocks]

    def commit(self) -> None:
        """Give the blocks to the handoff's sequence."""
        with self._lock:
            self.handoff.advance(HandoffState.COMMITTED)
            self._pool.adopt(self.handoff.handoff_id)

    def abort(self, cause: AbortCause) -> None:
        """Give the blocks back, if it has any; not one byte reaches a later holder of them."""
        with self._lock:
            self.handoff.advance(HandoffState.ABORTED, cause)
            if self._is_copying:
                self._pool.fence(self.handoff.handoff_id)
            else:
                self._pool.cancel(self.handoff.handoff_id)

    def _expect(self, manifest: Manifest, name: str, expected: int) -> None:
        value = getattr(manifest, name)
        if value != expected:
            raise HandoffFailed(
                f"manifest.{name}: {value}, expected {expected}", stage="handoff", field=name
            )

    def _begin_copy(self) -> tuple[int, ...] | None:
        with self._lock:
            block_ids = self.writable()
            self._is_copying = block_ids is not None
            return block_ids

    def _end_copy(self) -> None:
        with self._lock:
            self._is_copying = False
        self._pool.unfence(self.handoff.handoff_id)  # if an abort came meanwhile

    def _copy(
        self,
        block_ids: tuple[int, ...],
        manifest: Manifest,
        first_block: int,
        num_blocks: int,
        slice_B: Tensor,
    ) -> None:
        theirs = self._theirs
        assert theirs is not None, "announced before its bytes come"
        end_block, layers = first_block + num_blocks, manifest.layers
        if theirs == self._layout:
            self._cache.import_blocks(block_ids[first_block:end_block], slice_B, layers)
            return
        size = theirs.block_size
        tokens = range(first_block * size, min(end_block * size, manifest.num_tokens))
        self._cache.import_foreign(block_ids, tokens, slice_B, theirs, layers)
