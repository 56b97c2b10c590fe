"""What the states of a worker let through, and what follows what."""

import pytest

from deploy.worker_life import LAST_GRANTS_S, WorkerLife, WorkerState

SERVING, DRAINING, STOPPING = WorkerState.SERVING, WorkerState.DRAINING, WorkerState.STOPPING


def life_in(*states: WorkerState) -> WorkerLife:
    life = WorkerLife()
    for state in states:
        assert life.advance(state, 100.0)
    return life


def test_late_grants_are_served_for_a_second_and_no_longer():
    """CASES P-27: no new work after 1 s."""
    life = life_in(SERVING, DRAINING)
    assert life.is_draining
    assert life.refusal(100.0) == life.refusal(100.0 + 0.9 * LAST_GRANTS_S) == ""
    assert life.refusal(100.0 + LAST_GRANTS_S) == "the worker drains"
    assert life.last_grants_s(100.25) == pytest.approx(LAST_GRANTS_S - 0.25)
    assert not life.advance(DRAINING, 200.0), "a second order does not begin it anew"
    assert life.refusal(200.0)


@pytest.mark.parametrize("states", [(), (SERVING,), (SERVING, DRAINING)])
def test_it_can_be_stopped_from_any_state_and_never_serves_again(states):
    life = life_in(*states, STOPPING)
    assert life.refusal(100.0) == "the worker is stopping"
    assert life.is_draining
    for state in WorkerState:
        assert not life.advance(state, 101.0)


def test_there_is_nothing_to_drain_before_it_serves():
    life = life_in()
    assert not life.advance(DRAINING, 100.0)
    assert (life.is_draining, life.refusal(100.0)) == (False, "")
