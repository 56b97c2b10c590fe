"""Legs that were given up before they came: known for a while, and never too many of them."""

from cluster.rpc.given_up import MAX_REMEMBERED, REMEMBERED_S, GivenUpLegs
from tests.factories import make_key


def test_a_leg_is_known_by_key_and_grant_until_its_time_is_over():
    legs = GivenUpLegs()
    legs.add(make_key("a"), "g1", 100.0)
    assert legs.has(make_key("a"), "g1", 100.0 + REMEMBERED_S - 0.1)
    assert not legs.has(make_key("a"), "g2", 100.0)
    assert not legs.has(make_key("b"), "g1", 100.0)
    assert not legs.has(make_key("a"), "g1", 100.0 + REMEMBERED_S)
    assert len(legs) == 0


def test_one_that_is_given_up_again_is_known_for_longer():
    legs = GivenUpLegs()
    for name, now in (("a", 100.0), ("b", 101.0), ("a", 102.0)):
        legs.add(make_key(name), "g", now)
    at = 101.0 + REMEMBERED_S
    assert [legs.has(make_key(name), "g", at) for name in "ab"] == [True, False]


def test_the_oldest_give_way():
    legs = GivenUpLegs()
    for number in range(MAX_REMEMBERED + 2):
        legs.add(make_key("a"), f"g{number}", 0.0)
    assert len(legs) == MAX_REMEMBERED
    known = [legs.has(make_key("a"), f"g{number}", 0.0) for number in range(4)]
    assert known == [False, False, True, True]
