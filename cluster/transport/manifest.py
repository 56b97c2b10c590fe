"""The header of a handoff, as msgpack: what follows on the channel, and what it means.

Whatever comes off a wire is checked field by field before anything is done with it: type, size
and sense. A manifest that is wrong in any way is a HandoffFailed that names the field.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from cluster.errors import HandoffFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.kv.layout import KVLayout
    from cluster.request import LegKey

VERSION = 1
MAX_PACKED_BYTES = 1 << 20
_MAX_ID_CHARS = 256
_MAX_LAYOUT_CHARS = 2048
_MAX_TOKENS = 1 << 24
_MAX_BLOCKS = 1 << 24
_MAX_BYTES = 1 << 44
_MAX_OUTPUT_IDS = 1 << 17
_MAX_TOKEN_ID = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One handoff's blocks on their way; ``num_bytes`` of them follow, in pieces.

    Each piece holds ``piece_blocks`` whole blocks, the last one what is left. ``output_ids`` are
    the tokens sampled so far, of which the first token is always one.
    """

    handoff_id: str
    request_id: str
    attempt: int
    choice: int
    layout: str
    """The sender's KV layout as one canonical line."""
    num_tokens: int
    """Tokens whose KV is computed."""
    num_blocks: int
    num_bytes: int
    piece_blocks: int
    output_ids: tuple[int, ...]
    version: int = VERSION

    @classmethod
    def of(
        cls,
        handoff_id: str,
        key: LegKey,
        layout: KVLayout,
        *,
        num_tokens: int,
        output_ids: tuple[int, ...],
    ) -> Manifest:
        """Describe the export of ``num_tokens`` tokens, in one piece; a link cuts it smaller."""
        num_blocks = layout.num_blocks_for(num_tokens)
        return cls(
            handoff_id=handoff_id,
            request_id=key.request_id,
            attempt=key.attempt,
            choice=key.choice,
            layout=layout.describe(),
            num_tokens=num_tokens,
            num_blocks=num_blocks,
            num_bytes=num_blocks * layout.block_bytes,
            piece_blocks=num_blocks,
            output_ids=output_ids,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.num_bytes // self.num_blocks

    def cut(self, max_piece_bytes: int) -> Manifest:
        """Return this manifest with pieces of at most so many bytes, all as big as can be."""
        piece_blocks = max_piece_bytes // self.block_bytes
        if piece_blocks < 1:
            raise HandoffFailed(
                f"a block of {self.block_bytes} bytes does not fit a staging buffer of "
                f"{max_piece_bytes}",
                stage="transfer",
            )
        return dataclasses.replace(self, piece_blocks=min(piece_blocks, self.num_blocks))

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield (first block, number of blocks) of each piece, in the order of sending."""
        for start in range(0, self.num_blocks, self.piece_blocks):
            yield start, min(self.piece_blocks, self.num_blocks - start)

    def check_layout(self, layout: KVLayout) -> None:
        """Raise HandoffFailed unless these are blocks of ``layout``, every byte of them."""
        mine, theirs = layout.describe().split(), self.layout.split()
        for here, there in zip(mine, theirs, strict=False):
            if here != there:
                raise _bad("layout", f"{here} here, {there} there")
        if len(mine) != len(theirs):
            raise _bad("layout", f"{len(mine)} fields here, {len(theirs)} there")
        if self.num_blocks != layout.num_blocks_for(self.num_tokens):
            raise _bad("num_blocks", f"{self.num_blocks} for {self.num_tokens} tokens")
        if self.block_bytes != layout.block_bytes:
            raise _bad("num_bytes", f"{self.block_bytes} a block, {layout.block_bytes} here")

    def pack(self) -> bytes:
        """Return the manifest as msgpack."""
        packed: bytes = msgpack.packb(
            {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        )
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> Manifest:
        """Read and check a manifest; raises HandoffFailed and nothing else."""
        fields = _read_map(data)
        known = {f.name for f in dataclasses.fields(cls)}
        version = _take_int(fields, "version", 0, _MAX_TOKENS)
        if version != VERSION:
            raise _bad("version", f"{version} is unknown here, {VERSION} is spoken")
        for name in sorted(fields.keys() ^ known):
            raise _bad(name, "is unknown" if name in fields else "is missing")
        manifest = cls(
            version=version,
            handoff_id=_take_str(fields, "handoff_id", _MAX_ID_CHARS),
            request_id=_take_str(fields, "request_id", _MAX_ID_CHARS),
            attempt=_take_int(fields, "attempt", 0, _MAX_TOKENS),
            choice=_take_int(fields, "choice", 0, _MAX_TOKENS),
            layout=_take_str(fields, "layout", _MAX_LAYOUT_CHARS),
            num_tokens=_take_int(fields, "num_tokens", 1, _MAX_TOKENS),
            num_blocks=_take_int(fields, "num_blocks", 1, _MAX_BLOCKS),
            num_bytes=_take_int(fields, "num_bytes", 1, _MAX_BYTES),
            piece_blocks=_take_int(fields, "piece_blocks", 1, _MAX_BLOCKS),
            output_ids=_take_ids(fields, "output_ids"),
        )
        if manifest.num_bytes % manifest.num_blocks:
            raise _bad("num_bytes", "is no multiple of num_blocks")
        if manifest.piece_blocks > manifest.num_blocks:
            raise _bad("piece_blocks", "is more than num_blocks")
        return manifest


def _read_map(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_PACKED_BYTES:
        raise _bad("size", f"{len(data)} bytes, at most {MAX_PACKED_BYTES}")
    try:
        fields = msgpack.unpackb(
            data,
            strict_map_key=True,
            max_str_len=_MAX_LAYOUT_CHARS * 4,
            max_bin_len=0,
            max_ext_len=0,
            max_array_len=_MAX_OUTPUT_IDS,
            max_map_len=64,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise _bad("encoding", type(error).__name__) from error
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise _bad("encoding", "is no map of names")
    return fields


def _take_int(fields: dict[str, Any], name: str, low: int, high: int) -> int:
    value = fields.get(name)
    if type(value) is not int:
        raise _bad(name, f"is {type(value).__name__}, not an integer")
    if not low <= value <= high:
        raise _bad(name, f"{value} is outside {low}..{high}")
    return value


def _take_str(fields: dict[str, Any], name: str, max_chars: int) -> str:
    value = fields.get(name)
    if type(value) is not str:
        raise _bad(name, f"is {type(value).__name__}, not text")
    if not 0 < len(value) <= max_chars:
        raise _bad(name, f"has {len(value)} characters, 1..{max_chars} are allowed")
    return value


def _take_ids(fields: dict[str, Any], name: str) -> tuple[int, ...]:
    value = fields.get(name)
    if type(value) is not list:
        raise _bad(name, f"is {type(value).__name__}, not a list")
    if not 0 < len(value) <= _MAX_OUTPUT_IDS:
        raise _bad(name, f"has {len(value)} entries, 1..{_MAX_OUTPUT_IDS} are allowed")
    if not all(type(token) is int and 0 <= token <= _MAX_TOKEN_ID for token in value):
        raise _bad(name, "holds something that is no token id")
    return tuple(value)


def _bad(name: str, what: str) -> HandoffFailed:
    return HandoffFailed(f"manifest.{name}: {what}", stage="transfer", field=name)
