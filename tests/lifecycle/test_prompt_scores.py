"""A prompt's log-probabilities through both halves of a handoff; the engine's are tested apart."""

import pytest

from cluster.handoff import AbortCause
from cluster.request import FinishReason, LegKind, TokenLogprobs
from tests.factories import expected_tokens, make_key, make_params
from tests.lifecycle.pair import NUM_PROMPT_TOKENS, Pair

KEY = make_key()
SCORED = make_params(6, num_logprobs=0, prompt_logprobs=True)
ALL = [TokenLogprobs(-float(position)) for position in range(1, NUM_PROMPT_TOKENS)]


def record(sink):
    """Note runs, and at which of the sink's messages the leg's end came."""
    told, emit = [], sink.emit

    def noted(tokens, ends, waiting=(), prompts=()):
        told.extend(("run", run.start, list(run.entries)) for run in prompts)
        told.extend(("end",) for _ in ends)
        emit(tokens, ends, waiting, prompts)

    sink.emit = noted
    return told


def entries(told):
    return [entry for kind, *run in told if kind == "run" for entry in run[1]]


@pytest.mark.parametrize("streams", [True, False])
async def test_the_prefill_half_tells_them_and_the_decode_half_nothing(streams):
    """P-07: the decode worker computes no prompt, and so has nothing to say of one."""
    pair = Pair(streams=streams)
    by_prefill, by_decode = record(pair.p_sink), record(pair.d_sink)
    pair.start(params=SCORED)
    await pair.run_dry()
    assert entries(by_prefill) == ALL
    assert by_prefill[-1] == ("end",)
    assert entries(by_decode) == []
    assert pair.d_sink.output(KEY) == expected_tokens("r", 6)
    pair.assert_idle()


async def test_a_local_leg_tells_them_itself():
    pair = Pair()
    told = record(pair.d_sink)
    pair.start_local(params=SCORED)
    await pair.run_dry()
    assert entries(told) == ALL
    pair.assert_idle()


@pytest.mark.parametrize("kind", [LegKind.PREFILL, LegKind.LOCAL])
async def test_a_prompt_that_nothing_is_drawn_for_ends_by_length(kind):
    """P-01: max_tokens 0, wherever it is placed."""
    pair = Pair()
    params = make_params(0, prompt_logprobs=True)
    leg = pair.leg(kind, handoff_id="", peer=None, params=params)
    half, sink = pair.decode, pair.d_sink
    if kind is LegKind.PREFILL:
        half, sink = pair.prefill, pair.p_sink
    told = record(sink)
    half.start_leg(leg, sink)
    await pair.run_dry()
    assert entries(told) == ALL
    assert sink.ends[KEY].finish_reason is FinishReason.LENGTH
    assert sink.output(KEY) == []
    pair.assert_idle()


async def test_a_leg_that_was_given_up_tells_nothing_more():
    pair = Pair()
    told = record(pair.p_sink)
    pair.start(params=SCORED)
    await pair.step_prefill()
    num_told = len(entries(told))
    pair.prefill.abort_leg(KEY, AbortCause.CANCELLED)
    pair.decode.abort_leg(KEY, AbortCause.CANCELLED)
    await pair.run_dry()
    assert 0 < num_told == len(entries(told)) < len(ALL)
    pair.assert_idle()
