"""A sequence's work is what it is owed, and its state moves by one table."""

import itertools

import pytest

from cluster.engine.sequence import LEGAL_MOVES, SequenceState
from cluster.handoff import IllegalTransition
from tests.factories import make_sequence


@pytest.mark.parametrize(("old", "new"), list(itertools.product(SequenceState, repeat=2)))
def test_moves_exactly_by_the_table(old, new):
    sequence = make_sequence(state=old)
    if new in LEGAL_MOVES[old]:
        sequence.advance(new)
        assert sequence.state is new
    else:
        with pytest.raises(IllegalTransition):
            sequence.advance(new)
        assert sequence.state is old


def test_the_work_left_is_tokens_minus_computed_tokens():
    fresh = make_sequence(num_prompt_tokens=40)
    imported = make_sequence(num_prompt_tokens=40, output_ids=[7], num_computed_tokens=40)
    resumed = make_sequence(num_prompt_tokens=40, output_ids=[7, 8, 9])
    assert [s.num_tokens_left for s in (fresh, imported, resumed)] == [40, 1, 43]


@pytest.mark.parametrize("start", range(7))
@pytest.mark.parametrize("end", range(8))
def test_token_ids_run_over_prompt_and_output_alike(start, end):
    sequence = make_sequence(prompt_ids=(1, 2, 3, 4), output_ids=[5, 6, 7])
    assert sequence.token_ids(start, max(start, end)) == (1, 2, 3, 4, 5, 6, 7)[start:end]
