"""Moving an export through one reused staging buffer, in few large messages.

The buffer is allocated and touched once, when the link opens; pages that are touched first
during a transfer would cost more than the transfer.

    staging   | piece: whole blocks, gathered ... | digest | turn |  (never sent: the rest)
              0                                   n        n+8    n+24

The turn counts the channel's messages and states the piece's bytes. gloo takes a message that is
shorter than the buffer without a word, and what then stands in the buffer is an earlier request's
KV: the turn is what proves that the piece arrived whole and in its order.

The digest, where it is on, proves that the bytes are those that were gathered, for this handoff.
It is a CRC-32: it finds every burst of up to 32 bits and all but one in 2^32 of other changes, and
it costs a fifth of what BLAKE2b does (6.7 against 1.3 GiB/s on one core). It is no defence against
somebody who forges payloads; whoever may send on a link is known by then.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cluster.transport.base import Channel, ChannelClosed, CorruptPayload, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from cluster.transport.manifest import Manifest

    MoveBlocks = Callable[[int, int, Tensor], None]
    """(first block of the export, number of blocks, their bytes in the staging buffer)."""

_TURN = struct.Struct("<QQ")
_DIGEST = struct.Struct("<Q")
_NO_DIGEST = 0
_HAS_DIGEST = 1 << 32
TRAILER_BYTES = _TURN.size + _DIGEST.size


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """How big a piece may be, and how long it may take."""

    staging_bytes: int = 16 << 20
    floor_s: float = 5.0
    """A piece may always take so long; also the time to find a silent peer in a transfer."""
    min_bytes_per_s: float = 20e6
    """Slower than this is taken for a peer that is gone."""
    has_digest: bool = False
    """Whether payloads are digested when they are sent, and must be when they are received."""
    idle_s: float = 60.0
    """A link on which nothing was under way for so long is closed by its sender."""
    turn_s: float = 30.0
    """Patience with other transfers of the two GPUs, where they must not overlap."""

    def timeout_s(self, num_bytes: int) -> float:
        """Seconds that a message of ``num_bytes`` may take."""
        return self.floor_s + num_bytes / self.min_bytes_per_s


def _make_buffer(num_bytes: int, device: str) -> Tensor:
    """Return bytes that go back to the kernel when their link is gone.

    On CPU they are a mapping of their own: between the step's tensors malloc would leave a hole
    where they were, which the next link's need not fit into, and a worker would grow with every
    restart of a peer.
    """
    if torch.device(device).type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=private), dtype=torch.uint8)


class StagedChannel:
    """One link's channel with its staging buffer; used on the link's thread."""

    def __init__(self, channel: Channel, limits: TransferLimits, device: str) -> None:
        self.channel = channel
        self._limits = limits
        self._num_messages = 0
        self._staging_B = _make_buffer(limits.staging_bytes + TRAILER_BYTES, device)
        self._staging_B.zero_()  # touches every page

    def cut(self, manifest: Manifest, turn: int) -> Manifest:
        """Return a manifest for its turn, in pieces that fit the buffer and suit the channel."""
        num_bytes = self._limits.staging_bytes
        if self.channel.piece_bytes is not None:
            num_bytes = min(num_bytes, max(self.channel.piece_bytes, manifest.block_bytes))
        return manifest.cut(num_bytes, turn)

    def send(self, manifest: Manifest, export: MoveBlocks, timeout_s: float | None) -> None:
        """Gather and send every piece of ``manifest``; ``export`` fills the staging buffer.

        The peer counts on the bytes once it has the manifest: if they cannot be sent, whatever
        the reason, the channel is closed.
        """
        try:
            for start, num_blocks in manifest.pieces():
                num_bytes = num_blocks * manifest.block_bytes
                piece_B = self._staging_B[:num_bytes]
                export(start, num_blocks, piece_B)
                frame_B = self._staging_B[: num_bytes + TRAILER_BYTES]
                digest = self._digest(manifest, piece_B)
                frame_B[num_bytes:] = _as_tensor(digest + self._next_turn(num_bytes))
                self.channel.send(frame_B, self._timeout(num_bytes, timeout_s))
        except BaseException:
            self.channel.close()
            raise

    def recv(self, manifest: Manifest, scatter: MoveBlocks, timeout_s: float | None) -> None:
        """Receive every piece of ``manifest``; ``scatter`` takes each out of the buffer.

        An error of ``scatter``, or CorruptPayload, is raised after the last piece: the bytes that
        follow are the next handoff's, and it shall not find these.
        """
        failure: Exception | None = None
        for start, num_blocks in manifest.pieces():
            num_bytes = num_blocks * manifest.block_bytes
            digest = self._recv_piece(num_bytes, timeout_s)
            if failure is not None:
                continue
            try:
                self._check_digest(manifest, self._staging_B[:num_bytes], digest)
                scatter(start, num_blocks, self._staging_B[:num_bytes])
            except ChannelClosed:
                # The link is lost, and the pieces left are still on their way: whoever received
                # next would get them.
                self.channel.close()
                raise
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Close the channel and let go of the buffer; on the link's thread, after its last job.

        The buffer would live on with whoever still knows the lost link: an error, for example.
        """
        self.channel.close()
        self._staging_B = self._staging_B.new_empty(0)

    def check_fits(self, manifest: Manifest) -> None:
        """Raise TransportError where a piece is bigger than the staging buffer."""
        num_bytes = manifest.piece_blocks * manifest.block_bytes
        if num_bytes > self._limits.staging_bytes:
            raise TransportError(
                f"a piece of {num_bytes} bytes does not fit a staging buffer of "
                f"{self._limits.staging_bytes}",
                stage="transfer",
            )

    def _recv_piece(self, num_bytes: int, timeout_s: float | None) -> bytes:
        """Receive one piece; returns the digest that came with it."""
        frame_B = self._staging_B[: num_bytes + TRAILER_BYTES]
        turn = self._next_turn(num_bytes)
        # Not one byte of it may be there already.
        frame_B[num_bytes:] = ~_as_tensor(bytes(_DIGEST.size) + turn)
        self.channel.recv(frame_B, self._timeout(num_bytes, timeout_s))
        trailer = bytes(frame_B[num_bytes:].tolist())
        if trailer[_DIGEST.size :] != turn:
            self.channel.close()
            raise TransportError(
                f"message {self._num_messages} is not the {num_bytes} bytes that were announced",
                stage="transfer",
            )
        return trailer[: _DIGEST.size]

    def _next_turn(self, num_bytes: int) -> bytes:
        self._num_messages += 1
        return _TURN.pack(self._num_messages, num_bytes)

    def _digest(self, manifest: Manifest, piece_B: Tensor) -> bytes:
        if not self._limits.has_digest:
            return _DIGEST.pack(_NO_DIGEST)
        # Begun with the handoff's id: another handoff's bytes are wrong, whatever they are.
        seed = zlib.crc32(manifest.handoff_id.encode())
        payload: Any = piece_B.cpu().numpy()  # numpy's stubs know no buffers
        return _DIGEST.pack(_HAS_DIGEST | zlib.crc32(payload, seed))

    def _check_digest(self, manifest: Manifest, piece_B: Tensor, sent: bytes) -> None:
        if self._limits.has_digest and sent != self._digest(manifest, piece_B):
            raise CorruptPayload(
                f"message {self._num_messages}: its bytes are not those that were sent",
                stage="transfer",
            )

    def _timeout(self, num_bytes: int, timeout_s: float | None) -> float:
        return self._limits.timeout_s(num_bytes) if timeout_s is None else timeout_s


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
