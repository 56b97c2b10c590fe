"""An abort and a fault at every state of a handoff, on both sides: nothing is kept, no end lost."""

import pytest

from cluster.errors import Cancelled, DeadlineExceeded, EngineFault, HandoffFailed, WorkerLost
from cluster.handoff import AbortCause, Commit, Credit, ManifestBytes, Offer
from tests.factories import expected_tokens, make_key
from tests.lifecycle.pair import DEADLINE_S, LEASE_S, MAX_TOKENS, Pair

KEY = make_key()
FULL = ("someone", "else")


async def queued(pair: Pair):
    pair.start()


async def dialling_while_computing(pair: Pair):
    pair.dialer.may_dial.clear()
    pair.start()
    await pair.step_prefill()


async def dialling_when_exported(pair: Pair):
    pair.dialer.may_dial.clear()
    pair.start()
    await pair.prefill_all()


async def offer_on_its_way(pair: Pair):
    pair.wire.hold = {Offer}
    pair.start()
    await pair.step_prefill()


async def offer_without_leg(pair: Pair):
    pair.start_prefill()
    await pair.step_prefill()


async def waiting_for_blocks(pair: Pair):
    pair.d_pool.allocate(pair.d_pool.num_blocks, FULL)
    pair.start()
    await pair.step_prefill()


async def exported_and_waiting_for_blocks(pair: Pair):
    pair.d_pool.allocate(pair.d_pool.num_blocks, FULL)
    pair.start()
    await pair.prefill_all()


async def credited_while_computing(pair: Pair):
    pair.start()
    await pair.step_prefill()


async def credit_on_its_way(pair: Pair):
    pair.wire.hold = {Credit}
    pair.start()
    await pair.prefill_all()


async def manifest_on_its_way(pair: Pair):
    pair.wire.hold = {ManifestBytes}
    pair.start()
    await pair.prefill_all()


async def bytes_on_their_way(pair: Pair):
    pair.wire.holds_bytes = True
    pair.start()
    await pair.prefill_all()


async def commit_on_its_way(pair: Pair):
    pair.wire.hold = {Commit}
    pair.start()
    await pair.prefill_all()


async def committed(pair: Pair):
    pair.start()
    await pair.prefill_all()


async def streaming(pair: Pair):
    pair.start()
    await pair.prefill_all()
    await pair.step_decode(2)


STATES = (
    queued, dialling_while_computing, dialling_when_exported, offer_on_its_way, offer_without_leg,
    waiting_for_blocks, exported_and_waiting_for_blocks, credited_while_computing,
    credit_on_its_way, manifest_on_its_way, bytes_on_their_way, commit_on_its_way, committed,
    streaming,
)  # fmt: skip
LINKED = STATES[4:]
"""States in which the prefill worker has its link."""
UNCOMMITTED = STATES[:11]
"""States in which the decode worker has not taken the KV over."""


def abort_prefill(pair: Pair):
    pair.prefill.abort_leg(KEY, AbortCause.CANCELLED)


def abort_decode(pair: Pair):
    pair.decode.abort_leg(KEY, AbortCause.CANCELLED)


def abort_both(pair: Pair):
    abort_prefill(pair)
    abort_decode(pair)


def stop_string(pair: Pair):
    pair.prefill.abort_leg(KEY, AbortCause.STOPPED)
    pair.decode.abort_leg(KEY, AbortCause.STOPPED)


def lose_router_of_prefill(pair: Pair):
    pair.prefill.router_lost(pair.p_sink, AbortCause.CANCELLED)


def lose_router_of_decode(pair: Pair):
    pair.decode.router_lost(pair.d_sink, AbortCause.CANCELLED)


def cut_link(pair: Pair):
    pair.wire.cut()
    pair.dialer.error = HandoffFailed("no link")


def fail_prefill_engine(pair: Pair):
    pair.p_engine.fail()
    pair.prefill.close(AbortCause.FAULT, EngineFault("the engine failed"))


def fail_decode_engine(pair: Pair):
    pair.d_engine.fail()
    pair.decode.close(AbortCause.FAULT, EngineFault("the engine failed"))


def stop_prefill(pair: Pair):
    pair.stop_prefill()
    pair.dialer.error = HandoffFailed("stopping")


def stop_decode(pair: Pair):
    pair.stop_decode()
    pair.dialer.error = WorkerLost("stopping")


def pass_deadline(pair: Pair):
    pair.pass_time(DEADLINE_S + 1)


def pass_lease(pair: Pair):
    pair.pass_time(LEASE_S + 1)


FAULTS = (
    abort_prefill, abort_decode, abort_both, stop_string, lose_router_of_prefill,
    lose_router_of_decode, cut_link, fail_prefill_engine, fail_decode_engine, stop_prefill,
    stop_decode, pass_deadline, pass_lease,
)  # fmt: skip


def names(functions):
    return [function.__name__ for function in functions]


