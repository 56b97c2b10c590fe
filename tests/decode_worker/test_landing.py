"""Writing an import while it is being given up: short waits, and not one byte too late."""

import threading

import pytest
import torch

from cluster.handoff import AbortCause, Handoff, HandoffState
from cluster.kv.block_pool import BlockPool
from decode_worker.landing import SLICE_BYTES, Landing
from tests.factories import make_key

BLOCK_BYTES = SLICE_BYTES // 4
NUM_BLOCKS = 10
WAIT_S = 10.0


class Writer:
    """A cache whose copies wait until the test lets each of them go."""

    def __init__(self) -> None:
        self.slices = []
        self.bytes = []
        self.entered = threading.Semaphore(0)
        self.may_go = threading.Semaphore(0)

    def import_blocks(self, block_ids, staged_B) -> None:
        self.slices.append(block_ids)
        self.bytes.append(staged_B[::BLOCK_BYTES].tolist())
        self.entered.release()
        assert self.may_go.acquire(timeout=WAIT_S)


@pytest.fixture
def world():
    pool, writer = BlockPool(16), Writer()
    block_ids = pool.reserve(NUM_BLOCKS, "h", make_key())
    landing = Landing(Handoff("h", make_key(), NUM_BLOCKS), pool, writer)
    landing.handoff.advance(HandoffState.RESERVED)
    landing.handoff.advance(HandoffState.SENDING)
    staged = torch.arange(NUM_BLOCKS, dtype=torch.uint8).repeat_interleave(BLOCK_BYTES)
    thread = threading.Thread(
        target=landing.write, args=(0, NUM_BLOCKS, staged, BLOCK_BYTES), daemon=True
    )
    return pool, writer, landing, thread, block_ids


def test_a_piece_is_written_in_slices_and_whole(world):
    _, writer, _, thread, block_ids = world
    writer.may_go.release(3)
    thread.start()
    thread.join(WAIT_S)
    assert [len(ids) for ids in writer.slices] == [4, 4, 2]
    assert [b for ids in writer.slices for b in ids] == block_ids
    assert [b for values in writer.bytes for b in values] == list(range(NUM_BLOCKS))


def test_nobody_but_its_own_abort_waits_for_a_copy(world):
    pool, writer, landing, thread, _ = world
    thread.start()
    assert writer.entered.acquire(timeout=WAIT_S)
    # The step thread and other handoffs go on while the copy runs.
    taken = threading.Thread(target=pool.allocate, args=(2, "other"), daemon=True)
    taken.start()
    taken.join(WAIT_S)
    assert len(pool.blocks_of("other")) == 2
    abort = threading.Thread(target=landing.abort, args=(AbortCause.CANCELLED,), daemon=True)
    abort.start()
    assert pool.importing("h") is not None, "its blocks are free only when nobody writes them"
    writer.may_go.release(NUM_BLOCKS)
    abort.join(WAIT_S)
    thread.join(WAIT_S)
    assert pool.importing("h") is None
    assert pool.num_free == 14


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
