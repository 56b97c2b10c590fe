"""The manifest: what it says survives the wire, and nothing wrong gets in."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import msgpack
import pytest

from cluster.errors import HandoffFailed
from cluster.kv.layout import KVLayout
from cluster.request import LegKey, TokenLogprobs
from cluster.transport.manifest import MAX_PACKED_BYTES, Manifest

LAYOUT = KVLayout(
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    block_size=16,
    dtype="bf16",
    model_fingerprint="abc",
)


def make_manifest(num_tokens: int = 512, output_ids: tuple[int, ...] = (7,)) -> Manifest:
    key = LegKey("r", 1, 2)
    return Manifest.of("h", key, LAYOUT, num_tokens=num_tokens, output_ids=output_ids)


def make_segment(start: int, stop: int) -> Manifest:
    return Manifest.of(
        "h", LegKey("r", 1, 2), LAYOUT, num_tokens=512, output_ids=(7,), blocks=range(start, stop)
    )


def make_part(blocks: range, layers: range) -> Manifest:
    return Manifest.of(
        "h", LegKey("r", 1, 2), LAYOUT, num_tokens=512, output_ids=(7,), blocks=blocks,
        layers=layers,
    )  # fmt: skip


def as_map(manifest: Manifest) -> dict[str, object]:
    return {f.name: getattr(manifest, f.name) for f in fields(manifest)}


def test_survives_the_wire():
    manifest = replace(make_manifest(output_ids=tuple(range(1000))), num_preemptions=3)
    assert Manifest.unpack(manifest.pack()) == manifest


def test_carries_the_logprobs_of_the_first_token():
    logprobs = TokenLogprobs(-0.5, ((7, -0.5), (9, -9999.0)))
    manifest = replace(make_manifest(), logprobs=logprobs)
    assert Manifest.unpack(manifest.pack()) == manifest


def test_the_tokens_go_with_the_last_segment_only():
    segments = [make_segment(0, 8), make_segment(8, 31), make_segment(31, 32)]
    assert [m.is_last for m in segments] == [False, False, True]
    assert [m.output_ids for m in segments] == [(), (), (7,)]
    assert sum(m.num_bytes for m in segments) == make_manifest().num_bytes
    for manifest in segments:
        assert Manifest.unpack(manifest.pack()) == manifest
        manifest.check_layout(LAYOUT)


def test_the_tokens_go_with_the_last_layers_of_the_last_block():
    whole = range(32)
    parts = [make_part(whole, range(9)), make_part(whole, range(9, 29))]
    last = make_part(whole, range(29, 30))
    assert [m.is_last for m in (*parts, last)] == [False, False, True]
    assert [m.output_ids for m in (*parts, last)] == [(), (), (7,)]
    assert sum(m.num_bytes for m in (*parts, last)) == make_manifest().num_bytes
    assert last.block_bytes == LAYOUT.layer_bytes
    for manifest in (*parts, last, make_part(range(8), range(30))):
        assert Manifest.unpack(manifest.pack()) == manifest
        assert (manifest.blocks.stop, manifest.layers.stop) <= (32, 30)
        manifest.check_layout(LAYOUT)


def make_tokens_alone() -> Manifest:
    return make_part(range(32, 32), range(0))


def test_the_tokens_go_alone_where_all_blocks_left_before_they_were_drawn():
    manifest = make_tokens_alone()
    assert (manifest.num_bytes, manifest.is_last, manifest.output_ids) == (0, True, (7,))
    cut = manifest.cut(1, turn=9)
    assert (list(cut.pieces()), cut.turn, cut.block_bytes) == ([], 9, 0)
    assert Manifest.unpack(cut.pack()) == cut
    cut.check_layout(LAYOUT)


def test_the_last_layers_of_the_last_block_may_go_before_the_tokens():
    manifest = Manifest.of("h", LegKey("r", 1, 2), LAYOUT, num_tokens=512, output_ids=())
    assert not manifest.is_last
    Manifest.unpack(manifest.pack()).check_layout(LAYOUT)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"is_last": False, "output_ids": ()}, "num_bytes"),
        ({"num_bytes": 10}, "num_blocks"),
        ({"num_blocks": 1}, "num_layers"),
        ({"num_blocks": 1, "num_layers": 1, "piece_blocks": 1}, "num_bytes"),
        ({"num_blocks": 1, "num_layers": 1, "num_bytes": 10}, "piece_blocks"),
    ],
    ids=str,
)
def test_what_holds_no_bytes_holds_nothing_but_the_tokens(changes, name):
    with pytest.raises(HandoffFailed, match=rf"manifest\.{name}"):
        Manifest.unpack(replace(make_tokens_alone(), **changes).pack())


@pytest.mark.parametrize("first_block", [31, 33])
def test_the_tokens_alone_stand_behind_the_last_block(first_block):
    with pytest.raises(HandoffFailed, match=r"manifest\.num_blocks"):
        replace(make_tokens_alone(), first_block=first_block).check_layout(LAYOUT)


def test_a_part_is_cut_into_pieces_of_whole_blocks_with_its_layers():
    manifest = make_part(range(32), range(10)).cut(11 * 10 * LAYOUT.layer_bytes)
    assert list(manifest.pieces()) == [(0, 11), (11, 11), (22, 10)]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"first_layer": 21}, "num_layers"),
        ({"num_layers": 30}, "num_bytes"),
        ({"num_layers": 11}, "num_bytes"),
        ({"is_last": True}, "num_blocks"),
    ],
    ids=str,
)
def test_layers_outside_the_model_or_the_export_are_refused(changes, name):
    with pytest.raises(HandoffFailed, match=rf"manifest\.{name}"):
        replace(make_part(range(32), range(10)), **changes).check_layout(LAYOUT)


@pytest.mark.parametrize(
    "changes", [{"first_block": 25}, {"first_block": 23, "is_last": True}, {"is_last": True}]
)
def test_a_segment_outside_its_export_is_refused(changes):
    with pytest.raises(HandoffFailed, match=r"manifest\.num_blocks"):
        replace(make_segment(0, 8), **changes).check_layout(LAYOUT)


def test_describes_a_512_token_prompt_in_32_blocks():
    manifest = make_manifest()
    assert (manifest.num_blocks, manifest.num_bytes) == (32, 512 * 23_040)
    manifest.check_layout(LAYOUT)


@pytest.mark.parametrize(
    ("max_blocks", "expected"),
    [
        (100, [(0, 32)]),
        (32, [(0, 32)]),
        (31, [(0, 31), (31, 1)]),
        (11, [(0, 11), (11, 11), (22, 10)]),
    ],
)
def test_is_cut_into_pieces_as_big_as_they_can_be(max_blocks, expected):
    manifest = make_manifest().cut(max_blocks * LAYOUT.block_bytes + 1)
    assert list(manifest.pieces()) == expected
    assert Manifest.unpack(manifest.pack()) == manifest


def test_a_block_is_never_cut():
    with pytest.raises(HandoffFailed, match="does not fit"):
        make_manifest().cut(LAYOUT.block_bytes - 1)


@pytest.mark.parametrize(
    "other", [{"num_layers": 9}, {"num_shards": 2}, {"model_fingerprint": "x"}], ids=str
)
def test_another_layout_is_named_with_both_values(other):
    """P-22: what no conversion bridges is refused by name."""
    (name, value), *_ = other.items()
    with pytest.raises(HandoffFailed, match=f"{name}: {value} here, {getattr(LAYOUT, name)} there"):
        make_manifest().check_layout(replace(LAYOUT, **other))


@pytest.mark.parametrize("other", [{"block_size": 32}, {"dtype": "fp32"}], ids=str)
def test_a_layout_that_can_be_converted_is_taken(other):
    """P-22: block size and element type may differ."""
    make_manifest().check_layout(replace(LAYOUT, **other))


def test_blocks_and_bytes_must_fit_the_layout():
    manifest = make_manifest()
    with pytest.raises(HandoffFailed, match="num_blocks"):
        replace(manifest, num_tokens=513).check_layout(LAYOUT)
    with pytest.raises(HandoffFailed, match="num_bytes"):
        replace(manifest, num_bytes=32).check_layout(LAYOUT)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 1),
        ("version", -1),
        ("version", "1"),
        ("handoff_id", ""),
        ("handoff_id", "x" * 257),
        ("handoff_id", b"h"),
        ("request_id", None),
        ("attempt", -1),
        ("attempt", True),
        ("choice", 1.0),
        ("layout", ["a"]),
        ("layout", "x" * 2049),
        ("num_tokens", 0),
        ("num_tokens", 1 << 30),
        ("turn", -1),
        ("num_preemptions", -1),
        ("num_preemptions", 1 << 30),
        ("num_preemptions", 1.0),
        ("first_block", -1),
        ("num_blocks", -32),
        ("num_blocks", 31),
        ("first_layer", -1),
        ("first_layer", 1 << 30),
        ("first_layer", None),
        ("num_layers", 0),
        ("num_layers", 1.0),
        ("num_layers", True),
        ("num_bytes", 0),
        ("num_bytes", -1),
        ("num_bytes", (1 << 64) - 1),
        ("num_bytes", 512 * 23_040 + 1),
        ("piece_blocks", 0),
        ("piece_blocks", 33),
        ("is_last", False),
        ("is_last", 1),
        ("output_ids", []),
        ("output_ids", "7"),
        ("output_ids", [-1]),
        ("output_ids", [1 << 31]),
        ("output_ids", [7.0]),
        ("output_ids", [True]),
        ("logprobs", 1.0),
        ("logprobs", [-1, []]),
        ("logprobs", [float("nan"), []]),
        ("logprobs", [-1.0, [[7]]]),
        ("logprobs", [-1.0, [[-7, -1.0]]]),
        ("logprobs", [-1.0, [[7, -1.0]] * 2000]),
    ],
)
def test_every_field_is_checked_and_named(name, value):
    packed = msgpack.packb(as_map(make_manifest()) | {name: value})
    with pytest.raises(HandoffFailed) as caught:
        Manifest.unpack(packed)
    others = {"encoding", "num_bytes", "output_ids"}
    assert name in caught.value.message or caught.value.field in others


def test_missing_and_unknown_fields_are_refused():
    whole = as_map(make_manifest())
    for name in whole:
        with pytest.raises(HandoffFailed, match=name):
            Manifest.unpack(msgpack.packb({k: v for k, v in whole.items() if k != name}))
    with pytest.raises(HandoffFailed, match=r"manifest\.shell"):
        Manifest.unpack(msgpack.packb(whole | {"shell": "rm"}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        b"\x80",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        msgpack.packb([1, 2]),
        msgpack.packb({1: 2}),
        msgpack.packb({"version": msgpack.ExtType(1, b"x")}),
        msgpack.packb({"version": msgpack.Timestamp(1)}),
        b"\xa1\xff",
        b"x" * (MAX_PACKED_BYTES + 1),
    ],
    ids=range(12),
)
def test_garbage_is_refused(data):
    with pytest.raises(HandoffFailed):
        Manifest.unpack(data)


def test_mutations_raise_nothing_but_handoff_failed():
    rng = random.Random(4)
    whole = make_manifest().pack()
    num_refused = 0
    for _ in range(20_000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[start] = rng.randrange(256)
                case 1:
                    del data[start : start + rng.randint(1, 8)]
                case 2:
                    data[start:start] = rng.randbytes(rng.randint(1, 8))
            if not data:
                break
        try:
            manifest = Manifest.unpack(bytes(data))
        except HandoffFailed:
            num_refused += 1
        else:
            assert sum(num for _, num in manifest.pieces()) == manifest.num_blocks
    assert num_refused > 10_000
