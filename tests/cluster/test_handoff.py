"""The handoff's one table of legal moves."""

import itertools

import pytest

from cluster.handoff import LEGAL_MOVES, AbortCause, Handoff, HandoffState, IllegalTransition
from cluster.request import LegKey


def make_handoff(state: HandoffState) -> Handoff:
    return Handoff(handoff_id="h", key=LegKey("r", 0, 0), num_blocks=2, state=state)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(HandoffState, HandoffState)))
def test_moves_exactly_by_the_table(old, new):
    handoff = make_handoff(old)
    cause = AbortCause.FAULT if new is HandoffState.ABORTED else None
    if new in LEGAL_MOVES[old]:
        handoff.advance(new, cause)
        assert (handoff.state, handoff.cause) == (new, cause)
    else:
        with pytest.raises(IllegalTransition):
            handoff.advance(new, cause)
        assert handoff.state is old


def test_every_state_but_committed_can_abort():
    aborting = {state for state, moves in LEGAL_MOVES.items() if HandoffState.ABORTED in moves}
    assert aborting == set(HandoffState) - {HandoffState.COMMITTED, HandoffState.ABORTED}


def test_a_cause_belongs_to_an_abort_and_to_nothing_else():
    with pytest.raises(IllegalTransition):
        make_handoff(HandoffState.OFFERED).advance(HandoffState.ABORTED)
    with pytest.raises(IllegalTransition):
        make_handoff(HandoffState.OFFERED).advance(HandoffState.RESERVED, AbortCause.FAULT)
