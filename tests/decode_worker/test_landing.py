"""Writing an import while it is being given up: short waits, and not one byte too late."""

import itertools
import threading
from dataclasses import replace

import pytest
import torch

from cluster.errors import HandoffFailed
from cluster.handoff import AbortCause, Handoff, HandoffState
from cluster.kv.block_pool import BlockPool
from cluster.kv.cache import PagedCache
from cluster.kv.layout import KVLayout
from cluster.transport.manifest import Manifest
from decode_worker.landing import SLICE_BYTES, Landing
from tests.factories import make_key

NUM_BLOCKS = 10
LAYOUT = KVLayout(
    num_layers=1, num_kv_heads=1, head_dim=SLICE_BYTES // 4 // 32, block_size=4, dtype="fp32",
    model_fingerprint="m",
)  # fmt: skip
BLOCK_BYTES = LAYOUT.block_bytes
MANIFEST = Manifest.of("h", make_key(), LAYOUT, num_tokens=4 * NUM_BLOCKS, output_ids=(7,))
WAIT_S = 10.0


class Writer:
    """A cache whose copies wait until the test lets each of them go; then ``cache`` makes them."""

    def __init__(self, cache: PagedCache | None = None) -> None:
        self.cache = cache
        self.slices = []
        self.bytes = []
        self.entered = threading.Semaphore(0)
        self.may_go = threading.Semaphore(0)

    def import_blocks(self, block_ids, staged_B, layers=None) -> None:
        self.slices.append(block_ids)
        self.bytes.append(staged_B[::BLOCK_BYTES].tolist())
        self.entered.release()
        assert self.may_go.acquire(timeout=WAIT_S)
        if self.cache is not None:
            self.cache.import_blocks(block_ids, staged_B, layers)


def sending_landing(pool: BlockPool, writer: Writer) -> Landing:
    pool.reserve(NUM_BLOCKS, "h", make_key())
    landing = Landing(Handoff("h", make_key(), NUM_BLOCKS), pool, writer, LAYOUT)
    landing.handoff.advance(HandoffState.RESERVED)
    assert landing.announce(MANIFEST)
    return landing


def writing_thread(landing: Landing) -> threading.Thread:
    staged = torch.arange(NUM_BLOCKS, dtype=torch.uint8).repeat_interleave(BLOCK_BYTES)
    return threading.Thread(
        target=landing.write, args=(MANIFEST, 0, NUM_BLOCKS, staged), daemon=True
    )


@pytest.fixture
def world():
    pool, writer = BlockPool(16), Writer()
    landing = sending_landing(pool, writer)
    return pool, writer, landing, writing_thread(landing), list(pool.importing("h"))


def test_a_piece_is_written_in_slices_and_whole(world):
    _, writer, _, thread, block_ids = world
    writer.may_go.release(3)
    thread.start()
    thread.join(WAIT_S)
    assert [len(ids) for ids in writer.slices] == [4, 4, 2]
    assert [b for ids in writer.slices for b in ids] == block_ids
    assert [b for values in writer.bytes for b in values] == list(range(NUM_BLOCKS))


def test_nobody_waits_for_a_copy_and_nobody_gets_its_blocks(world):
    """CASES P-21: aborted in the midst of a copy, the blocks stand behind a fence until it ends."""
    pool, writer, landing, thread, block_ids = world
    thread.start()
    assert writer.entered.acquire(timeout=WAIT_S)
    landing.abort(AbortCause.CANCELLED)  # would hang here if it waited: the copy is held up
    assert pool.importing("h") is None
    assert pool.counts().fenced == NUM_BLOCKS
    pool.check()
    assert pool.allocate(7, "other") is None, "only what is not fenced is given out"
    others = pool.allocate(6, "other")
    assert others is not None
    assert not set(others) & set(block_ids)
    writer.may_go.release(NUM_BLOCKS)
    thread.join(WAIT_S)
    assert len(writer.slices) == 1, "no further slice once it is aborted"
    assert pool.counts().fenced == 0
    assert pool.num_free == NUM_BLOCKS
    pool.check()


@pytest.mark.parametrize("is_fenced", [True, False], ids=["fenced", "unfenced"])
def test_the_next_holder_keeps_what_it_wrote(is_fenced):
    """CASES P-21: the same with real blocks, and with the fence taken out, where it goes wrong.

    Aborted in the midst of a copy, the blocks would be another's, who writes its own KV into them,
    and the copy would end on top of it.
    """
    pool, cache = BlockPool(16), PagedCache(LAYOUT, 16, torch.device("cpu"))
    writer = Writer(cache)
    landing = sending_landing(pool, writer)
    if not is_fenced:
        pool.fence = pool.cancel
    thread = writing_thread(landing)
    thread.start()
    assert writer.entered.acquire(timeout=WAIT_S)
    landing.abort(AbortCause.CANCELLED)
    others = pool.allocate(pool.num_free, "other")
    assert bool(set(others) & set(writer.slices[0])) != is_fenced
    theirs = torch.full((len(others) * BLOCK_BYTES,), 77, dtype=torch.uint8)
    cache.import_blocks(others, theirs)
    writer.may_go.release(NUM_BLOCKS)
    thread.join(WAIT_S)
    kept = torch.empty_like(theirs)
    cache.export_blocks(others, kept)
    assert torch.equal(kept, theirs) == is_fenced


