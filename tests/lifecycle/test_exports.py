"""Exports that wait: refusals, leases, redirects, and what crosses with them."""

import pytest

from cluster.errors import Cancelled, DeadlineExceeded, HandoffFailed, WorkerLost
from cluster.handoff import AbortCause, AbortHandoff, Offer
from cluster.request import FinishReason, Redirect
from tests.factories import expected_tokens, make_key
from tests.lifecycle.pair import (
    DEADLINE_S,
    LEASE_S,
    MAX_TOKENS,
    NUM_PROMPT_TOKENS,
    PATIENCE_S,
    Pair,
)
from tests.lifecycle.states import (
    FULL,
    KEY,
    OPEN_TO_REDIRECTS,
    WAITING,
    abort_prefill,
    between_segments,
    cut_link,
    fill_decode,
    free_everything,
    last_segment_unread,
    names,
    queued,
    refused_when_exported,
    refused_while_computing,
    waiting_for_blocks,
)


async def test_a_queued_prompt_holds_no_decode_memory():
    """CASES P-16: both legs are there, the prompt waits for its first step, and so long as it does
    the decode worker reserves nothing."""
    pair = Pair()
    await queued(pair)
    for _ in range(3):
        await pair.settle()
        pair.pass_time(PATIENCE_S)
    assert len(pair.prefill.book) == len(pair.decode.book) == 1
    assert pair.d_pool.num_free == pair.d_pool.num_blocks
    await pair.step_prefill()
    assert pair.d_pool.counts().importing > 0, "what is asserted above would be seen"
    await pair.run_dry()
    pair.assert_idle()


async def test_an_offer_that_finds_no_room_is_refused_after_a_short_patience():
    """CASES P-16: no decode memory is held for it, and its sender knows where it stands."""
    pair = Pair()
    await waiting_for_blocks(pair)
    pair.pass_time(PATIENCE_S - 0.1)
    await pair.settle()
    assert not pair.d_sink.ends
    pair.pass_time(0.1)
    await pair.settle()
    error = pair.d_sink.ends[KEY].error
    assert isinstance(error, HandoffFailed)
    assert "no room for 5 blocks within 1 s" in error.message
    (told,) = pair.p_sink.waiting
    assert (told.handoff_id, told.lease_s) == ("handoff-r", LEASE_S)
    assert "no room" in told.error.message
    assert pair.decode.inbox.counts["refused"] == 1
    assert not pair.p_sink.ends
    assert pair.prefill.outbox.num_waiting == 1


@pytest.mark.parametrize("state", WAITING, ids=names(WAITING))
async def test_a_refused_export_goes_to_another_worker(state):
    """Nothing is computed again; its leg stays its grant's."""
    pair = Pair()
    await state(pair)
    other = pair.add_decode("e")
    pair.redirect("e")
    opened = pair.prefill.book.get(KEY)
    assert (opened.leg.grant_id, opened.leg.peer.worker_id) == ("grant-r", "e")
    await pair.run_dry()
    assert pair.p_sink.output(KEY) == expected_tokens("r", 1)
    assert other.sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    assert pair.p_sink.ends[KEY].times.num_computed_tokens == NUM_PROMPT_TOKENS
    assert pair.prefill.outbox.counts["redirected"] == 1
    (transfer,) = pair.prefill.outbox.take_transfers()
    assert transfer.peer_worker_id == "e"
    free_everything(pair)
    pair.assert_idle()


@pytest.mark.parametrize("is_computed", [True, False], ids=["computed before", "computed after"])
async def test_without_a_redirect_the_lease_ends_it(is_computed):
    """Its KV is gone then, and the request has to be computed again; the lease is of whole KV."""
    pair = Pair()
    if is_computed:
        await refused_when_exported(pair)
    else:
        await refused_while_computing(pair)
        pair.pass_time(2 * LEASE_S)
        await pair.prefill_all()
        assert pair.prefill.outbox.num_waiting == 1
    pair.pass_time(LEASE_S - 0.1)
    assert not pair.p_sink.ends
    pair.pass_time(0.1)
    await pair.step_prefill()
    error = pair.p_sink.ends[KEY].error
    assert isinstance(error, HandoffFailed)
    assert "lease" in error.message
    free_everything(pair)
    pair.assert_idle()


async def test_each_failed_handoff_begins_a_lease_and_the_deadline_ends_them_all():
    pair = Pair()
    await refused_when_exported(pair)
    num_refused = 1
    while not pair.p_sink.ends:
        pair.pass_time(LEASE_S - 2)
        pair.redirect("d")
        await pair.settle()
        pair.pass_time(PATIENCE_S)
        await pair.settle()
        num_refused += not pair.p_sink.ends
    assert num_refused > 3
    assert isinstance(pair.p_sink.ends[KEY].error, DeadlineExceeded)
    assert len(pair.p_sink.waiting) == num_refused
    await pair.run_dry()
    pair.pass_time(DEADLINE_S)
    free_everything(pair)
    pair.assert_idle()


