"""Moving an export through one reused staging buffer, in few large messages.

The buffer is allocated and touched once, when the link opens; pages that are touched first
during a transfer would cost more than the transfer.

    staging   | piece: whole blocks, gathered ... | trailer |  (never sent: the rest)
              0                                   n       n+16

The trailer counts the channel's messages and states the piece's bytes. gloo takes a message that
is shorter than the buffer without a word, and what then stands in the buffer is an earlier
request's KV: the trailer is what proves that the piece arrived whole and in its turn.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cluster.transport.base import Channel, ChannelClosed, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from cluster.transport.manifest import Manifest

    MoveBlocks = Callable[[int, int, Tensor], None]
    """(first block of the export, number of blocks, their bytes in the staging buffer)."""

_TRAILER = struct.Struct("<QQ")
TRAILER_BYTES = _TRAILER.size


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """How big a piece may be, and how long it may take."""

    staging_bytes: int = 16 << 20
    floor_s: float = 5.0
    """A piece may always take so long; also the time to find a silent peer in a transfer."""
    min_bytes_per_s: float = 20e6
    """Slower than this is taken for a peer that is gone."""

    def timeout_s(self, num_bytes: int) -> float:
        """Seconds that a message of ``num_bytes`` may take."""
        return self.floor_s + num_bytes / self.min_bytes_per_s


class StagedChannel:
    """One link's channel with its staging buffer; used on the link's thread."""

    def __init__(self, channel: Channel, limits: TransferLimits, device: str) -> None:
        self.channel = channel
        self._limits = limits
        self._num_messages = 0
        self._staging_B = torch.empty(
            limits.staging_bytes + TRAILER_BYTES, dtype=torch.uint8, device=device
        )
        self._staging_B.zero_()  # touches every page

    def send(self, manifest: Manifest, export: MoveBlocks, timeout_s: float | None) -> None:
        """Gather and send every piece of ``manifest``; ``export`` fills the staging buffer.

        The peer counts on the bytes once it has the manifest: if they cannot be sent, whatever
        the reason, the channel is closed.
        """
        try:
            for start, num_blocks in manifest.pieces():
                num_bytes = num_blocks * manifest.block_bytes
                export(start, num_blocks, self._staging_B[:num_bytes])
                frame_B = self._staging_B[: num_bytes + TRAILER_BYTES]
                frame_B[num_bytes:] = self._next_trailer(num_bytes)
                self.channel.send(frame_B, self._timeout(num_bytes, timeout_s))
        except BaseException:
            self.channel.close()
            raise

    def recv(self, manifest: Manifest, scatter: MoveBlocks, timeout_s: float | None) -> None:
        """Receive every piece of ``manifest``; ``scatter`` takes each out of the buffer.

        An error of ``scatter`` is raised after the last piece: the bytes that follow are the
        next handoff's, and it shall not find these.
        """
        failure: Exception | None = None
        for start, num_blocks in manifest.pieces():
            num_bytes = num_blocks * manifest.block_bytes
            self._recv_piece(num_bytes, timeout_s)
            if failure is None:
                try:
                    scatter(start, num_blocks, self._staging_B[:num_bytes])
                except ChannelClosed:
                    raise
                except Exception as error:
                    failure = error
        if failure is not None:
            raise failure

    def check_fits(self, manifest: Manifest) -> None:
        """Raise TransportError where a piece is bigger than the staging buffer."""
        num_bytes = manifest.piece_blocks * manifest.block_bytes
        if num_bytes > self._limits.staging_bytes:
            raise TransportError(
                f"a piece of {num_bytes} bytes does not fit a staging buffer of "
                f"{self._limits.staging_bytes}",
                stage="transfer",
            )

    def _recv_piece(self, num_bytes: int, timeout_s: float | None) -> None:
        frame_B = self._staging_B[: num_bytes + TRAILER_BYTES]
        expected_B = self._next_trailer(num_bytes)
        frame_B[num_bytes:] = ~expected_B  # not one byte of it may be there already
        self.channel.recv(frame_B, self._timeout(num_bytes, timeout_s))
        if not torch.equal(frame_B[num_bytes:].cpu(), expected_B):
            self.channel.close()
            raise TransportError(
                f"message {self._num_messages} is not the {num_bytes} bytes that were announced",
                stage="transfer",
            )

    def _next_trailer(self, num_bytes: int) -> Tensor:
        self._num_messages += 1
        packed = bytearray(_TRAILER.pack(self._num_messages, num_bytes))
        return torch.frombuffer(packed, dtype=torch.uint8)

    def _timeout(self, num_bytes: int, timeout_s: float | None) -> float:
        return self._limits.timeout_s(num_bytes) if timeout_s is None else timeout_s
