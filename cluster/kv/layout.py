"""What the bytes of a KV block mean; two workers may exchange blocks only when they agree."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

_ELEMENT_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of one block: all layers of ``block_size`` tokens, contiguous.

    Regions, outermost first: layer, K then V, then the heads and tokens of the block.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens per block."""
    dtype: str
    """``fp32`` or ``bf16``."""
    model_fingerprint: str
    """Digest of the model's configuration and revision; KV of other weights is another KV."""
    shard_index: int = 0
    num_shards: int = 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V over all layers."""
        elements = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return elements * _ELEMENT_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_size * self.token_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def describe(self) -> str:
        """Return the fields as one canonical line."""
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))

    def mismatch(self, other: KVLayout) -> str | None:
        """Name the first field that differs, with both values; None when the layouts agree."""
        for f in dataclasses.fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine != theirs:
                return f"{f.name}: {mine} here, {theirs} there"
        return None