async def test_an_export_that_was_refused_ever_so_often_is_not_computed_again():
    """CASES P-16: for longer than one lease, by handoffs that each begin another."""
    pair = Pair()
    await refused_when_exported(pair)
    num_refused = 1
    while num_refused < 15:
        pair.redirect("d")
        await pair.settle()
        pair.pass_time(PATIENCE_S)
        await pair.settle()
        num_refused += 1
    assert len(pair.p_sink.waiting) == num_refused
    assert not pair.p_sink.ends
    free_everything(pair)
    pair.redirect("d")
    await pair.run_dry()
    assert pair.p_sink.ends[KEY].times.num_computed_tokens == NUM_PROMPT_TOKENS
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    pair.assert_idle()


@pytest.mark.parametrize("state", OPEN_TO_REDIRECTS, ids=names(OPEN_TO_REDIRECTS))
async def test_a_redirect_in_any_state_moves_the_export(state):
    """A router may know before the prefill worker does that a decode worker is gone."""
    pair = Pair()
    await state(pair)
    other = pair.add_decode("e")
    pair.redirect("e")
    pair.wire.let_go()
    await pair.run_dry()
    free_everything(pair)
    assert other.sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    assert other.engine.num_prompt_steps == 0
    assert pair.p_sink.ends[KEY].error is None
    pair.decode.abort_leg(KEY, AbortCause.FAULT)  # as its router does, where it knew of no offer
    pair.assert_idle()


async def test_segments_that_went_to_another_worker_are_sent_again():
    pair = Pair()
    await between_segments(pair)
    assert len(pair.wire.sent) == 1
    cut_link(pair)
    await pair.settle()
    other = pair.add_decode("e")
    pair.redirect("e")
    await pair.run_dry()
    assert sum(map(len, other.wire.sent)) == 5
    assert other.sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    pair.assert_idle()


async def test_an_export_is_sent_again_while_its_old_segment_is_still_being_read():
    """Two links read the same blocks; neither frees what the other one reads."""
    pair = Pair()
    await last_segment_unread(pair)
    other = pair.add_decode("e")
    pair.redirect("e")
    await pair.settle()
    for _ in range(10):
        other.engine.step()
        await pair.settle()
    assert other.sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    assert pair.p_sink.ends[KEY].error is None
    assert pair.p_pool.counts().held == 1, "the one that is still being read"
    pair.wire.let_go()
    await pair.settle()
    pair.assert_idle()


async def test_a_redirect_that_crosses_with_the_end_changes_nothing():
    for end in (abort_prefill, lambda pair: pair.pass_time(LEASE_S)):
        pair = Pair()
        await refused_when_exported(pair)
        end(pair)
        await pair.settle()
        assert KEY in pair.p_sink.ends
        pair.add_decode("e")
        pair.redirect("e")
        await pair.run_dry()
        pair.sides["e"].half.abort_leg(KEY, AbortCause.CANCELLED)
        free_everything(pair)
        pair.assert_idle()


async def test_a_redirect_that_comes_twice_is_followed_once():
    pair = Pair()
    await refused_when_exported(pair)
    free_everything(pair)
    pair.redirect("d")
    pair.num_redirects -= 1
    pair.redirect("d", starts=False)
    await pair.run_dry()
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    assert pair.prefill.outbox.counts["redirected"] == 1
    pair.assert_idle()


async def test_a_redirect_to_the_handoff_of_another_leg_ends_its_own():
    pair = Pair()
    await refused_when_exported(pair)
    free_everything(pair)
    pair.start("other")
    leg = pair.prefill.book.get(make_key("other")).leg
    pair.prefill.redirect_leg(Redirect(key=KEY, handoff_id=leg.handoff_id, peer=leg.peer))
    await pair.run_dry()
    assert isinstance(pair.p_sink.ends[KEY].error, HandoffFailed)
    assert pair.d_sink.output(make_key("other")) == expected_tokens("other", MAX_TOKENS)
    pair.assert_idle()


async def test_a_redirect_back_before_the_old_leg_ended_renews_it():
    """The decode worker still waits for the first offer, which could not be made."""
    pair = Pair()
    pair.dialer.error = WorkerLost("no route")
    pair.start()
    await pair.step_prefill()
    assert isinstance(pair.p_sink.waiting[0].error, WorkerLost)
    pair.dialer.error = None
    pair.redirect("d")
    await pair.run_dry()
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    assert pair.decode.book.counts["received"] == 1
    pair.assert_idle()


async def test_a_redirect_before_the_first_chunk_is_where_it_is_offered():
    pair = Pair()
    await queued(pair)
    other = pair.add_decode("e")
    pair.redirect("e")
    await pair.run_dry()
    assert other.sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    assert pair.wire.sent == []
    pair.decode.abort_leg(KEY, AbortCause.CANCELLED)
    pair.assert_idle()


async def test_a_waiting_export_can_finish_at_its_first_token():
    pair = Pair(script={("r", 0): 0})
    await refused_while_computing(pair)
    await pair.run_dry()
    assert pair.p_sink.ends[KEY].finish_reason is FinishReason.STOP
    free_everything(pair)
    pair.assert_idle()


