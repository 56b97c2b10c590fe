"""The fault matrix's own rule: a cell that never came into its state is played again once."""

from __future__ import annotations

import types
from concurrent.futures import Future

import pytest

from tests.e2e.fault_arena import GLOO, Arena
from tests.e2e.fault_cells import cells
from tests.e2e.fault_scene import NotEntered

CELL = next(cells())


@pytest.fixture
def scripted(monkeypatch):
    """An arena whose plays end as a script says; what it did, and what its test would see."""

    def make(*endings: Exception | None):
        done, ends = [], iter(endings)
        result = Future()
        arena = Arena(types.SimpleNamespace(results={CELL: result}), GLOO)

        def play(cell, *, is_last):
            done.append("play")
            if (error := next(ends)) is not None:
                raise error

        monkeypatch.setattr(arena, "_play", play)
        monkeypatch.setattr(arena, "_tear_down", lambda: done.append("tear down"))
        arena._play_one(CELL, is_last=True)
        return done, result

    return make


def test_a_victim_that_took_another_way_is_played_again_on_a_new_cluster(scripted):
    """Cells before it may have left a pair that is shunned for some seconds."""
    done, result = scripted(NotEntered("the victim took another way"), None)
    assert done == ["play", "tear down", "play"]
    assert result.result(0) is None


def test_one_that_takes_another_way_twice_fails(scripted):
    done, result = scripted(NotEntered("once"), NotEntered("twice"))
    assert done == ["play", "tear down", "play", "tear down"]
    with pytest.raises(NotEntered, match="twice"):
        result.result(0)


@pytest.mark.parametrize("second", [False, True])
def test_what_is_found_wrong_is_never_played_again(second, scripted):
    first = [NotEntered("another way")] if second else []
    done, result = scripted(*first, AssertionError("a token was lost"), None)
    assert done.count("play") == 1 + second
    assert done[-1] == "tear down", "a ruined cluster plays no other cell"
    with pytest.raises(AssertionError, match="a token was lost"):
        result.result(0)