def test_a_copy_that_fails_lifts_the_fence(world):
    pool, writer, landing, _, _ = world

    def fail(block_ids, staged_B, layers) -> None:
        landing.abort(AbortCause.FAULT)
        raise OSError("no such page")

    writer.import_blocks = fail
    with pytest.raises(OSError, match="no such page"):
        landing.write(MANIFEST, 0, NUM_BLOCKS, torch.zeros(NUM_BLOCKS * BLOCK_BYTES))
    assert pool.num_free == 16
    pool.check()


def test_nothing_is_written_after_an_abort(world):
    pool, writer, landing, thread, _ = world
    landing.abort(AbortCause.DEADLINE)
    thread.start()
    thread.join(WAIT_S)
    assert writer.slices == []
    assert pool.num_free == 16
    assert landing.handoff.cause is AbortCause.DEADLINE


def test_a_commit_gives_the_blocks_to_the_sequence(world):
    pool, _, landing, thread, block_ids = world
    landing.commit()
    assert pool.blocks_of(make_key()) == tuple(block_ids)
    thread.start()
    thread.join(WAIT_S)


def segment(
    layout: KVLayout, start: int, stop: int, num_tokens: int, layers: range | None = None
) -> Manifest:
    return Manifest.of(
        "h", make_key(), layout, num_tokens=num_tokens, output_ids=(7,),
        blocks=range(start, stop), layers=layers,
    )  # fmt: skip


def reserved_landing(layout: KVLayout, num_tokens: int, cache) -> tuple[Landing, BlockPool]:
    pool = BlockPool(16)
    num_blocks = layout.num_blocks_for(num_tokens)
    pool.allocate(3, "another")
    pool.reserve(num_blocks, "h", make_key())
    landing = Landing(Handoff("h", make_key(), num_blocks), pool, cache, layout)
    landing.handoff.advance(HandoffState.RESERVED)
    return landing, pool


def test_segments_are_taken_in_their_order_only():
    landing, _ = reserved_landing(LAYOUT, 40, Writer())
    assert landing.announce(segment(LAYOUT, 0, 4, 40))
    for start, stop in ((0, 4), (3, 6), (5, 10)):
        with pytest.raises(HandoffFailed, match=f"first_block: {start}, expected 4"):
            landing.announce(segment(LAYOUT, start, stop, 40))
    last = segment(LAYOUT, 4, 10, 40)
    assert not landing.announce(last)
    assert not landing.landed(last), "the first one is not there yet"


LAYERED = replace(LAYOUT, num_layers=4)


def test_layers_of_a_band_are_taken_in_their_order_only():
    """Every layer of every block once: gaps, overlaps and another order are named."""
    landing, _ = reserved_landing(LAYERED, 40, Writer())
    assert landing.announce(segment(LAYERED, 0, 6, 40, range(2)))
    for wrong, message in (
        (segment(LAYERED, 0, 6, 40, range(2)), "first_layer: 0, expected 2"),
        (segment(LAYERED, 0, 6, 40, range(1, 4)), "first_layer: 1, expected 2"),
        (segment(LAYERED, 0, 6, 40, range(3, 4)), "first_layer: 3, expected 2"),
        (segment(LAYERED, 0, 5, 40, range(2, 4)), "num_blocks: 5, expected 6"),
        (segment(LAYERED, 0, 10, 40, range(2, 4)), "num_blocks: 10, expected 6"),
        (segment(LAYERED, 6, 10, 40), "first_block: 6, expected 0"),
    ):
        with pytest.raises(HandoffFailed, match=f"manifest.{message}"):
            landing.announce(wrong)
    assert not landing.announce(segment(LAYERED, 0, 6, 40, range(2, 4)))
    with pytest.raises(HandoffFailed, match="first_layer: 1, expected 0"):
        landing.announce(segment(LAYERED, 6, 10, 40, range(1, 4)))
    with pytest.raises(HandoffFailed, match="first_block: 5, expected 6"):
        landing.announce(segment(LAYERED, 5, 10, 40))
    landing.announce(segment(LAYERED, 6, 10, 40, range(3)))
    landing.announce(segment(LAYERED, 6, 10, 40, range(3, 4)))