async def finish(pair: Pair) -> None:
    """A router aborts what is left of a request when one of its legs failed."""
    pair.d_pool.release(FULL)
    await pair.run_dry()
    abort_both(pair)
    await pair.run_dry()
    pair.pass_time(LEASE_S + 1)
    await pair.run_dry()


@pytest.mark.parametrize("fault", FAULTS, ids=names(FAULTS))
@pytest.mark.parametrize("state", STATES, ids=names(STATES))
async def test_nothing_is_kept(state, fault):
    """CASES P-11, P-12, P-19, P-20: each leg ends once, each block is free again."""
    pair = Pair()
    await state(pair)
    fault(pair)
    pair.p_pool.check()
    pair.d_pool.check()
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
    pair.d_pool.release(FULL)
    await pair.run_dry()
    assert pair.p_sink.output(KEY) == expected_tokens("r", 1)
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    assert pair.d_engine.num_prompt_steps == 0
    end = pair.p_sink.ends[KEY]
    assert (end.error, end.finish_reason) == (None, None)
    pair.assert_idle()


@pytest.mark.parametrize("abort", [abort_prefill, lose_router_of_prefill, stop_prefill])
@pytest.mark.parametrize("state", [s for s in LINKED if s in UNCOMMITTED], ids=lambda s: s.__name__)
async def test_the_decode_worker_is_told_at_once(state, abort):
    """CASES P-11, P-19: without its router's help, as soon as the wire carries the word."""
    pair = Pair()
    await state(pair)
    if state is offer_without_leg:
        pair.start_decode()
    abort(pair)
    pair.wire.let_go()
    await pair.settle()
    assert pair.d_sink.ends[KEY].error is not None
    assert pair.d_pool.counts().importing == 0


@pytest.mark.parametrize("abort", [abort_decode, lose_router_of_decode, stop_decode])
@pytest.mark.parametrize("state", [s for s in LINKED if s in UNCOMMITTED], ids=lambda s: s.__name__)
async def test_the_prefill_worker_is_told_at_once(state, abort):
    """CASES P-11, P-20: its export is free without any lease running out."""
    pair = Pair()
    await state(pair)
    if state is offer_without_leg:
        pair.start_decode()
    abort(pair)
    pair.wire.let_go()
    await pair.settle()
    await pair.step_prefill()
    assert pair.p_sink.ends[KEY].error is not None
    assert pair.p_pool.num_free == pair.p_pool.num_blocks


@pytest.mark.parametrize("state", [s for s in LINKED if s in UNCOMMITTED], ids=lambda s: s.__name__)
async def test_a_lost_link_fails_both_legs(state):
    """CASES P-19, P-20: both ends say that the handoff failed."""
    pair = Pair()
    await state(pair)
    if state is offer_without_leg:
        pair.start_decode()
    cut_link(pair)
    await pair.settle()
    await pair.step_prefill()
    assert isinstance(pair.p_sink.ends[KEY].error, HandoffFailed)
    assert isinstance(pair.d_sink.ends[KEY].error, HandoffFailed)


async def test_the_commit_decides():
    """A sender that never heard of the COMMIT fails its leg; the stream goes on all the same."""
    pair = Pair()
    await commit_on_its_way(pair)
    cut_link(pair)
    await pair.run_dry()
    assert isinstance(pair.p_sink.ends[KEY].error, HandoffFailed)
    assert pair.d_sink.ends[KEY].error is None
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    pair.assert_idle()


async def test_no_commit_within_the_lease_ends_the_export():
    pair = Pair()
    await commit_on_its_way(pair)
    pair.pass_time(LEASE_S + 1)
    assert isinstance(pair.p_sink.ends[KEY].error, HandoffFailed)
    assert pair.p_pool.num_free == pair.p_pool.num_blocks
    await pair.run_dry()
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    pair.assert_idle()


async def test_waiting_for_blocks_is_not_bounded_by_the_lease_but_by_the_deadline():
    pair = Pair()
    await exported_and_waiting_for_blocks(pair)
    pair.pass_time(LEASE_S + 1)
    await pair.settle()
    assert not pair.p_sink.ends
    pair.pass_time(DEADLINE_S)
    await pair.settle()
    assert isinstance(pair.p_sink.ends[KEY].error, DeadlineExceeded)
    assert isinstance(pair.d_sink.ends[KEY].error, DeadlineExceeded)


async def test_the_first_token_can_be_the_last():
    """The prefill leg finishes, the reservation is freed, the decode leg ends in silence."""
    for state in (dialling_when_exported, credit_on_its_way, credited_while_computing):
        pair = Pair(script={("r", 0): 0})
        await state(pair)
        await pair.run_dry()
        assert pair.p_sink.ends[KEY].finish_reason.value == "stop"
        end = pair.d_sink.ends[KEY]
        assert (end.error, end.finish_reason) == (None, None)
        assert pair.d_sink.output(KEY) == []
        pair.assert_idle()


