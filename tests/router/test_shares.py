"""Places of which nobody has more than a share."""

import pytest

from router.shares import Shares


def test_one_has_its_share_and_the_others_find_the_rest():
    """CASES S-14."""
    places = Shares(3, 2)
    assert [places.take("a") for _ in range(3)] == [True, True, False]
    assert [places.take(who) for who in "bc"] == [True, False]
    assert places.num_taken == 3
    places.give_back("a")
    assert places.take("c")
    for who in "abc":
        places.give_back(who)
    assert places.num_taken == 0


def test_what_was_not_taken_cannot_be_given_back():
    with pytest.raises(AssertionError):
        Shares(1, 1).give_back("a")
