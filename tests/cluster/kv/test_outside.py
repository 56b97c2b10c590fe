"""Who holds blocks outside an engine, who is asked for them, and who hears of it."""

import pytest

from cluster.kv.block_pool import BlockPool
from cluster.kv.outside import Demand, Outsider
from tests.factories import make_key

A, B = ("export", "a"), ("import", "b")
HIGH = Demand(num_blocks=4, tier=2)


def outsider(holder, tier=0):
    return Outsider(holder=holder, tier=tier, arrived=0.0, num_preemptions=0)


@pytest.fixture
def pool():
    pool = BlockPool(8)
    pool.outside.has_takers = True
    pool.outside.enter(outsider(A))
    pool.outside.enter(outsider(B, tier=1))
    return pool


@pytest.fixture
def heard(pool):
    heard = []
    pool.subscribe(lambda: heard.append(sorted(pool.outside.asked())))
    return heard


def names(outsiders):
    return sorted(other.holder for other in outsiders)


def test_those_of_lower_tiers_are_told(pool):
    told = [names(pool.outside.below(tier)) for tier in range(3)]
    assert told == [[], [A], [A, B]]


def test_subscribers_hear_who_is_asked_and_who_is_no_more(pool, heard):
    pool.outside.ask([A, B], HIGH)
    pool.outside.ask([B, A], HIGH)
    assert heard == [[A, B]]
    pool.outside.ask((), None)
    assert heard == [[A, B], []]


def test_one_that_leaves_is_asked_no_more_and_the_engine_hears_of_it(pool, heard):
    pool.outside.ask([A], HIGH)
    pool.outside.leave(A)
    assert heard == [[A], []]
    pool.outside.leave(A)
    pool.outside.leave(B)
    assert len(heard) == 2, "nobody has waited for it"
    pool.outside.enter(outsider(B))
    assert len(heard) == 3, "somebody may wait for it"


def test_those_below_whom_others_are_asked_for_leave_the_blocks_to_it(pool):
    assert pool.outside.kept_from(0) == 0
    pool.outside.ask([A], HIGH)
    assert [pool.outside.kept_from(tier) for tier in range(3)] == [4, 4, 0]
    pool.outside.ask((), None)
    assert pool.outside.kept_from(0) == 0


def test_whoever_chose_one_that_left_meanwhile_hears_of_it(pool, heard):
    pool.outside.ask([A, B], HIGH)
    pool.outside.leave(A)
    assert heard == [[A, B], [B]]
    pool.outside.ask([A, B], HIGH)
    assert heard == [[A, B], [B], [B]], "asked as before, and one of them is gone"
    pool.outside.ask([B], HIGH)
    pool.outside.ask([B], HIGH)
    assert len(heard) == 4


def test_an_import_that_has_its_blocks_keeps_none_from_others(pool):
    for_import = Demand(num_blocks=4, tier=2, is_import=True)
    for demand, num_kept in ((for_import, 0), (HIGH, 4)):
        pool.ask(for_import)
        pool.outside.ask([A], demand)
        assert pool.outside.kept_from(0) == 4
        pool.reserve(4, "h", make_key("high"))
        assert pool.outside.kept_from(0) == num_kept, "a sequence's are kept on"
        pool.cancel("h")


def test_nobody_enters_where_nobody_takes(heard):
    pool = BlockPool(8)
    pool.outside.enter(outsider(A))
    assert pool.outside.below(2) == []
