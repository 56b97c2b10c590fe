"""Bytes that were swapped out come back as they were, to whatever blocks."""

import pytest
import torch

from cluster.kv.cache import PagedCache
from cluster.kv.layout import KVLayout
from cluster.kv.swap_memory import SwapMemory


@pytest.fixture
def cache():
    layout = KVLayout(
        num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="bf16", model_fingerprint="f"
    )
    cache = PagedCache(layout, 12, torch.device("cpu"))
    random = torch.randint(256, (12 * cache.layout.block_bytes,), dtype=torch.uint8)
    cache.import_blocks(range(12), random)
    return cache


def read(cache, block_ids):
    out = torch.empty(len(block_ids) * cache.layout.block_bytes, dtype=torch.uint8)
    cache.export_blocks(block_ids, out)
    return out.view(len(block_ids), -1)


def test_what_went_out_comes_back_elsewhere(cache):
    memory = SwapMemory(cache, 6)
    before = read(cache, range(12))
    gone, slots, back = [7, 2, 3, 4, 11], [0, 5, 3, 4, 1], [1, 0, 8, 9, 10]
    memory.copy_out(list(zip(gone, slots, strict=True)))
    cache.clear_blocks(gone)
    memory.copy_back(list(zip(slots, back, strict=True)))
    assert torch.equal(read(cache, back), before[gone])
    assert torch.equal(read(cache, [5, 6]), before[[5, 6]])
    assert not read(cache, gone).any()


def test_nothing_to_copy_is_nothing(cache):
    before = read(cache, range(12))
    memory = SwapMemory(cache, 6)
    memory.copy_out(())
    memory.copy_back(())
    assert torch.equal(read(cache, range(12)), before)


def test_memory_that_is_not_there_is_refused(cache):
    with pytest.raises((OSError, OverflowError)):
        SwapMemory(cache, 1 << 58)
