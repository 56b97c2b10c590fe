"""An abort and a fault at every state of a handoff, on both sides: nothing is kept, no end lost."""

import pytest

from cluster.errors import HandoffFailed
from tests.factories import expected_tokens
from tests.lifecycle.pair import DEADLINE_S, LEASE_S, MAX_TOKENS, Pair
from tests.lifecycle.states import (
    FAULTS,
    KEY,
    KNOWN,
    STATES,
    WAITING,
    abort_both,
    abort_decode,
    abort_prefill,
    cut_link,
    fail_decode_engine,
    free_everything,
    lose_router_of_decode,
    lose_router_of_prefill,
    names,
    offer_without_leg,
    stop_decode,
    stop_prefill,
    take_the_grant_back,
)


def do_nothing(pair: Pair):
    """Time alone must end what is left."""


THEN = (do_nothing, abort_prefill, abort_decode, abort_both)


async def finish(pair: Pair) -> None:
    """Whatever waits has room, and then time passes."""
    await pair.run_dry()
    free_everything(pair)
    for _ in range(2):
        pair.pass_time(LEASE_S + 1)
        await pair.run_dry()
    pair.pass_time(DEADLINE_S)
    await pair.run_dry()


@pytest.mark.parametrize("fault", FAULTS, ids=names(FAULTS))
@pytest.mark.parametrize("state", STATES, ids=names(STATES))
async def test_nothing_is_kept(state, fault):
    """CASES P-11, P-12, P-19, P-20: each leg ends once, each block is free again.

    Whatever comes after the fault: nothing but time, or an abort on either side or both.
    """
    for then in THEN:
        pair = Pair()
        await state(pair)
        fault(pair)
        pair.check()
        await pair.settle()
        pair.check()
        then(pair)
        await finish(pair)
        assert KEY in pair.p_sink.ends
        assert state is offer_without_leg or KEY in pair.d_sink.ends
        pair.assert_idle()


@pytest.mark.parametrize("state", STATES, ids=names(STATES))
async def test_undisturbed_it_streams_to_its_end(state):
    """The states themselves disturb nothing: the tokens are those of one engine alone."""
    pair = Pair()
    await state(pair)
    if state is offer_without_leg:
        pair.start_decode()
    free_everything(pair)
    if state in WAITING:
        pair.redirect("d")
    await pair.run_dry()
    assert pair.p_sink.output(KEY) == expected_tokens("r", 1)
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    assert pair.d_engine.num_prompt_steps == 0
    end = pair.p_sink.ends[KEY]
    assert (end.error, end.finish_reason) == (None, None)
    pair.assert_idle()


@pytest.mark.parametrize("abort", [abort_prefill, lose_router_of_prefill, stop_prefill])
@pytest.mark.parametrize("state", KNOWN, ids=names(KNOWN))
async def test_the_decode_worker_is_told_at_once(state, abort):
    """CASES P-11, P-19: without its router's help, as soon as the wire carries the word."""
    pair = Pair()
    await state(pair)
    if state is offer_without_leg:
        pair.start_decode()
    abort(pair)
    pair.wire.let_go()
    await pair.settle()
    error = pair.d_sink.ends[KEY].error
    assert error is not None
    # A router that lost only this worker goes on with another one.
    assert error.is_retryable or abort is abort_prefill
    assert pair.d_pool.counts().importing == 0


@pytest.mark.parametrize("state", KNOWN, ids=names(KNOWN))
async def test_a_cancel_frees_the_export_at_once(state):
    """CASES P-11, P-20: without any lease running out."""
    pair = Pair()
    await state(pair)
    if state is offer_without_leg:
        pair.start_decode()
    abort_decode(pair)
    pair.wire.let_go()
    await pair.settle()
    await pair.step_prefill()
    assert pair.p_sink.ends[KEY].error is not None
    assert pair.p_pool.num_free == pair.p_pool.num_blocks
    assert not [w for w in pair.p_sink.waiting if w.handoff_id == "handoff-r-1"]


LOSSES = (lose_router_of_decode, stop_decode, fail_decode_engine, take_the_grant_back, cut_link)


@pytest.mark.parametrize("loss", LOSSES, ids=names(LOSSES))
@pytest.mark.parametrize("state", KNOWN, ids=names(KNOWN))
async def test_what_a_lost_receiver_leaves_goes_to_another(state, loss):
    """CASES P-19, P-20: the router hears of it at once, and the stream is whole elsewhere."""
    pair = Pair()
    await state(pair)
    if state is offer_without_leg:
        pair.start_decode()
    num_told = len(pair.p_sink.waiting)
    handoff_id = pair.prefill.book.get(KEY).leg.handoff_id
    loss(pair)
    pair.wire.let_go()
    await pair.settle()
    assert pair.d_sink.ends[KEY].error is not None
    (told,) = pair.p_sink.waiting[num_told:]
    assert (told.key, told.handoff_id, told.lease_s) == (KEY, handoff_id, LEASE_S)
    assert isinstance(told.error, HandoffFailed)
    assert not pair.p_sink.ends
    other = pair.add_decode("e")
    pair.redirect("e")
    await pair.run_dry()
    assert pair.p_sink.output(KEY) == expected_tokens("r", 1)
    assert other.sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    assert other.engine.num_prompt_steps == 0
    assert pair.p_sink.ends[KEY].error is None
    free_everything(pair)
    pair.assert_idle()
