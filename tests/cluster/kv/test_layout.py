"""Layouts as lines, and what keeps two workers from exchanging blocks."""

from dataclasses import fields, replace

import pytest

from cluster.kv.layout import MAY_DIFFER, KVLayout, LayoutDifference

LAYOUT = KVLayout(
    num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bf16", model_fingerprint="f"
)
OTHER = {
    "num_layers": 29, "num_kv_heads": 5, "head_dim": 128, "block_size": 32, "dtype": "fp32",
    "model_fingerprint": "g", "shard_index": 1, "num_shards": 2,
}  # fmt: skip


def test_a_line_is_read_back():
    for layout in (LAYOUT, replace(LAYOUT, **OTHER)):
        assert KVLayout.parse(layout.describe()) == layout


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("num_layers=30 ", "", "not the fields"),
        ("num_layers=30 ", "num_layers=30 num_layers=30 ", "not the fields"),
        ("num_layers=30", "num_layers=-3", "num_layers"),
        ("num_layers=30", "num_layers=0", "num_layers"),
        ("num_layers=30", "num_layers=3_0", "num_layers"),
        ("num_layers=30", "num_layers=99999999999", "num_layers"),
        ("block_size=16", "block_size=16777217", "block_size"),
        ("dtype=bf16", "dtype=int8", "dtype"),
        ("model_fingerprint=f", f"model_fingerprint={'f' * 2000}", "model_fingerprint"),
    ],
)
def test_a_line_that_is_none_is_refused_by_field(old: str, new: str, named: str):
    line = LAYOUT.describe()
    assert old in line
    with pytest.raises(ValueError, match=named):
        KVLayout.parse(line.replace(old, new))


@pytest.mark.parametrize("field", sorted(OTHER))
def test_every_field_is_compared_and_shown_with_both_values(field: str):
    """P-22: two differ and are converted; everything else is refused by name."""
    other = replace(LAYOUT, **{field: OTHER[field]})
    difference = LayoutDifference(field, str(getattr(LAYOUT, field)), str(OTHER[field]))
    assert LAYOUT.differences(other) == (difference,)
    assert str(difference) == f"{field}: {getattr(LAYOUT, field)} here, {OTHER[field]} there"
    assert LAYOUT.obstacle(other) == (None if field in MAY_DIFFER else difference)


def test_no_field_is_forgotten():
    assert set(OTHER) == {f.name for f in fields(KVLayout)}
    assert LAYOUT.differences(LAYOUT) == ()
    assert len(LAYOUT.differences(replace(LAYOUT, **OTHER))) == len(OTHER)
