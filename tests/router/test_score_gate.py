"""Scores of a prompt go to the reader before its tokens, or the attempt ends."""

import asyncio
from types import SimpleNamespace

import pytest

from cluster.control.facts import Grant, Placed
from cluster.errors import HandoffFailed, WorkerLost
from cluster.request import (
    FinishReason,
    LegEnd,
    LegKind,
    PromptLogprobs,
    Request,
    SamplingParams,
    Token,
    TokenLogprobs,
)
from router.attempt import Attempt
from router.legs import LegNews
from router.score_gate import ScoreGate

PROMPT = (5, 6, 7, 8)


class FakeWorkers:
    """Takes legs down; a test says what they say."""

    def __init__(self):
        self.legs = {}
        self.hear = None

    async def start(self, leg, peer, hear):
        self.legs[leg.kind] = leg
        self.hear = hear

    def abort(self, peer, key, cause):
        pass

    def pass_to(self, peer, key, hear):
        pass

    def say(self, kind, *said):
        incarnation = {LegKind.PREFILL: "p.1", LegKind.DECODE: "d.1"}.get(kind, "d.1")
        for one in said:
            self.hear(LegNews(kind, incarnation, one))


def placed(name):
    return Placed(worker_id=name, incarnation=f"{name}.1", address=f"{name}:1", pool="pool")


async def make_attempt(*, output_ids=(), is_local=False, max_tokens=3, asks=True):
    workers = FakeWorkers()
    parts = SimpleNamespace(
        workers=workers, clock=SimpleNamespace(now=lambda: 0.0), metrics=None, route=None
    )
    owner = SimpleNamespace(
        note_lost=lambda *_, **__: None, may_go_on=lambda _: False, age_s=lambda: 0.0,
        num_preemptions=0, note_preempted=lambda _: None,
    )  # fmt: skip
    params = SamplingParams(max_tokens=max_tokens, num_logprobs=0, prompt_logprobs=asks)
    request = Request(request_id="r", prompt_ids=PROMPT, params=params, deadline=9.0)
    grant = Grant(
        term=1, grant_id="g", request_id="r", attempt=0,
        prefill=None if is_local else placed("p"), decode=placed("d"),
        handoff_id="" if is_local else "h", reason="", predicted_s=0.0,
    )  # fmt: skip
    attempt = Attempt(grant, request, output_ids, parts=parts, owner=owner)
    await attempt.start()
    return attempt, workers


def run_of(attempt, start, count):
    entries = tuple(TokenLogprobs(-float(start + i)) for i in range(count))
    return PromptLogprobs(attempt.key, start, entries)


def token(attempt, index):
    return Token(attempt.key, index, 10 + index, TokenLogprobs(-1.0))


async def heard(attempt, count):
    return [await asyncio.wait_for(attempt.next(), 5) for _ in range(count)]


async def test_scores_come_first_where_the_decode_worker_is_heard_before_them():
    """P-07: the decode worker even finishes before the prefill worker's stream moves."""
    attempt, workers = await make_attempt()
    workers.say(
        LegKind.DECODE,
        *(token(attempt, i) for i in range(3)),
        LegEnd(key=attempt.key, finish_reason=FinishReason.LENGTH),
    )
    first, second = run_of(attempt, 1, 2), run_of(attempt, 3, 1)
    workers.say(LegKind.PREFILL, first, second)
    come = await heard(attempt, 4)
    assert come[:2] == [first, second]
    assert [t.token_id for t in come[2]] == [10, 11, 12]
    assert come[3] is FinishReason.LENGTH


async def test_tokens_go_out_at_once_after_the_scores_and_where_none_are_asked_for():
    attempt, workers = await make_attempt()
    workers.say(LegKind.PREFILL, run_of(attempt, 1, 3), token(attempt, 0))
    scores, tokens = await heard(attempt, 2)
    assert (scores.start, [t.token_id for t in tokens]) == (1, [10])
    attempt, workers = await make_attempt(asks=False)
    workers.say(LegKind.PREFILL, token(attempt, 0))
    [tokens] = await heard(attempt, 1)
    assert [t.token_id for t in tokens] == [10]


@pytest.mark.parametrize(
    ("error", "raised"), [(WorkerLost("gone"), WorkerLost), (None, HandoffFailed)]
)
async def test_scores_that_were_lost_with_the_prefill_leg_end_the_attempt(error, raised):
    """Nothing is out yet, so the prompt is computed again; the decode worker's tokens are not."""
    attempt, workers = await make_attempt()
    workers.say(LegKind.PREFILL, run_of(attempt, 1, 2))
    workers.say(LegKind.DECODE, token(attempt, 0), token(attempt, 1))
    workers.say(LegKind.PREFILL, LegEnd(key=attempt.key, error=error))
    await heard(attempt, 1)
    with pytest.raises(raised):
        await attempt.next()


async def test_a_resumed_attempt_asks_for_no_scores_again():
    attempt, workers = await make_attempt(output_ids=[10])
    assert not any(leg.params.prompt_logprobs for leg in workers.legs.values())
    workers.say(LegKind.PREFILL, token(attempt, 1))
    [tokens] = await heard(attempt, 1)
    assert [t.token_id for t in tokens] == [11]


async def test_a_prompt_that_nothing_is_drawn_for_ends_after_its_scores():
    """P-01: max_tokens 0."""
    attempt, workers = await make_attempt(is_local=True, max_tokens=0)
    end = LegEnd(key=attempt.key, finish_reason=FinishReason.LENGTH)
    workers.say(LegKind.LOCAL, run_of(attempt, 1, 3), end)
    scores, reason = await heard(attempt, 2)
    assert len(scores.entries) == 3
    assert reason is FinishReason.LENGTH


def test_a_run_that_is_told_again_is_not_taken_again():
    attempt = SimpleNamespace(key=None)
    gate = ScoreGate(4)
    assert gate.scored(run_of(attempt, 1, 2))
    assert not gate.scored(run_of(attempt, 1, 2))
    assert not gate.is_open
    assert gate.scored(run_of(attempt, 3, 1))
    assert gate.is_open
