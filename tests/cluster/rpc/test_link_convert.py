"""Link messages: what goes out comes in again, and nothing wrong comes in."""

from __future__ import annotations

import dataclasses
import random

import pytest
from google.protobuf.message import DecodeError

from cluster.errors import HandoffFailed
from cluster.handoff import AbortCause, AbortHandoff, Commit, Credit, ManifestBytes, Offer
from cluster.kv.layout import KVLayout
from cluster.request import LegKey, Peer
from cluster.rpc.link_convert import (
    hello_to_wire,
    layout_from_wire,
    peer_from_wire,
    signal_from_wire,
    signal_to_wire,
)
from cluster.transport.manifest import MAX_PACKED_BYTES
from cluster.wire import worker_pb2 as pb

OFFER = Offer(handoff_id="h", key=LegKey("r", 1, 2), num_blocks=3, num_tokens=40, num_preemptions=2)
SIGNALS = [
    OFFER,
    dataclasses.replace(OFFER, is_redirected=True),
    Credit(handoff_id="h"),
    ManifestBytes(payload=b"\x80"),
    Commit(handoff_id="h"),
    *(AbortHandoff(handoff_id="h", cause=cause, detail="why") for cause in AbortCause),
    AbortHandoff(handoff_id="h", cause=AbortCause.REFUSED, num_preemptions=2),
]
LAYOUT = KVLayout(
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    block_size=16,
    dtype="bf16",
    model_fingerprint="f",
    shard_index=1,
    num_shards=2,
)


@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: type(signal).__name__)
def test_signals_survive_the_wire(signal):
    data = signal_to_wire(signal).SerializeToString()
    assert signal_from_wire(pb.LinkMessage.FromString(data)) == signal


def test_a_hello_survives_the_wire():
    me = Peer(worker_id="p", incarnation="p-1", address="")
    hello = hello_to_wire(me, "d-1", LAYOUT).hello
    assert hello.receiver_incarnation == "d-1"
    assert peer_from_wire(hello.sender) == me
    assert layout_from_wire(hello.layout) == LAYOUT


def test_a_long_detail_is_cut():
    signal = AbortHandoff(handoff_id="h", cause=AbortCause.FAULT, detail="x" * 5000)
    assert len(signal_from_wire(signal_to_wire(signal)).detail) == 1024


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.LinkMessage(), "kind"),
        (pb.LinkMessage(hello=pb.LinkHello()), "kind"),
        (pb.LinkMessage(welcome=pb.LinkWelcome()), "kind"),
        (pb.LinkMessage(credit=pb.Credit()), "credit.handoff_id"),
        (pb.LinkMessage(commit=pb.Commit(handoff_id="x" * 257)), "commit.handoff_id"),
        (pb.LinkMessage(manifest=b""), "manifest"),
        (pb.LinkMessage(manifest=b"x" * (MAX_PACKED_BYTES + 1)), "manifest"),
        (pb.LinkMessage(abort=pb.AbortHandoff(handoff_id="h")), "abort.cause"),
        (pb.LinkMessage(offer=pb.Offer(handoff_id="h")), "offer.key.request_id"),
        (
            pb.LinkMessage(offer=pb.Offer(handoff_id="h", key=pb.LegKey(request_id="r"))),
            "offer.num_blocks",
        ),
        (
            pb.LinkMessage(
                offer=pb.Offer(
                    handoff_id="h",
                    key=pb.LegKey(request_id="r"),
                    num_blocks=(1 << 32) - 1,
                    num_tokens=1,
                )
            ),
            "offer.num_blocks",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(message: pb.LinkMessage, field: str):
    with pytest.raises(HandoffFailed) as caught:
        signal_from_wire(message)
    assert caught.value.field == field


@pytest.mark.parametrize("changes", [{"dtype": "fp8"}, {"num_layers": 0}, {"num_shards": 0}])
def test_a_layout_that_makes_no_sense_is_refused(changes):
    wire = hello_to_wire(Peer(worker_id="p", incarnation="p", address=""), "d", LAYOUT).hello.layout
    for name, value in changes.items():
        setattr(wire, name, value)
    with pytest.raises(HandoffFailed, match=next(iter(changes))):
        layout_from_wire(wire)


def test_mutations_raise_nothing_but_handoff_failed():
    rng = random.Random(5)
    for _ in range(5000):
        data = bytearray(signal_to_wire(rng.choice(SIGNALS)).SerializeToString())
        data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            signal_from_wire(pb.LinkMessage.FromString(bytes(data)))
        except (HandoffFailed, DecodeError):
            continue
