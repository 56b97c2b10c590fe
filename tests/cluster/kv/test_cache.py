"""Blocks as bytes: what goes out comes in again, and only where it was meant to."""

import threading

import pytest
import torch

from cluster.kv.cache import PagedCache
from cluster.kv.layout import KVLayout


def make_cache(num_blocks: int = 12, dtype: str = "fp32") -> PagedCache:
    layout = KVLayout(
        num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype=dtype, model_fingerprint="f"
    )
    return PagedCache(layout, num_blocks, torch.device("cpu"))


def random_blocks(cache: PagedCache, num_blocks: int) -> torch.Tensor:
    return torch.randint(0, 100, (num_blocks * cache.layout.block_bytes,), dtype=torch.uint8)


def export(cache: PagedCache, block_ids: list[int]) -> torch.Tensor:
    out = torch.empty(len(block_ids) * cache.layout.block_bytes, dtype=torch.uint8)
    cache.export_blocks(block_ids, out)
    return out


@pytest.mark.parametrize("block_ids", [[0], [3, 4, 5], [5, 4, 3], [11, 0, 1, 7, 8], []])
def test_import_then_export_gives_the_same_bytes(block_ids):
    cache = make_cache()
    data = random_blocks(cache, len(block_ids))
    cache.import_blocks(block_ids, data)
    assert torch.equal(export(cache, block_ids), data)


def test_import_touches_no_other_block():
    cache = make_cache()
    everything = random_blocks(cache, 12)
    cache.import_blocks(range(12), everything)
    cache.import_blocks([2, 9], random_blocks(cache, 2))
    others = [block for block in range(12) if block not in (2, 9)]
    rows = everything.view(12, -1)[others]
    assert torch.equal(export(cache, others), rows.flatten())


@pytest.mark.parametrize("layers", [range(1), range(1, 3), range(2, 3), range(3)], ids=str)
@pytest.mark.parametrize("block_ids", [[0], [3, 4, 5], [11, 0, 1, 7, 8]])
def test_layers_go_and_come_alone(layers, block_ids):
    """What is sent in parts by layers is the same bytes, and touches none of the others."""
    sender, receiver = make_cache(), make_cache()
    theirs, ours = random_blocks(sender, 12), random_blocks(receiver, 12)
    sender.import_blocks(range(12), theirs)
    receiver.import_blocks(range(12), ours)
    num_bytes = len(block_ids) * len(layers) * sender.layout.layer_bytes
    part = torch.empty(num_bytes, dtype=torch.uint8)
    sender.export_blocks(block_ids, part, layers)
    receiver.import_blocks(block_ids, part, layers)
    expected = ours.view(12, 3, -1).clone()
    for layer in layers:
        expected[block_ids, layer] = theirs.view(12, 3, -1)[block_ids, layer]
    assert torch.equal(export(receiver, list(range(12))), expected.flatten())


def test_a_wrong_number_of_bytes_is_refused():
    cache = make_cache()
    with pytest.raises(AssertionError):
        cache.import_blocks([1, 2], random_blocks(cache, 2), range(2))
    with pytest.raises(AssertionError):
        cache.import_blocks([1, 2], random_blocks(cache, 3))
    with pytest.raises(AssertionError):
        cache.export_blocks([1], random_blocks(cache, 1).view(torch.int8))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_written_by_slot_is_gathered_by_table(dtype):
    cache = make_cache(dtype=dtype)
    tables = torch.tensor([[7, 2], [0, 11]])
    k_HnD, v_HnD = torch.randn(2, 2, 16, 4).to(cache.dtype)
    blocks = tables.flatten().repeat_interleave(4)
    cache.write(1, cache.slot_index(blocks, torch.arange(16) % 4), k_HnD, v_HnD)
    gathered = cache.gather(1, cache.row_index(tables)).view(2, 2, 2, 8, 4)
    for written, read in ((k_HnD, gathered[0]), (v_HnD, gathered[1])):
        assert torch.equal(read[0], written[:, :8])
        assert torch.equal(read[1], written[:, 8:])
    for layer in (0, 2):
        assert not cache.gather(layer, cache.row_index(tables)).any()


def test_one_block_holds_all_layers_of_its_tokens():
    cache = make_cache()
    for layer in range(3):
        slots = cache.slot_index(torch.tensor([5]), torch.tensor([3]))
        cache.write(layer, slots, torch.full((2, 1, 4), layer + 1.0), torch.full((2, 1, 4), 10.0))
    tokens = export(cache, [5]).view(torch.float32).view(3, 2, 2, 4, 4)
    assert tokens[:, 0, :, 3].unique().tolist() == [1.0, 2.0, 3.0]
    assert (tokens[:, 1, :, 3] == 10).all()
    assert not tokens[:, :, :, :3].any()


def test_cleared_blocks_are_zero_and_neighbours_stay():
    cache = make_cache()
    data = random_blocks(cache, 3) + 1
    cache.import_blocks([3, 4, 5], data)
    cache.clear_blocks([4])
    size = cache.layout.block_bytes
    assert not export(cache, [4]).any()
    assert torch.equal(export(cache, [3, 5]), torch.cat([data[:size], data[2 * size :]]))


def test_a_link_thread_may_export_and_import_while_steps_write():
    cache = make_cache(num_blocks=64)
    mine = random_blocks(cache, 8)
    cache.import_blocks(range(8), mine)
    faults: list[int] = []

    def link() -> None:
        for turn in range(200):
            cache.import_blocks(range(8 * (1 + turn % 2), 8 * (2 + turn % 2)), mine)
            if not torch.equal(export(cache, list(range(8))), mine):
                faults.append(turn)

    thread = threading.Thread(target=link)
    thread.start()
    slots = cache.slot_index(torch.arange(32, 64), torch.zeros(32, dtype=torch.long))
    while thread.is_alive():
        cache.write(0, slots, torch.ones(2, 32, 4), torch.ones(2, 32, 4))
    thread.join()
    assert not faults
    assert torch.equal(export(cache, list(range(8, 16))), mine)
