"""The staging buffer: what a receiver takes out of it is what this message brought."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.kv.layout import KVLayout
from cluster.request import LegKey
from cluster.transport.base import Channel, TransportError
from cluster.transport.manifest import Manifest
from cluster.transport.staging import TRAILER_BYTES, StagedChannel, TransferLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

LAYOUT = KVLayout(
    num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="fp32", model_fingerprint="x"
)
LIMITS = TransferLimits(staging_bytes=4 * LAYOUT.block_bytes, floor_s=1, min_bytes_per_s=1000)


class Tape(Channel):
    """Keeps what was sent and plays it back, changed by ``spoil`` first."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[torch.Tensor] = []
        self.timeouts: list[float] = []
        self.spoil: Callable[[torch.Tensor], torch.Tensor] = lambda message_B: message_B

    def _send(self, data_B: torch.Tensor, timeout_s: float) -> None:
        self.messages.append(data_B.clone())
        self.timeouts.append(timeout_s)

    def _recv(self, into_B: torch.Tensor, timeout_s: float) -> None:
        message_B = self.spoil(self.messages.pop(0))
        into_B[: message_B.numel()].copy_(message_B)

    def _release(self) -> None:
        pass


def make_manifest(num_blocks: int) -> Manifest:
    num_tokens = num_blocks * LAYOUT.block_size
    manifest = Manifest.of("h", LegKey("r", 0, 0), LAYOUT, num_tokens=num_tokens, output_ids=(1,))
    return manifest.cut(LIMITS.staging_bytes)


def make_ends() -> tuple[Tape, StagedChannel, StagedChannel]:
    tape = Tape()
    return tape, StagedChannel(tape, LIMITS, "cpu"), StagedChannel(tape, LIMITS, "cpu")


def fill(value: int):
    return lambda start, num_blocks, out_B: out_B.fill_(value)


def nothing(start: int, num_blocks: int, staged_B: torch.Tensor) -> None:
    return None


def test_an_export_goes_in_pieces_with_a_timeout_by_size():
    tape, sender, receiver = make_ends()
    manifest, taken = make_manifest(9), []
    sender.send(manifest, lambda start, n, out_B: out_B.fill_(start), None)
    assert [message.numel() for message in tape.messages] == [
        n * LAYOUT.block_bytes + TRAILER_BYTES for n in (4, 4, 1)
    ]
    assert tape.timeouts == [1 + n * LAYOUT.block_bytes / 1000 for n in (4, 4, 1)]
    receiver.recv(manifest, lambda start, n, B: taken.append((start, n, int(B[0]))), None)
    assert taken == [(0, 4, 0), (4, 4, 4), (8, 1, 8)]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda message_B: message_B[:-1],
        lambda message_B: message_B[: LAYOUT.block_bytes],
        lambda message_B: message_B[:0],
    ],
    ids=["a byte short", "half", "nothing"],
)
def test_a_short_message_is_noticed_and_not_taken_for_an_earlier_one(spoil):
    tape, sender, receiver = make_ends()
    manifest = make_manifest(2)
    sender.send(manifest, fill(1), None)
    receiver.recv(manifest, nothing, None)
    sender.send(manifest, fill(2), None)
    tape.spoil = spoil
    with pytest.raises(TransportError, match="message 2 is not the"):
        receiver.recv(manifest, nothing, None)
    assert tape.is_dead


def test_a_message_out_of_turn_is_noticed():
    tape, sender, receiver = make_ends()
    for value in (1, 2):
        sender.send(make_manifest(2), fill(value), None)
    del tape.messages[0]
    with pytest.raises(TransportError, match="message 1 is not the"):
        receiver.recv(make_manifest(2), nothing, None)


def test_a_piece_that_fits_no_buffer_is_refused_before_it_comes():
    _, _, receiver = make_ends()
    whole = Manifest.of("h", LegKey("r", 0, 0), LAYOUT, num_tokens=20, output_ids=(1,))
    with pytest.raises(TransportError, match="does not fit"):
        receiver.check_fits(whole)
    receiver.check_fits(whole.cut(LIMITS.staging_bytes))
