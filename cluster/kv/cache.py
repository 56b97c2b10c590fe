"""The paged cache: the tensors behind a worker's KV blocks, and their way in and out as bytes.

Which block is whose is the block pool's business; here a block id is only an index. The memory is
taken page by page as blocks are first written, so that an idle worker stays small.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cluster.kv.layout import KVLayout

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
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

    def export_blocks(self, block_ids: Sequence[int], out_B: Tensor) -> None:
        """Copy whole blocks to ``out_B`` (uint8, contiguous, blocks x block_bytes) in order."""
        out_NB = self._as_blocks(block_ids, out_B)
        for block_id, offset, length in _runs(block_ids):
            out_NB[offset : offset + length].copy_(self._pool_NB[block_id : block_id + length])

    def import_blocks(self, block_ids: Sequence[int], staged_B: Tensor) -> None:
        """Overwrite whole blocks with what ``export_blocks`` gave on an agreeing layout."""
        staged_NB = self._as_blocks(block_ids, staged_B)
        for block_id, offset, length in _runs(block_ids):
            self._pool_NB[block_id : block_id + length].copy_(staged_NB[offset : offset + length])

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
        kv = torch.cat([k_HnD, v_HnD]).view(-1, self.layout.head_dim)
        self._slots.index_copy_(0, slots + shift, kv)

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

    def _as_blocks(self, block_ids: Sequence[int], bytes_B: Tensor) -> Tensor:
        expected = len(block_ids) * self.layout.block_bytes
        assert bytes_B.dtype == torch.uint8, bytes_B.dtype
        assert bytes_B.numel() == expected, (bytes_B.numel(), expected)
        return bytes_B.view(len(block_ids), self.layout.block_bytes)


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Return zeroed bytes; on a CPU from anonymous pages, which cost nothing until written."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first block, offset in ``block_ids``, length) of maximal runs of neighbours."""
    offset = 0
    for index in range(1, len(block_ids) + 1):
        is_end = index == len(block_ids)
        if is_end or block_ids[index] != block_ids[index - 1] + 1:
            yield block_ids[offset], offset, index - offset
            offset = index