async def test_an_export_is_not_freed_while_the_link_reads_it():
    """CASES P-21: bytes that were announced are sent as they were."""
    pair = Pair()
    await bytes_on_their_way(pair)
    held = pair.p_pool.counts().held
    abort_prefill(pair)
    assert isinstance(pair.p_sink.ends[KEY].error, Cancelled)
    assert pair.p_pool.counts().held == held
    pair.wire.let_go()
    await pair.settle()
    assert pair.p_pool.num_free == pair.p_pool.num_blocks


async def test_late_bytes_do_not_reach_blocks_of_another():
    """CASES P-21: the reservation goes to the next request while the old bytes still come."""
    pair = Pair(d_blocks=8)
    await bytes_on_their_way(pair)
    abort_decode(pair)
    pair.start("b")
    await pair.prefill_all()
    await pair.run_dry()
    assert pair.d_sink.output(make_key("b")) == expected_tokens("b", MAX_TOKENS)
    assert pair.d_sink.output(KEY) == []
    pair.assert_idle()


async def test_a_storm_of_aborts_leaves_room_for_the_next():
    """CASES P-12: aborted requests alone would fill both pools."""
    pair = Pair(p_blocks=8, d_blocks=8)
    for round_number in range(5):
        ids = [f"r{round_number}-{i}" for i in range(12)]
        for request_id in ids:
            pair.start(request_id)
        await pair.step_prefill(round_number)
        for request_id in ids:
            pair.prefill.abort_leg(make_key(request_id), AbortCause.CANCELLED)
            pair.decode.abort_leg(make_key(request_id), AbortCause.CANCELLED)
        await pair.step_prefill()
        await pair.step_decode()
        assert pair.p_pool.num_free == pair.d_pool.num_free == 8
    pair.start("probe")
    await pair.run_dry()
    assert pair.d_sink.output(make_key("probe")) == expected_tokens("probe", MAX_TOKENS)
    pair.assert_idle()


async def test_waiting_for_its_turn_is_neither_lease_nor_cost():
    """Behind other exports on its link nothing moves: the lease begins with its own bytes."""
    pair = Pair()
    await bytes_on_their_way(pair)
    pair.pass_time(LEASE_S + 1)
    assert not pair.p_sink.ends
    pair.wire.hold = {Commit}
    pair.wire.released.set()
    while not pair.wire.sender.incoming:
        await pair.settle()
    pair.clock.advance(0.25)
    pair.wire.let_go()
    await pair.run_dry()
    assert pair.p_sink.ends[KEY].error is None
    assert pair.p_sink.ends[KEY].times.transfer_s == LEASE_S + 1.25
    (transfer,) = pair.prefill.outbox.take_transfers()
    assert transfer.seconds == 0.25
    pair.assert_idle()


async def test_an_export_whose_manifest_does_not_leave_is_told_to_the_receiver(monkeypatch):
    """It has credited, and would wait for bytes until its deadline."""
    pair = Pair()

    async def refuse(manifest, export, timeout_s=None) -> None:
        raise HandoffFailed("manifest.layout: not this one")

    monkeypatch.setattr(pair.wire.sender, "send_export", refuse)
    pair.start()
    await pair.prefill_all()
    assert isinstance(pair.p_sink.ends[KEY].error, HandoffFailed)
    assert isinstance(pair.d_sink.ends[KEY].error, HandoffFailed)
    assert pair.d_pool.counts().importing == 0
    assert pair.wire.sender.is_open
    pair.assert_idle()


async def test_no_manifest_follows_an_abort():
    """Given up between the credit and the first turn of its sending task."""
    pair = Pair()
    pair.wire.hold = {Credit}
    pair.start()
    await pair.prefill_all()
    (credit,) = pair.wire.sender.incoming
    pair.wire.sender.incoming.clear()
    pair.wire.hold = {ManifestBytes}
    pair.prefill.outbox.on_signal(pair.wire.sender, credit)
    abort_prefill(pair)
    await pair.settle()
    assert not pair.wire.receiver.incoming
    assert isinstance(pair.d_sink.ends[KEY].error, Cancelled)
    await pair.run_dry()
    pair.assert_idle()


async def test_what_nobody_waits_for_ends_in_the_workers_fault(monkeypatch, caplog):
    """A bug in a task, or on a link's loss, must not leave legs waiting in silence."""
    pair = Pair()

    async def fail(*_, **__) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(pair.wire.sender, "send_export", fail)
    pair.start()
    await pair.prefill_all()
    assert [type(error) for error in pair.faults] == [ZeroDivisionError]
    monkeypatch.setattr(pair.decode.inbox, "_end", lambda *_, **__: 1 / 0)
    cut_link(pair)
    await pair.settle()
    assert [type(error) for error in pair.faults] == [ZeroDivisionError] * 2
    assert "an errand failed" in caplog.text
    caplog.clear()
