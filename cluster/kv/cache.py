"""The paged cache: the tensors behind a worker's KV blocks, and their way in and out as bytes.

Which block is whose is the block pool's business; here a block id is only an index. The memory is
taken page by page as blocks are first written, so that an idle worker stays small.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cluster.kv.layout import KVLayout

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Element types by the name that a layout carries."""


class PagedCache:
    """All KV blocks of one worker, block-major.

    One block, contiguous, is what an export copies::

        [ layer 0: K head 0 | K head 1 | .. | V head 0 | V head 1 | .. ][ layer 1: .. ] ..
                   `-- row: block_size tokens x head_dim

    A *row* is one head's K (or V) of one block and layer; a *slot* is one token in a row. Index
    tensors are made once a step for layer 0, and moved to another layer by adding a constant.
    The step thread reads and writes by index while link threads export and import; each touches
    only blocks that it was given.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        self.dtype = TORCH_DTYPES[layout.dtype]
        self._pool_NB = _zeros(num_blocks * layout.block_bytes, device).view(num_blocks, -1)
        elements = self._pool_NB.view(-1).view(self.dtype)
        self._rows = elements.view(-1, layout.block_size * layout.head_dim)
        self._slots = elements.view(-1, layout.head_dim)
        self._rows_per_layer = 2 * layout.num_kv_heads
        self._rows_per_block = layout.num_layers * self._rows_per_layer
        self._gathered = torch.empty(0, dtype=self.dtype, device=device)

    def export_blocks(
        self, block_ids: Sequence[int], out_B: Tensor, layers: range | None = None
    ) -> None:
        """Copy blocks to ``out_B`` (uint8, contiguous) in order; with ``layers`` these of each.

        ``out_B`` holds len(block_ids) x len(layers) x layer_bytes, block by block.
        """
        pool_NB, out_NB = self._columns(layers), self._as_blocks(block_ids, out_B, layers)
        for block_id, offset, length in runs(block_ids):
            out_NB[offset : offset + length].copy_(pool_NB[block_id : block_id + length])

    def import_blocks(
        self, block_ids: Sequence[int], staged_B: Tensor, layers: range | None = None
    ) -> None:
        """Overwrite blocks with what ``export_blocks`` gave on an agreeing layout."""
        pool_NB, staged_NB = self._columns(layers), self._as_blocks(block_ids, staged_B, layers)
        for block_id, offset, length in runs(block_ids):
            pool_NB[block_id : block_id + length].copy_(staged_NB[offset : offset + length])

    def import_foreign(
        self,
        block_ids: Sequence[int],
        tokens: range,
        staged_B: Tensor,
        theirs: KVLayout,
        layers: range | None = None,
    ) -> None:
        """Write a piece of an export whose blocks have another size or element type.

        ``block_ids`` are ours for the whole export; the piece holds its ``tokens``, of ``layers``
        or of all, in whole blocks of ``theirs``, the last of which may not be full. A block of
        ours that the piece begins and does not fill is cleared first: its end is read, masked,
        before it is written.
        """
        layers = range(theirs.num_layers) if layers is None else layers
        expected = theirs.num_blocks_for(len(tokens)) * len(layers) * theirs.layer_bytes
        assert staged_B.dtype == torch.uint8, staged_B.dtype
        assert staged_B.numel() == expected, (staged_B.numel(), expected)
        staged = staged_B.to(self.device).view(TORCH_DTYPES[theirs.dtype])
        from_NLKHTD = staged.view(-1, len(layers), *_block_shape(theirs)[1:])
        into_NLKHTD = self._pool_NB.view(self.dtype).view(-1, *_block_shape(self.layout))
        into_NLKHTD = into_NLKHTD[:, layers.start : layers.stop]
        for span in _spans(tokens.start, len(tokens), theirs.block_size, self.layout.block_size):
            block_id = block_ids[span.block]
            if span.begins_unfilled:
                into_NLKHTD[block_id].zero_()
            source = from_NLKHTD[span.piece_block, ..., span.piece_slice, :]
            target = into_NLKHTD[block_id, ..., span.slice, :]
            target.copy_(self._stored(source))

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero blocks; stale NaNs of an earlier holder would pass through a masked product."""
        for block_id in block_ids:
            self._pool_NB[block_id].zero_()

    def slot_index(self, block_ids_n: Tensor, offsets_n: Tensor) -> Tensor:
        """Return the slots ``[2 * heads * n]`` of n tokens in layer 0, by block and offset in it.

        K before V, then heads, then tokens: the order of ``cat([k_HnD, v_HnD])``.
        """
        rows = torch.arange(self._rows_per_layer)[:, None] + block_ids_n * self._rows_per_block
        return (rows * self.layout.block_size + offsets_n).flatten().to(self.device)

    def row_index(self, tables_bn: Tensor) -> Tensor:
        """Return the rows ``[2 * b * heads * n]`` of b block tables of n blocks, in layer 0.

        K before V, then tables, heads, blocks: each head's K is then one run of n blocks.
        """
        heads = torch.arange(self._rows_per_layer).view(2, 1, -1, 1)
        return (heads + tables_bn[None, :, None] * self._rows_per_block).flatten().to(self.device)

    def write(self, layer: int, slots: Tensor, k_HnD: Tensor, v_HnD: Tensor) -> None:
        """Store n tokens' K and V of one layer at ``slots`` (of ``slot_index``)."""
        shift = layer * self._rows_per_layer * self.layout.block_size
        kv = self._stored(torch.cat([k_HnD, v_HnD])).view(-1, self.layout.head_dim)
        self._slots.index_copy_(0, slots + shift, kv)

    def rounded(self, kv: Tensor) -> Tensor:
        """Return K or V as it would be read back: what is stored may be less exact.

        Attention over a step's own K and V uses these, so that it sees the same values whether
        they come from this step or from an earlier one.
        """
        return self._stored(kv).to(kv.dtype)

    def gather(self, layer: int, rows: Tensor) -> Tensor:
        """Return K and V ``[2, b * heads, n * block_size, head_dim]`` at ``rows``, contiguous.

        The result lives in a buffer that the next call reuses; the step thread only.
        """
        num_rows, row_elements = len(rows), self._rows.shape[1]
        if self._gathered.numel() < num_rows * row_elements:
            self._gathered = torch.empty(
                num_rows * row_elements, dtype=self.dtype, device=self.device
            )
        out = self._gathered[: num_rows * row_elements].view(num_rows, row_elements)
        torch.index_select(self._rows, 0, rows + layer * self._rows_per_layer, out=out)
        return out

    def _stored(self, kv: Tensor) -> Tensor:
        if kv.dtype == self.dtype:
            return kv
        stored = kv.to(self.dtype)
        if self.dtype is not torch.float16:
            return stored
        # What fp16 cannot hold is saturated: an infinity would turn the whole sequence into NaNs.
        limit = torch.finfo(torch.float16).max
        return stored.clamp_(-limit, limit)

    def _columns(self, layers: range | None) -> Tensor:
        """Return all blocks with the bytes of these layers alone."""
        if layers is None:
            return self._pool_NB
        layer_bytes = self.layout.layer_bytes
        return self._pool_NB[:, layers.start * layer_bytes : layers.stop * layer_bytes]

    def _as_blocks(self, block_ids: Sequence[int], bytes_B: Tensor, layers: range | None) -> Tensor:
        num_layers = self.layout.num_layers if layers is None else len(layers)
        block_bytes = num_layers * self.layout.layer_bytes
        assert bytes_B.dtype == torch.uint8, bytes_B.dtype
        assert bytes_B.numel() == len(block_ids) * block_bytes, (bytes_B.numel(), block_bytes)
        return bytes_B.view(len(block_ids), block_bytes)


