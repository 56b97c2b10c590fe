"""Blocks change hands by the pool's rules alone, and none is ever in two places."""

import random
import threading

import pytest

from cluster.kv.block_pool import BlockCounts, BlockPool, OwnershipError
from cluster.kv.outside import Demand
from tests.factories import make_key


@pytest.fixture
def pool():
    pool = BlockPool(10)
    yield pool
    pool.check()


def counts(pool: BlockPool) -> tuple[int, int, int]:
    got = pool.counts()
    return got.free, got.held, got.importing


def test_a_new_pool_is_all_free(pool):
    assert pool.counts() == BlockCounts(free=10, held=0, importing=0)
    assert (pool.num_blocks, pool.num_free) == (10, 10)


def test_a_pool_needs_a_block():
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_allocate_appends_in_the_order_of_tokens(pool):
    key = make_key()
    first = pool.allocate(3, key)
    second = pool.allocate(2, key)
    assert pool.blocks_of(key) == (*first, *second)
    assert counts(pool) == (5, 5, 0)


def test_a_short_pool_gives_nothing_rather_than_some(pool):
    key = make_key()
    assert pool.allocate(11, key) is None
    assert pool.blocks_of(key) == ()
    assert pool.num_free == 10


def test_nothing_asked_is_nothing_held(pool):
    assert pool.allocate(0, make_key()) == []
    assert pool.release(make_key()) == 0
    with pytest.raises(ValueError, match="cannot take -1"):
        pool.allocate(-1, make_key())


def test_release_frees_all_and_again_nothing(pool):
    pool.allocate(4, make_key())
    assert pool.release(make_key()) == 4
    assert pool.release(make_key()) == 0
    assert pool.num_free == 10


def test_a_sequences_blocks_become_an_exports(pool):
    block_ids = pool.allocate(4, make_key())
    pool.rename(make_key(), ("export", "h"))
    assert pool.blocks_of(make_key()) == ()
    assert pool.blocks_of(("export", "h")) == tuple(block_ids)
    assert pool.release(make_key()) == 0
    assert pool.release(("export", "h")) == 4


def test_rename_needs_a_holder_and_an_empty_place(pool):
    with pytest.raises(KeyError):
        pool.rename(make_key(), ("export", "h"))
    pool.allocate(1, make_key("a"))
    pool.allocate(1, make_key("b"))
    with pytest.raises(OwnershipError):
        pool.rename(make_key("a"), make_key("b"))
    assert counts(pool) == (8, 2, 0)


def test_a_reservation_is_adopted_by_its_sequence(pool):
    block_ids = pool.reserve(3, "h", make_key())
    assert counts(pool) == (7, 0, 3)
    assert pool.importing("h") == tuple(block_ids)
    assert pool.adopt("h") == block_ids
    assert pool.blocks_of(make_key()) == tuple(block_ids)
    assert pool.importing("h") is None
    with pytest.raises(KeyError):
        pool.adopt("h")


def test_a_cancelled_reservation_cannot_be_adopted(pool):
    pool.reserve(3, "h", make_key())
    assert pool.cancel("h") == 3
    assert pool.cancel("h") == 0
    assert pool.importing("h") is None
    with pytest.raises(KeyError):
        pool.adopt("h")
    assert pool.num_free == 10


def test_a_handoff_has_one_reservation_and_a_key_one_owner(pool):
    pool.reserve(3, "h", make_key())
    with pytest.raises(OwnershipError):
        pool.reserve(3, "h", make_key())
    pool.allocate(1, make_key())
    with pytest.raises(OwnershipError):
        pool.adopt("h")
    assert counts(pool) == (6, 1, 3)


def test_newcomers_cannot_take_what_is_set_aside(pool):
    pool.set_aside(8)
    assert pool.reserve(3, "h", make_key("new")) is None
    assert pool.reserve(2, "h", make_key("new")) is not None
    assert pool.allocate(8, make_key("old")) is not None


def test_take_over_leaves_no_gap_for_others(pool):
    stolen = []
    pool.subscribe(lambda: stolen.append(pool.reserve(4, "h", make_key("thief"))))
    pool.allocate(4, make_key("young"))
    pool.allocate(6, make_key("old"))
    block_ids = pool.take_over(make_key("young"), 1, make_key("old"))
    assert block_ids is not None
    assert pool.blocks_of(make_key("old"))[-1:] == tuple(block_ids)
    assert stolen == [None]
    assert counts(pool) == (3, 7, 0)


def test_take_over_frees_the_victim_even_when_that_is_too_little(pool):
    pool.allocate(2, make_key("young"))
    pool.allocate(8, make_key("old"))
    assert pool.take_over(make_key("young"), 3, make_key("old")) is None
    assert counts(pool) == (2, 8, 0)


def test_subscribers_hear_of_every_way_to_become_free_and_of_nothing_else(pool):
    heard = []
    unsubscribe = pool.subscribe(lambda: heard.append(pool.num_free))
    pool.allocate(2, make_key())
    pool.reserve(2, "h", make_key("b"))
    assert heard == []
    pool.release(make_key())
    pool.cancel("h")
    pool.release(make_key())
    assert heard == [8, 10]
    pool.set_aside(4)
    pool.set_aside(2)
    assert heard == [8, 10, 10]
    unsubscribe()
    pool.allocate(1, make_key())
    pool.release(make_key())
    assert len(heard) == 3


def test_subscribers_hear_who_asks_for_blocks_and_who_asks_no_more(pool):
    heard = []
    pool.subscribe(lambda: heard.append(pool.demand))
    pool.ask(Demand(num_blocks=4, tier=0))
    assert heard == [], "there is nobody below it"
    demand = Demand(num_blocks=4, tier=1)
    pool.ask(demand)
    pool.ask(demand)
    assert heard == [demand]
    assert pool.reserve(4, "h", make_key()) is not None
    assert heard == [demand, None], "it has them"
    pool.ask(demand)
    pool.ask(None)
    assert heard == [demand, None, demand, None]


def test_subscribers_are_called_without_the_lock(pool):
    could_lock = []

    def other_thread() -> None:
        could_lock.append(pool.lock.acquire(timeout=5))
        pool.lock.release()

    def on_free() -> None:
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()

    pool.subscribe(on_free)
    pool.allocate(1, make_key())
    pool.release(make_key())
    assert could_lock == [True]


@pytest.mark.parametrize("harm", ["lost", "twice", "stranger"])
def test_check_finds_what_is_wrong(harm):
    pool = BlockPool(4)
    pool.allocate(2, make_key())
    if harm == "lost":
        pool._free.pop()
    elif harm == "twice":
        pool._held[make_key("b")] = [0]
    else:
        pool._free.append(9)
    with pytest.raises(AssertionError, match=r"not in exactly one place|but 1 holders are counted"):
        pool.check()


def test_the_invariant_holds_while_threads_take_and_give(pool):
    def work(name: str) -> None:
        rng = random.Random(name)
        key = make_key(name)
        for i in range(300):
            handoff_id = f"{name}-{i}"
            if pool.reserve(rng.randint(1, 4), handoff_id, key) is not None:
                if rng.random() < 0.5:
                    pool.cancel(handoff_id)
                else:
                    pool.adopt(handoff_id)
            pool.allocate(rng.randint(1, 3), key)
            if rng.random() < 0.3 and pool.blocks_of(key):
                pool.rename(key, ("export", handoff_id))
                pool.release(("export", handoff_id))
            pool.check()
            pool.release(key)

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.num_free == 10
