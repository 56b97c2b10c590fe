"""Legs and offers that come late, twice, alone or wrong, and blocks that are short."""

import dataclasses

import pytest

from cluster.errors import HandoffFailed, InvalidRequest
from cluster.handoff import AbortCause, AbortHandoff, Commit, Credit, ManifestBytes, Offer
from cluster.request import LegKind
from decode_worker.past import REMEMBERED_S
from tests.factories import expected_tokens, make_key
from tests.lifecycle.pair import LAYOUT, LEASE_S, MAX_TOKENS, NUM_PROMPT_TOKENS, PATIENCE_S, Pair

KEY = make_key()
NUM_BLOCKS = LAYOUT.num_blocks_for(NUM_PROMPT_TOKENS)


def make_offer(**fields) -> Offer:
    defaults = {
        "handoff_id": "handoff-r", "key": KEY, "num_blocks": NUM_BLOCKS,
        "num_tokens": NUM_PROMPT_TOKENS,
    }  # fmt: skip
    return Offer(**{**defaults, **fields})


async def answers(pair: Pair) -> list:
    """What the decode worker sent back."""
    pair.wire.hold = {Credit, Commit, AbortHandoff}
    await pair.settle()
    return list(pair.wire.sender.incoming)


@pytest.mark.parametrize("cause", [AbortCause.CANCELLED, AbortCause.STOPPED])
async def test_an_offer_for_a_leg_that_was_aborted_is_refused_at_once(cause):
    """CASES P-11: by its cause, without any lease running out."""
    pair = Pair()
    pair.start_decode()
    pair.decode.abort_leg(KEY, cause)
    pair.decode.inbox.on_signal(pair.wire.receiver, make_offer())
    (answer,) = await answers(pair)
    assert answer == AbortHandoff(handoff_id="handoff-r", cause=cause)
    pair.assert_idle()


async def test_a_leg_for_a_handoff_that_is_over_ends_at_once():
    pair = Pair()
    pair.decode.inbox.on_signal(
        pair.wire.receiver, AbortHandoff(handoff_id="handoff-r", cause=AbortCause.FAULT)
    )
    pair.start_decode()
    assert isinstance(pair.d_sink.ends[KEY].error, HandoffFailed)
    pair.assert_idle()


async def test_an_offer_without_a_leg_reserves_nothing_and_is_refused_after_the_lease():
    pair = Pair()
    pair.decode.inbox.on_signal(pair.wire.receiver, make_offer())
    assert pair.d_pool.num_free == pair.d_pool.num_blocks
    pair.pass_time(LEASE_S + 1)
    (answer,) = await answers(pair)
    assert answer.cause is AbortCause.LEASE
    pair.assert_idle()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"key": make_key("r", 1)}, "key"),
        ({"num_tokens": NUM_PROMPT_TOKENS + 1}, "num_tokens"),
    ],
)
async def test_an_offer_that_is_not_what_the_leg_needs_is_refused(fields, name):
    pair = Pair()
    pair.start_decode()
    pair.decode.inbox.on_signal(pair.wire.receiver, make_offer(**fields))
    error = pair.d_sink.ends[KEY].error
    assert isinstance(error, HandoffFailed)
    assert name in error.message
    (answer,) = await answers(pair)
    assert answer.cause is AbortCause.REFUSED
    pair.assert_idle()


async def test_an_offer_that_never_fits_is_refused_at_once():
    pair = Pair(d_blocks=NUM_BLOCKS - 1)
    pair.start()
    await pair.prefill_all()
    assert isinstance(pair.d_sink.ends[KEY].error, HandoffFailed)
    (told,) = pair.p_sink.waiting
    assert "never fit" in told.error.message
    pair.prefill.abort_leg(KEY, AbortCause.CANCELLED)
    pair.assert_idle()


async def test_an_offer_of_other_blocks_than_its_manifest_tells_of_fails():
    """Blocks are the sender's, so that only its layout says how many there must be."""
    pair = Pair()
    pair.wire.hold = {Offer}
    pair.start()
    await pair.prefill_all()
    offer = pair.wire.receiver.incoming.popleft()
    pair.wire.receiver.incoming.append(dataclasses.replace(offer, num_blocks=NUM_BLOCKS + 1))
    pair.wire.let_go()
    await pair.settle()
    assert "num_blocks" in pair.d_sink.ends[KEY].error.message
    pair.assert_idle()


async def test_a_second_leg_of_one_handoff_is_refused_and_disturbs_nothing():
    pair = Pair()
    pair.start()
    for half, sink, kind in (
        (pair.prefill, pair.p_sink, LegKind.PREFILL),
        (pair.decode, pair.d_sink, LegKind.DECODE),
    ):
        half.start_leg(pair.leg(kind, "other", handoff_id="handoff-r"), sink)
        error = sink.ends[make_key("other")].error
        assert isinstance(error, InvalidRequest)
        assert error.field == "handoff_id"
    await pair.run_dry()
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    pair.assert_idle()


async def test_an_unreadable_manifest_loses_the_link():
    pair = Pair()
    pair.wire.hold = {ManifestBytes}
    pair.start()
    await pair.prefill_all()
    pair.wire.receiver.incoming.appendleft(ManifestBytes(payload=b"\xc1"))
    pair.wire.let_go()
    await pair.settle()
    assert isinstance(pair.d_sink.ends[KEY].error, HandoffFailed)
    assert "link lost" in pair.p_sink.waiting[0].error.message
    pair.prefill.abort_leg(KEY, AbortCause.CANCELLED)
    pair.assert_idle()


