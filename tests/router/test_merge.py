"""Whatever the order in which legs are heard, and however often they fail: each token once."""

from __future__ import annotations

import random

import pytest

from cluster.errors import EngineFault, HandoffFailed
from cluster.request import FinishReason, LegEnd, LegKey, LegKind, Token
from router.merge import Merger

PREFILL, DECODE, LOCAL = LegKind.PREFILL, LegKind.DECODE, LegKind.LOCAL
KEY = LegKey("r", 0, 0)
CHOICE = [100 + number for number in range(24)]


def said_by_legs(rng: random.Random, first: int) -> list[tuple[LegKind, Token]]:
    """All tokens of an attempt from index ``first`` on; overtaking, some of them twice."""
    tokens = [Token(KEY, index, CHOICE[index]) for index in range(first, len(CHOICE))]
    said = [(DECODE, token) for token in tokens]
    said += [(DECODE, token) for token in rng.sample(tokens, len(tokens) // 3)]
    said += [(PREFILL, tokens[0])]
    return sorted(said, key=lambda item: item[1].output_index + rng.uniform(0, 4))


@pytest.mark.parametrize("seed", range(50))
def test_attempts_that_fail_anywhere_make_one_choice(seed):
    rng = random.Random(seed)
    out: list[int] = []
    num_attempts = 0
    while len(out) < len(CHOICE):
        num_attempts += 1
        merger = Merger((PREFILL, DECODE), max_tokens=len(CHOICE), num_output_tokens=len(out))
        said = said_by_legs(rng, len(out))
        is_cut = num_attempts < 6
        for kind, token in said[: rng.randrange(len(said)) if is_cut else len(said)]:
            due = merger.token(kind, token)
            assert [t.output_index for t in due] == list(range(len(out), len(out) + len(due)))
            out += [t.token_id for t in due]
        assert merger.num_output_tokens == len(out)
    assert out == CHOICE


def test_a_resumed_attempt_drops_what_is_out_and_counts_it():
    merger = Merger((PREFILL, DECODE), max_tokens=9, num_output_tokens=5)
    assert merger.token(DECODE, Token(KEY, 4, 1)) == []
    assert merger.num_repeats == 1
    first = Token(KEY, 5, 2)
    assert merger.token(PREFILL, first) == [first]
    assert merger.token(DECODE, first) == []
    assert merger.num_repeats == 1
    with pytest.raises(HandoffFailed):
        merger.token(DECODE, Token(KEY, 5, 3))


def test_a_finish_without_a_new_token_is_a_fault_and_no_short_answer():
    merger = Merger((LOCAL,), max_tokens=9, num_output_tokens=5)
    with pytest.raises(EngineFault):
        merger.end(LOCAL, LegEnd(key=KEY, finish_reason=FinishReason.STOP))


def test_a_prompt_that_is_only_scored_has_no_token():
    merger = Merger((LOCAL,), max_tokens=0)
    end = LegEnd(key=KEY, finish_reason=FinishReason.LENGTH)
    assert merger.end(LOCAL, end) is FinishReason.LENGTH


def test_the_repeat_of_a_replaced_decode_leg_is_no_repeat():
    merger = Merger((PREFILL, DECODE), max_tokens=9)
    first = Token(KEY, 0, 7)
    merger.token(PREFILL, first)
    merger.close(DECODE)
    merger.reopen(DECODE)
    assert merger.token(DECODE, first) == []
    assert (merger.num_repeats, merger.open_kinds) == (0, {PREFILL, DECODE})


def test_surplus_is_what_nobody_has():
    merger = Merger((LOCAL,), max_tokens=9)
    merger.token(LOCAL, Token(KEY, 0, 1))
    assert [merger.surplus(Token(KEY, index, 1)) for index in (0, 1, 1, 2, 9)] == [0, 1, 0, 1, 0]
