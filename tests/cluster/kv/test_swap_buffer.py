"""The swap buffer's books, and that the pool's check covers them."""

import pytest

from cluster.kv.block_pool import BlockPool
from cluster.kv.swap_buffer import SwapBuffer, swap_holder


@pytest.fixture
def pool():
    pool = BlockPool(8, swap=SwapBuffer(4))
    yield pool
    pool.check()


def test_slots_go_and_come(pool):
    buffer = pool.swap
    assert (buffer.take("a", 2), buffer.take("b", 2)) == ((0, 1), (2, 3))
    assert (buffer.slots_of("b"), buffer.num_free, buffer.num_holders) == ((2, 3), 0, 2)
    assert (buffer.give_back("a"), buffer.give_back("a"), buffer.num_holders) == (2, 0, 1)
    assert buffer.take("c", 1) == (0,)


def test_a_short_buffer_gives_nothing_rather_than_some(pool):
    pool.swap.take("a", 2)
    assert pool.swap.take("b", 3) is None
    assert (pool.swap.num_free, pool.swap.slots_of("b")) == (2, ())


def test_a_key_is_in_it_once(pool):
    pool.swap.take("a", 1)
    with pytest.raises(ValueError, match="already"):
        pool.swap.take("a", 1)


def test_it_needs_a_slot():
    with pytest.raises(ValueError, match="at least one"):
        SwapBuffer(0)


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (lambda pool: pool.swap._free.pop(), "slots not in exactly one place: .2."),
        (lambda pool: pool.swap._free.append(0), "slots not in exactly one place: .0."),
        (lambda pool: pool.swap._free.append(9), "slots not in exactly one place: .9."),
        (lambda pool: pool.swap.give_back("a"), "2 blocks of a leave for 0 slots"),
        (lambda pool: pool.allocate(1, swap_holder("b")), "1 blocks of b leave for 0 slots"),
    ],
)
def test_the_pools_check_finds_what_is_wrong_with_it(harm, what):
    pool = BlockPool(8, swap=SwapBuffer(4))
    pool.allocate(2, swap_holder("a"))
    pool.swap.take("a", 2)
    pool.check()
    harm(pool)
    with pytest.raises(AssertionError, match=what):
        pool.check()