async def test_late_and_repeated_signals_change_nothing():
    pair = Pair()
    pair.start()
    await pair.prefill_all()
    sender, receiver = pair.wire.sender, pair.wire.receiver
    for late in (
        Credit(handoff_id="handoff-r"),
        Commit(handoff_id="handoff-r"),
        AbortHandoff(handoff_id="handoff-r", cause=AbortCause.FAULT),
        Credit(handoff_id="unknown"),
    ):
        pair.prefill.outbox.sender.on_signal(sender, late)
    for late in (
        make_offer(),
        AbortHandoff(handoff_id="handoff-r", cause=AbortCause.FAULT),
        AbortHandoff(handoff_id="unknown", cause=AbortCause.FAULT),
    ):
        pair.decode.inbox.on_signal(receiver, late)
    await pair.run_dry()
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    pair.assert_idle()


async def test_another_link_cannot_speak_for_a_handoff():
    pair = Pair()
    pair.wire.hold = {Credit}
    pair.start()
    await pair.prefill_all()
    old = pair.wire
    pair.new_wire()
    abort = AbortHandoff(handoff_id="handoff-r", cause=AbortCause.FAULT)
    pair.decode.inbox.on_signal(pair.wire.receiver, abort)
    pair.prefill.outbox.sender.on_signal(pair.wire.sender, abort)
    pair.wire = old
    await pair.run_dry()
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)


async def test_blocks_are_given_in_the_order_of_the_offers():
    """CASES P-16: a small offer does not pass a big one that waits; all finish."""
    pair = Pair(d_blocks=12)
    pair.start("big", num_prompt_tokens=28)
    pair.start("bigger", num_prompt_tokens=36)
    await pair.prefill_all()
    pair.start("small", num_prompt_tokens=4)
    await pair.prefill_all()
    assert pair.decode.inbox.num_waiting == 2
    await pair.run_dry()
    for request_id in ("big", "bigger", "small"):
        output = pair.d_sink.output(make_key(request_id))
        assert output == expected_tokens(request_id, MAX_TOKENS)
    pair.assert_idle()


async def leave_by_abort(pair: Pair):
    pair.decode.abort_leg(make_key("head"), AbortCause.CANCELLED)


async def leave_by_the_senders_abort(pair: Pair):
    pair.prefill.abort_leg(make_key("head"), AbortCause.CANCELLED)


async def leave_by_deadline(pair: Pair):
    pair.pass_time(0.5)


async def leave_by_refusal(pair: Pair):
    pair.pass_time(PATIENCE_S - 0.3)


async def leave_by_link_loss(pair: Pair):
    pair.first_wire.cut()


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_abort,
        leave_by_the_senders_abort,
        leave_by_deadline,
        leave_by_link_loss,
        leave_by_refusal,
    ],
    ids=lambda leave: leave.__name__,
)
async def test_those_behind_a_head_that_leaves_get_their_blocks(leave):
    """CASES P-16: it held no blocks, so nothing is freed that could wake them."""
    pair = Pair(d_blocks=11)
    pair.d_pool.allocate(6, "another")
    pair.start("head", num_prompt_tokens=24, remaining_s=0.4 if leave is leave_by_deadline else 9)
    await pair.step_prefill()
    pair.pass_time(0.3)
    pair.first_wire = pair.wire
    if leave is leave_by_link_loss:
        pair.new_wire()
    pair.start("behind", num_prompt_tokens=12)
    await pair.prefill_all()
    assert pair.decode.inbox.num_waiting == 2
    assert pair.d_pool.counts().importing == 0
    await leave(pair)
    await pair.run_dry()
    assert pair.d_sink.output(make_key("behind")) == expected_tokens("behind", MAX_TOKENS)
    pair.d_pool.release("another")
    await pair.run_dry()
    pair.prefill.abort_leg(make_key("head"), AbortCause.CANCELLED)
    pair.assert_idle()


async def test_a_handoff_that_is_told_over_again_is_remembered_anew():
    pair = Pair()

    def over(handoff_id: str) -> None:
        abort = AbortHandoff(handoff_id=handoff_id, cause=AbortCause.FAULT)
        pair.decode.inbox.on_signal(pair.wire.receiver, abort)

    over("handoff-a")
    pair.pass_time(1.0)
    over("handoff-b")
    pair.pass_time(REMEMBERED_S - 2.0)
    over("handoff-a")
    pair.pass_time(2.5)
    assert list(pair.decode.inbox._past._over) == ["handoff-a"]
    pair.pass_time(REMEMBERED_S)
    assert len(pair.decode.inbox._past) == 0


async def test_preempted_sequences_go_before_new_reservations():
    """CASES P-15, P-16: a tight pool preempts, recomputes, and loses no token."""
    pair = Pair(d_blocks=14)
    for i in range(4):
        pair.start(f"r{i}", num_prompt_tokens=12, max_tokens=20)
    await pair.run_dry()
    for i in range(4):
        assert pair.d_sink.output(make_key(f"r{i}")) == expected_tokens(f"r{i}", 20)
    assert pair.d_engine.scheduler.num_preemptions > 0
    pair.assert_idle()


async def test_writing_blocks_can_fail_without_losing_the_link(caplog, monkeypatch):
    pair = Pair()

    def fail(*_):
        raise ValueError("no such block")

    monkeypatch.setattr(pair.decode.inbox._cache, "import_blocks", fail)
    pair.start()
    await pair.prefill_all()
    caplog.clear()
    assert isinstance(pair.d_sink.ends[KEY].error, HandoffFailed)
    assert isinstance(pair.p_sink.ends[KEY].error, HandoffFailed)
    assert pair.wire.sender.is_open
    pair.assert_idle()