async def test_an_offer_that_nobody_answers_fails_after_the_lease():
    """A receiver that is stopped: its link is whole, and the prefill does not wait for ever."""
    pair = Pair()
    pair.wire.hold = {Offer}
    pair.start()
    await pair.prefill_all()
    pair.pass_time(LEASE_S)
    (told,) = pair.p_sink.waiting
    assert "no answer" in told.error.message
    pair.wire.let_go()
    await pair.settle()
    assert isinstance(pair.d_sink.ends[KEY].error, HandoffFailed)
    abort_prefill(pair)
    pair.assert_idle()


@pytest.mark.parametrize(
    ("cause", "is_kept"),
    [
        (AbortCause.REFUSED, True),
        (AbortCause.LEASE, True),
        (AbortCause.FAULT, False),
        (AbortCause.CANCELLED, False),
        (AbortCause.DEADLINE, False),
        (AbortCause.STOPPED, False),
    ],
)
async def test_what_the_receiver_says_decides_whether_the_export_is_kept(cause, is_kept):
    pair = Pair()
    await between_segments(pair)
    abort = AbortHandoff(handoff_id="handoff-r", cause=cause)
    pair.prefill.outbox.sender.on_signal(pair.wire.sender, abort)
    await pair.step_prefill()
    assert bool(pair.p_sink.waiting) == is_kept
    assert (KEY in pair.p_sink.ends) != is_kept


async def test_redirected_exports_go_before_those_that_never_waited():
    """Each of the two lines is first come, first served."""
    pair = Pair(d_blocks=6)
    pair.d_pool.allocate(6, FULL)
    pair.start("a")
    pair.start("b")
    await pair.prefill_all()
    pair.pass_time(PATIENCE_S)
    await pair.settle()
    assert len(pair.p_sink.waiting) == 2
    pair.start("fresh")
    await pair.prefill_all()
    pair.redirect("d", "b")
    pair.redirect("d", "a")
    await pair.settle()
    pair.d_pool.release(FULL)
    order = []
    for _ in range(40):
        await pair.settle()
        for key in pair.d_sink.tokens:
            if key[0].request_id not in order:
                order.append(key[0].request_id)
        pair.d_engine.step()
    await pair.run_dry()
    assert order == ["b", "a", "fresh"]
    pair.assert_idle()


async def test_full_prefill_workers_and_a_full_decode_worker_wait_for_no_one_for_ever():
    """CASES P-16, mirror: finished prefills fill the prefill worker, for a decode worker that is
    full.

    Everybody's lease ends, the pool is free again, and newcomers are served once there is room.
    """
    pair = Pair(p_blocks=20, d_blocks=20)
    fill_decode(pair)
    first = [f"r{i}" for i in range(4)]
    for request_id in first:
        pair.start(request_id)
    await pair.prefill_all()
    assert pair.p_pool.num_free == 0
    pair.start("late")
    await pair.prefill_all()
    assert make_key("late") not in pair.prefill.outbox, "there is no block left to compute it in"
    pair.pass_time(PATIENCE_S)
    await pair.settle()
    assert {told.key.request_id for told in pair.p_sink.waiting} == set(first)
    pair.pass_time(LEASE_S)
    await pair.settle()
    for request_id in first:
        assert isinstance(pair.p_sink.ends[make_key(request_id)].error, HandoffFailed)
        assert isinstance(pair.d_sink.ends[make_key(request_id)].error, HandoffFailed)
    pair.d_pool.release(FULL)
    await pair.run_dry()
    assert pair.d_sink.output(make_key("late")) == expected_tokens("late", MAX_TOKENS)
    pair.assert_idle()


async def test_a_full_decode_worker_gets_them_all_when_the_router_asks_again():
    """CASES P-16: the same, with a router that redirects: every request is served."""
    pair = Pair(p_blocks=20, d_blocks=7)
    fill_decode(pair)
    ids = [f"r{i}" for i in range(6)]
    for request_id in ids:
        pair.start(request_id)
    for round_number in range(30):
        if round_number == 10:
            pair.d_pool.release(FULL)
        await pair.run_dry()
        pair.pass_time(PATIENCE_S / 2)
        await pair.settle()
        waiting, pair.p_sink.waiting = pair.p_sink.waiting, []
        for told in waiting:
            pair.redirect("d", told.key.request_id)
    for request_id in ids:
        assert pair.d_sink.output(make_key(request_id)) == expected_tokens(request_id, MAX_TOKENS)
    assert pair.decode.inbox.counts["refused"] > 0
    assert pair.prefill.outbox.counts["redirected"] > 0
    pair.assert_idle()


async def test_a_cancel_while_it_waits_frees_it_at_once():
    """CASES P-11."""
    pair = Pair()
    await refused_when_exported(pair)
    abort_prefill(pair)
    assert isinstance(pair.p_sink.ends[KEY].error, Cancelled)
    free_everything(pair)
    pair.assert_idle()
