"""What the bytes of a KV block mean, and which meanings can be turned into one another.

Two workers may exchange blocks when all fields agree but ``MAY_DIFFER``: the receiver converts
those while it writes. Everything else names another model, or another part of one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one element by the name that a layout carries."""
MAY_DIFFER = frozenset({"block_size", "dtype"})
"""Fields in which a sender and a receiver may differ."""
_MAX_COUNT = 1 << 24
_MAX_NAME_CHARS = 1024


@dataclass(frozen=True, slots=True)
class LayoutDifference:
    """One field in which two layouts differ, with both values as a layout line shows them."""

    field: str
    ours: str
    theirs: str

    @property
    def is_convertible(self) -> bool:
        """Whether blocks may be exchanged in spite of it."""
        return self.field in MAY_DIFFER

    def __str__(self) -> str:
        """Return both values as a message shows them."""
        return f"{self.field}: {self.ours} here, {self.theirs} there"


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
    """``fp32``, ``bf16`` or ``fp16``; the weights' may be another."""
    model_fingerprint: str
    """Digest of the model's configuration and revision; KV of other weights is another KV."""
    shard_index: int = 0
    num_shards: int = 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V over all layers."""
        elements = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return elements * ELEMENT_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_size * self.token_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return self.block_bytes // self.num_layers

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def describe(self) -> str:
        """Return the fields as one canonical line."""
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))

    @classmethod
    def parse(cls, line: str) -> KVLayout:
        """Read a line of ``describe``; raises ValueError that names the field that is wrong."""
        names = [f.name for f in dataclasses.fields(cls)]
        pairs = [item.partition("=") for item in line.split(" ")]
        if [name for name, _, _ in pairs] != names:
            raise ValueError(f"layout: not the fields {', '.join(names)}")
        texts = {name: text for name, _, text in pairs}
        dtype, fingerprint = texts.pop("dtype"), texts.pop("model_fingerprint")
        if dtype not in ELEMENT_BYTES:
            raise ValueError(f"layout.dtype: not one of {', '.join(ELEMENT_BYTES)}")
        if len(fingerprint) > _MAX_NAME_CHARS:
            raise ValueError("layout.model_fingerprint: too long")
        numbers = {name: _parse_count(name, text) for name, text in texts.items()}
        return cls(dtype=dtype, model_fingerprint=fingerprint, **numbers)

    def differences(self, other: KVLayout) -> tuple[LayoutDifference, ...]:
        """Return every field that differs, ours first; empty where the layouts are equal."""
        return tuple(
            LayoutDifference(f.name, str(getattr(self, f.name)), str(getattr(other, f.name)))
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        )

    def obstacle(self, other: KVLayout) -> LayoutDifference | None:
        """Return the first difference that no conversion bridges; None: blocks may be exchanged."""
        return next((d for d in self.differences(other) if not d.is_convertible), None)


def _parse_count(name: str, text: str) -> int:
    low = 0 if name == "shard_index" else 1
    # Not int() alone: it takes spaces, signs and underscores, which no layout line has.
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"layout.{name}: no number")
    if not low <= int(text) <= _MAX_COUNT:
        raise ValueError(f"layout.{name}: outside {low}..{_MAX_COUNT}")
    return int(text)
