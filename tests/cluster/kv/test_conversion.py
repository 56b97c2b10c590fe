"""Blocks of another size and element type: every token lands where it belongs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from cluster.kv.cache import TORCH_DTYPES, PagedCache
from cluster.kv.layout import KVLayout

LAYOUT = KVLayout(
    num_layers=3, num_kv_heads=2, head_dim=4, block_size=16, dtype="fp32", model_fingerprint="f"
)
NUM_BLOCKS = 40
PAIRS = [
    (theirs, ours)
    for theirs in ((16, "fp32"), (32, "bf16"), (16, "fp16"), (24, "fp32"))
    for ours in ((16, "bf16"), (32, "fp32"), (32, "fp16"), (16, "fp32"))
    if theirs != ours
]


def make_cache(block_size: int, dtype: str) -> PagedCache:
    layout = replace(LAYOUT, block_size=block_size, dtype=dtype)
    cache = PagedCache(layout, NUM_BLOCKS, torch.device("cpu"))
    # What an earlier request left behind, at its worst.
    cache.import_blocks(
        range(NUM_BLOCKS), torch.full((NUM_BLOCKS * layout.block_bytes,), 255).byte()
    )
    return cache


def make_table(cache: PagedCache, num_tokens: int, dice: random.Random) -> list[int]:
    """Enough blocks for the tokens, no two of them neighbours in order."""
    return dice.sample(range(NUM_BLOCKS), cache.layout.num_blocks_for(num_tokens))


def write(cache: PagedCache, table: list[int], kv_LKHTD: torch.Tensor) -> None:
    """Fill blocks as a prefill does: the last one is cleared, then partly written."""
    cache.clear_blocks(table[-1:])
    size = cache.layout.block_size
    positions = torch.arange(kv_LKHTD.shape[3])
    slots = cache.slot_index(torch.tensor(table)[positions // size], positions % size)
    for layer, (k_HTD, v_HTD) in enumerate(kv_LKHTD):
        cache.write(layer, slots, k_HTD, v_HTD)


def read(cache: PagedCache, table: list[int]) -> torch.Tensor:
    """K and V ``[layers, 2, heads, tokens, dim]`` of whole blocks."""
    rows = cache.row_index(torch.tensor([table]))
    layout = cache.layout
    layers = [
        cache.gather(layer, rows).view(2, layout.num_kv_heads, -1, layout.head_dim).clone()
        for layer in range(layout.num_layers)
    ]
    return torch.stack(layers)


def hand_over(
    sender: PagedCache,
    export: list[int],
    receiver: PagedCache,
    table: list[int],
    num_tokens: int,
    piece_blocks: int,
    layers: range = range(3),
) -> None:
    """Move an export, or some layers of it, in pieces, as a link does."""
    theirs = sender.layout
    for start in range(0, len(export), piece_blocks):
        piece = export[start : start + piece_blocks]
        num_bytes = len(piece) * len(layers) * theirs.layer_bytes
        staged = torch.empty(num_bytes, dtype=torch.uint8)
        sender.export_blocks(piece, staged, layers)
        first = start * theirs.block_size
        length = min(len(piece) * theirs.block_size, num_tokens - first)
        receiver.import_foreign(table, range(first, first + length), staged, theirs, layers)


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=str)
def test_an_export_is_converted_token_by_token(theirs: tuple[int, str], ours: tuple[int, str]):
    """P-22: block sizes 16, 24 and 32, fp32, bf16 and fp16, lengths and pieces at random."""
    dice = random.Random(f"{theirs}{ours}")
    for num_tokens in [1, 15, 16, 17, 32, 33, *(dice.randrange(1, 300) for _ in range(6))]:
        sender, receiver = make_cache(*theirs), make_cache(*ours)
        export, table = (make_table(c, num_tokens, dice) for c in (sender, receiver))
        kv = torch.randn(3, 2, 2, num_tokens, 4)
        write(sender, export, kv)
        hand_over(sender, export, receiver, table, num_tokens, dice.randrange(1, 6))
        converted = read(receiver, table)
        expected = kv.to(sender.dtype).float().to(receiver.dtype)
        assert torch.equal(converted[..., :num_tokens, :], expected), num_tokens
        assert not converted[..., num_tokens:, :].any(), "the end of a block is read, masked"


@pytest.mark.parametrize(("theirs", "ours"), PAIRS[:6], ids=str)
def test_layers_are_converted_part_by_part(theirs: tuple[int, str], ours: tuple[int, str]):
    """P-22: and each part clears the end of a block in its own layers only."""
    dice = random.Random(f"layers{theirs}{ours}")
    for num_tokens in (1, 17, 45):
        sender, receiver = make_cache(*theirs), make_cache(*ours)
        export, table = (make_table(c, num_tokens, dice) for c in (sender, receiver))
        kv = torch.randn(3, 2, 2, num_tokens, 4)
        write(sender, export, kv)
        expected = kv.to(sender.dtype).float().to(receiver.dtype)
        for layers in (range(1), range(1, 3)):
            hand_over(sender, export, receiver, table, num_tokens, 2, layers)
            converted = read(receiver, table)[: layers.stop]
            assert torch.equal(converted[..., :num_tokens, :], expected[: layers.stop])
            assert not converted[..., num_tokens:, :].any()


def test_blocks_of_others_stay_as_they_are():
    sender, receiver = make_cache(16, "fp32"), make_cache(32, "bf16")
    before = receiver._pool_NB.clone()
    write(sender, [1, 2, 3], torch.randn(3, 2, 2, 40, 4))
    hand_over(sender, [1, 2, 3], receiver, [9, 4], 40, 2)
    others = [block for block in range(NUM_BLOCKS) if block not in (4, 9)]
    assert torch.equal(receiver._pool_NB[others], before[others])
    assert not torch.equal(receiver._pool_NB[[4, 9]], before[[4, 9]])


def test_what_fp16_cannot_hold_is_saturated_and_a_nan_stays_one():
    sender, receiver = make_cache(16, "bf16"), make_cache(16, "fp16")
    kv = torch.full((3, 2, 2, 4, 4), 1e6)
    kv[..., 1, :], kv[..., 2, :] = -1e6, float("nan")
    write(sender, [0], kv)
    hand_over(sender, [0], receiver, [5], 4, 1)
    converted = read(receiver, [5])
    assert (converted[..., 0, :] == 65504).all()
    assert (converted[..., 1, :] == -65504).all()
    assert converted[..., 2, :].isnan().all()


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_a_piece_of_the_wrong_size_is_refused(dtype: str):
    cache = make_cache(32, "fp32")
    theirs = replace(LAYOUT, dtype=dtype)
    with pytest.raises(AssertionError):
        cache.import_foreign([1], range(17), torch.zeros(theirs.block_bytes).byte(), theirs)


def test_own_kv_is_used_as_it_is_read_back():
    cache = make_cache(16, "bf16")
    k_HnD, v_HnD = torch.randn(2, 2, 16, 4)
    cache.write(0, cache.slot_index(torch.zeros(16).long(), torch.arange(16)), k_HnD, v_HnD)
    gathered = cache.gather(0, cache.row_index(torch.tensor([[0]]))).view(2, 2, 16, 4)
    assert torch.equal(gathered[0].float(), cache.rounded(k_HnD))
    assert torch.equal(gathered[1].float(), cache.rounded(v_HnD))
    assert cache.rounded(k_HnD.bfloat16()).dtype is torch.bfloat16