@dataclass(frozen=True, slots=True)
class _Span:
    """Tokens that lie in one block of a piece and in one block of ours."""

    piece_block: int
    piece_slice: slice
    block: int
    """Index in the export's table of our blocks."""
    slice: slice
    begins_unfilled: bool
    """Whether the block begins here, and the piece ends within it."""


def _spans(
    first_token: int, num_tokens: int, piece_block_size: int, block_size: int
) -> Iterator[_Span]:
    """Cut a piece's tokens where a block of either side ends.

    With 4 tokens a block there and 6 here, a piece of 10 tokens from token 4 on::

        piece       [ 4 5 6 7 | 8 9 10 11 | 12 13 - - ]
        ours   .. 4 5 ][ 6 7 8 9 10 11 ][ 12 13 0 0 0 0 ]
                  span  span span        span, begins unfilled
    """
    token, end = first_token, first_token + num_tokens
    while token < end:
        piece_block, piece_offset = divmod(token - first_token, piece_block_size)
        block, offset = divmod(token, block_size)
        length = min(piece_block_size - piece_offset, block_size - offset, end - token)
        yield _Span(
            piece_block,
            slice(piece_offset, piece_offset + length),
            block,
            slice(offset, offset + length),
            offset == 0 and end - token < block_size,
        )
        token += length


def _block_shape(layout: KVLayout) -> tuple[int, ...]:
    return layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return lazy_zeros(num_bytes)


def lazy_zeros(num_bytes: int) -> Tensor:
    """Return zeroed bytes of CPU memory, in anonymous pages that cost nothing until written."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first block, offset in ``block_ids``, length) of maximal runs of neighbours."""
    offset = 0
    for index in range(1, len(block_ids) + 1):
        is_end = index == len(block_ids)
        if is_end or block_ids[index] != block_ids[index - 1] + 1:
            yield block_ids[offset], offset, index - offset
            offset = index