def test_it_is_whole_when_all_its_parts_were_written():
    landing, _ = reserved_landing(LAYERED, 40, Writer())
    parts = [
        segment(LAYERED, 0, 6, 40),
        segment(LAYERED, 6, 10, 40, range(3)),
        segment(LAYERED, 6, 10, 40, range(3, 4)),
    ]
    for part in parts:
        landing.announce(part)
    assert [landing.landed(part) for part in parts] == [None, None, parts[2]]
    assert landing.num_bytes == 10 * LAYERED.block_bytes


def segments_and_tokens() -> tuple[Manifest, Manifest]:
    first = Manifest.of("h", make_key(), LAYERED, num_tokens=40, output_ids=())
    return first, segment(LAYERED, 10, 10, 40, range(0))


def test_tokens_without_bytes_may_be_there_before_the_bytes_are():
    landing, _ = reserved_landing(LAYERED, 40, Writer())
    first, tokens = segments_and_tokens()
    landing.announce(first)
    landing.announce(tokens)
    assert landing.landed(tokens) is None, "nothing was written yet"
    assert landing.landed(first) is tokens


def test_bytes_alone_are_no_end():
    landing, _ = reserved_landing(LAYERED, 40, Writer())
    first, tokens = segments_and_tokens()
    landing.announce(first)
    assert landing.landed(first) is None
    landing.announce(tokens)
    assert landing.landed(tokens) is tokens
    with pytest.raises(HandoffFailed, match="is_last"):
        landing.announce(tokens)


def test_tokens_alone_do_not_stand_for_blocks_that_never_came():
    landing, _ = reserved_landing(LAYERED, 40, Writer())
    landing.announce(segment(LAYERED, 0, 6, 40))
    with pytest.raises(HandoffFailed, match="first_block"):
        landing.announce(segments_and_tokens()[1])


def test_a_last_part_alone_makes_nothing_whole():
    landing, _ = reserved_landing(LAYERED, 40, Writer())
    first, last = (segment(LAYERED, 0, 10, 40, la) for la in (range(3), range(3, 4)))
    landing.announce(first)
    landing.announce(last)
    assert not landing.landed(last), "the first one is not there yet"


def test_a_segment_of_another_layout_than_those_before_it_is_refused():
    landing, _ = reserved_landing(LAYOUT, 40, Writer())
    landing.announce(segment(LAYOUT, 0, 4, 40))
    with pytest.raises(HandoffFailed, match="layout"):
        landing.announce(segment(replace(LAYOUT, block_size=2), 4, 20, 40))


@pytest.mark.parametrize("sizes", [(4, 6), (6, 4), (4, 4), (3, 16)], ids=str)
@pytest.mark.parametrize("dtypes", [("fp32", "fp32"), ("bf16", "fp32")], ids=str)
def test_segments_of_another_layout_are_converted(sizes, dtypes):
    """CASES P-22: block size and element type may differ, wherever segments and pieces end."""
    num_tokens = 25
    layouts = [
        KVLayout(
            num_layers=2, num_kv_heads=2, head_dim=4, block_size=size, dtype=dtype,
            model_fingerprint="m",
        )
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]  # fmt: skip
    theirs, ours = layouts
    caches = [PagedCache(layout, 16, torch.device("cpu")) for layout in layouts]
    their_ids = tuple(range(theirs.num_blocks_for(num_tokens)))
    values = torch.arange(num_tokens, dtype=torch.float32)[None, :, None].expand(2, -1, 4)

    def slots(cache: PagedCache, block_ids) -> torch.Tensor:
        positions = torch.arange(num_tokens)
        size = cache.layout.block_size
        return cache.slot_index(torch.tensor(block_ids)[positions // size], positions % size)

    for layer in range(2):
        caches[0].write(layer, slots(caches[0], their_ids), values + layer, -values - layer)
    landing, pool = reserved_landing(ours, num_tokens, caches[1])
    our_ids = pool.importing("h")
    cuts = [0, 2, len(their_ids) - 1, len(their_ids)]
    bands = itertools.pairwise(cuts)
    # The first band whole, the others layer by layer.
    parts = [(*next(bands), range(2))]
    parts += [(*band, range(la, la + 1)) for band in bands for la in (0, 1)]
    for start, stop, layers in parts:
        manifest = segment(theirs, start, stop, num_tokens, layers)
        landing.announce(manifest)
        for first in range(start, stop):
            staged = torch.empty(manifest.block_bytes, dtype=torch.uint8)
            caches[0].export_blocks(their_ids[first : first + 1], staged, layers)
            landing.write(manifest, first - start, 1, staged)
        is_whole = landing.landed(manifest)
    assert is_whole
    for layer in range(2):
        rows = caches[1].row_index(torch.tensor([our_ids]))
        k, v = caches[1].gather(layer, rows).view(2, 2, -1, 4).clone()
        assert torch.equal(k[:, :num_tokens].float(), values + layer)
        assert torch.equal(v[:, :num_tokens].float(), -values - layer)
