"""The header of a handoff's segment, as msgpack: what follows on the channel, and what it means.

An export travels in segments, each with a manifest of its own: layers that a step has stored, and
blocks whose tokens are computed, go out while later ones are being computed. Blocks go in bands:
all layers of one band are sent, from the first on, before the next band begins::

    layer  0 [ 1 | 2 | 4 ]
             [   | 3 |   ]     segments in their order: a band of all layers at once,
             [   |   | 5 ]     and two bands in two parts each; the 5th is the last
             block 0  ..

The last segment carries the tokens drawn so far. It holds what is left up to the export's last
block and layer. Where all of that has left before the tokens were drawn it holds no bytes, and the
peer waits for nothing but a message.

Whatever comes off a wire is checked field by field before anything is done with it: type, size
and sense. A manifest that is wrong in any way is a HandoffFailed that names the field.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from cluster.errors import HandoffFailed
from cluster.kv.layout import KVLayout
from cluster.request import MAX_PREEMPTIONS, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.request import LegKey

VERSION = 4
MAX_PACKED_BYTES = 1 << 20
_MAX_ID_CHARS = 256
_MAX_LAYOUT_CHARS = 2048
_MAX_TOKENS = 1 << 24
_MAX_BLOCKS = 1 << 24
_MAX_LAYERS = 1 << 24
_MAX_BYTES = 1 << 44
_MAX_TURNS = 1 << 53
_MAX_OUTPUT_IDS = 1 << 17
_MAX_TOKEN_ID = (1 << 31) - 1
_MAX_TOP_LOGPROBS = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One segment of a handoff on its way; ``num_bytes`` follow, in pieces.

    Each piece holds ``piece_blocks`` blocks with the segment's layers, the last one what is left.
    All blocks are the sender's::

        export    0 [ earlier bands ) first_block [ this one ) [ later ones ) whole blocks
        band      0 [ earlier segments ) first_layer [ this one ) [ later ones ) whole layers

    One that holds no bytes begins behind the export's last block.
    """

    handoff_id: str
    request_id: str
    attempt: int
    choice: int
    layout: str
    """The sender's KV layout as one canonical line."""
    num_tokens: int
    """Tokens of the whole export."""
    first_block: int
    num_blocks: int
    first_layer: int
    num_layers: int
    num_bytes: int
    piece_blocks: int
    is_last: bool
    """Whether this is the export's last segment, and the tokens are with it."""
    output_ids: tuple[int, ...]
    """With the last segment: the tokens drawn so far, of which there is always one. Else none."""
    logprobs: TokenLogprobs | None = None
    """Of the last of them, where the request asked for them."""
    turn: int = 0
    """Counts the link's manifests from 1 on; the link sets it when it sends one."""
    num_preemptions: int = 0
    """Of the choice so far, on all its ways."""
    version: int = VERSION

    @classmethod
    def of(  # noqa: PLR0913 (what a manifest tells)
        cls,
        handoff_id: str,
        key: LegKey,
        layout: KVLayout,
        *,
        num_tokens: int,
        output_ids: tuple[int, ...],
        blocks: range | None = None,
        layers: range | None = None,
        logprobs: TokenLogprobs | None = None,
        num_preemptions: int = 0,
    ) -> Manifest:
        """Describe ``layers`` of ``blocks`` of an export of ``num_tokens`` tokens; by default all.

        In one piece: a link cuts it smaller. It is the last segment where it ends the export and
        the tokens are known.
        """
        whole = range(layout.num_blocks_for(num_tokens))
        blocks = whole if blocks is None else blocks
        layers = range(layout.num_layers) if layers is None else layers
        ends = not blocks or layers.stop == layout.num_layers
        is_last = bool(output_ids) and blocks.stop == whole.stop and ends
        num_blocks = len(blocks)
        return cls(
            handoff_id=handoff_id,
            request_id=key.request_id,
            attempt=key.attempt,
            choice=key.choice,
            layout=layout.describe(),
            num_tokens=num_tokens,
            first_block=blocks.start,
            num_blocks=num_blocks,
            first_layer=layers.start,
            num_layers=len(layers),
            num_bytes=num_blocks * len(layers) * layout.layer_bytes,
            piece_blocks=num_blocks,
            is_last=is_last,
            output_ids=output_ids if is_last else (),
            logprobs=logprobs if is_last else None,
            num_preemptions=num_preemptions,
        )

    @property
    def blocks(self) -> range:
        """The segment's blocks, of the export's."""
        return range(self.first_block, self.first_block + self.num_blocks)

    @property
    def layers(self) -> range:
        """The segment's layers, of the model's."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block here: its layers in this segment; 0 where it holds none."""
        return self.num_bytes // self.num_blocks if self.num_blocks else 0

    def cut(self, max_piece_bytes: int, turn: int = 0) -> Manifest:
        """Return this manifest for its turn, in pieces of at most so many bytes, all as big."""
        if not self.num_bytes:
            return dataclasses.replace(self, turn=turn)
        piece_blocks = max_piece_bytes // self.block_bytes
        if piece_blocks < 1:
            raise HandoffFailed(
                f"a block of {self.block_bytes} bytes does not fit a staging buffer of "
                f"{max_piece_bytes}",
                stage="transfer",
            )
        piece_blocks = min(piece_blocks, self.num_blocks)
        return dataclasses.replace(self, piece_blocks=piece_blocks, turn=turn)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield (first block, number of blocks) of each piece, counted from ``first_block``."""
        for start in range(0, self.num_blocks, self.piece_blocks or 1):
            yield start, min(self.piece_blocks, self.num_blocks - start)

    def sender_layout(self) -> KVLayout:
        """Return the layout of the blocks; raises HandoffFailed where its line is none."""
        try:
            return KVLayout.parse(self.layout)
        except ValueError as error:
            raise _bad("layout", str(error)) from error

    def check_layout(self, layout: KVLayout) -> None:
        """Raise HandoffFailed unless these are blocks and layers that ``layout`` can take in."""
        theirs = self.sender_layout()
        obstacle = layout.obstacle(theirs)
        if obstacle is not None:
            raise _bad("layout", str(obstacle))
        whole, end = theirs.num_blocks_for(self.num_tokens), self.blocks.stop
        if self.layers.stop > theirs.num_layers:
            raise _bad("num_layers", f"layer {self.layers.stop} of {theirs.num_layers}")
        ends = end == whole and (not self.num_bytes or self.layers.stop == theirs.num_layers)
        if end > whole or (self.is_last and not ends):
            raise _bad(
                "num_blocks",
                f"block {end} of {whole} for {self.num_tokens} tokens, "
                f"layer {self.layers.stop} of {theirs.num_layers}, is not the last",
            )
        expected = self.num_layers * theirs.layer_bytes
        if self.block_bytes != expected:
            raise _bad("num_bytes", f"{self.block_bytes} a block, {expected} expected")

    def pack(self) -> bytes:
        """Return the manifest as msgpack."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.logprobs is not None:
            fields["logprobs"] = [self.logprobs.logprob, [*map(list, self.logprobs.top)]]
        packed: bytes = msgpack.packb(fields)
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
            turn=_take_int(fields, "turn", 0, _MAX_TURNS),
            first_block=_take_int(fields, "first_block", 0, _MAX_BLOCKS),
            num_blocks=_take_int(fields, "num_blocks", 0, _MAX_BLOCKS),
            first_layer=_take_int(fields, "first_layer", 0, _MAX_LAYERS),
            num_layers=_take_int(fields, "num_layers", 0, _MAX_LAYERS),
            num_bytes=_take_int(fields, "num_bytes", 0, _MAX_BYTES),
            piece_blocks=_take_int(fields, "piece_blocks", 0, _MAX_BLOCKS),
            is_last=_take_bool(fields, "is_last"),
            output_ids=_take_ids(fields, "output_ids"),
            logprobs=_take_logprobs(fields, "logprobs"),
            num_preemptions=_take_int(fields, "num_preemptions", 0, MAX_PREEMPTIONS),
        )
        manifest._check_sizes()
        if manifest.piece_blocks > manifest.num_blocks:
            raise _bad("piece_blocks", "is more than num_blocks")
        if manifest.is_last != bool(manifest.output_ids):
            raise _bad("output_ids", "come with the last segment, and only with it")
        return manifest

    def _check_sizes(self) -> None:
        sizes = (self.num_blocks, self.num_layers, self.num_bytes, self.piece_blocks)
        if not any(sizes):
            if not self.is_last:
                raise _bad("num_bytes", "is 0, and the tokens are not with it")
            return
        for name in ("num_blocks", "num_layers", "num_bytes", "piece_blocks"):
            if not getattr(self, name):
                raise _bad(name, "is 0 where others are not")
        if self.num_bytes % self.num_blocks:
            raise _bad("num_bytes", "is no multiple of num_blocks")


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
    if len(value) > _MAX_OUTPUT_IDS:
        raise _bad(name, f"has {len(value)} entries, at most {_MAX_OUTPUT_IDS} are allowed")
    if not all(_is_token_id(token) for token in value):
        raise _bad(name, "holds something that is no token id")
    return tuple(value)


def _take_bool(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if type(value) is not bool:
        raise _bad(name, f"is {type(value).__name__}, not a boolean")
    return value


def _take_logprobs(fields: dict[str, Any], name: str) -> TokenLogprobs | None:
    value = fields.get(name)
    if value is None:
        return None
    is_pair = type(value) is list and len(value) == 2 and type(value[1]) is list
    if not is_pair or not _is_logprob(value[0]) or len(value[1]) > _MAX_TOP_LOGPROBS:
        raise _bad(name, "is no log-probability with its best tokens")
    for item in value[1]:
        is_pair = type(item) is list and len(item) == 2
        if not is_pair or not _is_token_id(item[0]) or not _is_logprob(item[1]):
            raise _bad(name, "holds something that is no (token id, log-probability)")
    return TokenLogprobs(value[0], tuple((token, logprob) for token, logprob in value[1]))


def _is_logprob(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_TOKEN_ID


def _bad(name: str, what: str) -> HandoffFailed:
    return HandoffFailed(f"manifest.{name}: {what}", stage="transfer", field=name)
