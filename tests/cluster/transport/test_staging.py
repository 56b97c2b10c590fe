"""The staging buffer: what a receiver takes out of it is what this message brought."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from cluster.kv.layout import KVLayout
from cluster.request import LegKey
from cluster.transport.base import Channel, ChannelClosed, CorruptPayload, TransportError
from cluster.transport.manifest import Manifest
from cluster.transport.staging import TRAILER_BYTES, StagedChannel, TransferLimits

if TYPE_CHECKING:
    from collections.abc import Callable

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


def make_ends(
    *, sender_digests: bool = False, receiver_digests: bool = False
) -> tuple[Tape, StagedChannel, StagedChannel]:
    tape = Tape()
    sender, receiver = (
        StagedChannel(tape, replace(LIMITS, has_digest=has_digest), "cpu")
        for has_digest in (sender_digests, receiver_digests)
    )
    return tape, sender, receiver


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


def test_what_is_left_of_a_lost_links_transfer_is_nobody_elses():
    """Its next piece is longer than what the transfer behind it waits for: gloo ends on that."""
    tape, sender, receiver = make_ends()
    sender.send(make_manifest(8), fill(1), None)
    sender.send(make_manifest(1), fill(2), None)

    def lost(start: int, num_blocks: int, staged_B: torch.Tensor) -> None:
        raise ChannelClosed("link lost", stage="transfer")

    for num_blocks in (8, 1):
        with pytest.raises(ChannelClosed):
            receiver.recv(make_manifest(num_blocks), lost, None)
    assert tape.is_dead
    assert len(tape.messages) == 2


def test_a_piece_that_fits_no_buffer_is_refused_before_it_comes():
    _, _, receiver = make_ends()
    whole = Manifest.of("h", LegKey("r", 0, 0), LAYOUT, num_tokens=20, output_ids=(1,))
    with pytest.raises(TransportError, match="does not fit"):
        receiver.check_fits(whole)
    receiver.check_fits(whole.cut(LIMITS.staging_bytes))


@pytest.mark.parametrize("offset", [0, 1, 77, -TRAILER_BYTES - 1, -TRAILER_BYTES])
def test_a_changed_byte_is_found_by_the_digest_and_the_channel_goes_on(offset: int):
    tape, sender, receiver = make_ends(sender_digests=True, receiver_digests=True)
    manifest, taken = make_manifest(9), []

    def spoil(message_B: torch.Tensor) -> torch.Tensor:
        message_B[offset] ^= 0x40
        tape.spoil = lambda message_B: message_B
        return message_B

    def take(start: int, num_blocks: int, staged_B: torch.Tensor) -> None:
        taken.append(start)

    tape.spoil = spoil
    sender.send(manifest, fill(1), None)
    with pytest.raises(CorruptPayload):
        receiver.recv(manifest, take, None)
    assert taken == [], "nothing of a corrupted handoff is kept, and nothing after it"
    assert tape.messages == [], "its other pieces were received"
    sender.send(manifest, fill(2), None)
    receiver.recv(manifest, take, None)
    assert taken == [0, 4, 8]


def test_without_a_digest_a_changed_byte_is_not_noticed():
    tape, sender, receiver = make_ends()
    tape.spoil = lambda message_B: message_B.index_fill_(0, torch.tensor([0]), 7)
    sender.send(make_manifest(1), fill(1), None)
    receiver.recv(make_manifest(1), nothing, None)


def test_another_handoffs_bytes_are_found_by_the_digest():
    _, sender, receiver = make_ends(sender_digests=True, receiver_digests=True)
    sender.send(make_manifest(1), fill(1), None)
    with pytest.raises(CorruptPayload):
        receiver.recv(replace(make_manifest(1), handoff_id="other"), nothing, None)


@pytest.mark.parametrize(("sends", "checks"), [(True, False), (False, False), (True, True)])
def test_a_digest_is_only_missed_where_it_is_asked_for(sends: bool, checks: bool):
    _, sender, receiver = make_ends(sender_digests=sends, receiver_digests=checks)
    sender.send(make_manifest(1), fill(1), None)
    receiver.recv(make_manifest(1), nothing, None)
    _, sender, receiver = make_ends(sender_digests=False, receiver_digests=True)
    sender.send(make_manifest(1), fill(1), None)
    with pytest.raises(CorruptPayload):
        receiver.recv(make_manifest(1), nothing, None)


@pytest.mark.parametrize(
    ("suits", "expected"),
    [
        pytest.param(None, 4, id="whatever fits the buffer"),
        pytest.param(2 * LAYOUT.block_bytes + 1, 2, id="smaller ones let both ends work at once"),
        pytest.param(LAYOUT.block_bytes // 2, 1, id="one block is the least"),
        pytest.param(100 * LAYOUT.block_bytes, 4, id="more than the buffer holds"),
    ],
)
def test_pieces_fit_the_buffer_and_suit_the_channel(suits, expected):
    tape, sender, receiver = make_ends()
    tape.piece_bytes = suits
    manifest = sender.cut(make_manifest(6), turn=7)
    assert (manifest.piece_blocks, manifest.turn) == (expected, 7)
    sender.send(manifest, fill(5), None)
    seen: list[tuple[int, int]] = []
    receiver.recv(manifest, lambda start, num, _B: seen.append((start, num)), None)
    assert sum(num for _, num in seen) == 6
    assert seen[0] == (0, expected)
