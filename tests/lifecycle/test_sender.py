"""How one handoff goes for its sender: its commit, its times, and what fails on the way."""

import asyncio

import pytest

from cluster.errors import Cancelled, DeadlineExceeded, HandoffFailed
from cluster.handoff import AbortCause, AbortHandoff, Commit, Credit, ManifestBytes
from tests.factories import expected_tokens, make_key
from tests.lifecycle.fakes import LAYOUT, FakeStaging
from tests.lifecycle.pair import DEADLINE_S, LEASE_S, MAX_TOKENS, NUM_PROMPT_TOKENS, Pair
from tests.lifecycle.states import (
    KEY,
    abort_prefill,
    between_segments,
    commit_on_its_way,
    credit_on_its_way,
    cut_link,
    dialling_when_exported,
    exported_with_the_first_segment_unread,
)


async def test_the_commit_decides():
    """A sender that never heard of the COMMIT keeps its export; the stream goes on all the same."""
    pair = Pair()
    await commit_on_its_way(pair)
    cut_link(pair)
    await pair.run_dry()
    assert [told.key for told in pair.p_sink.waiting] == [KEY]
    assert pair.d_sink.ends[KEY].error is None
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    pair.prefill.abort_leg(KEY, AbortCause.FINISHED)
    assert pair.p_sink.ends[KEY].error is None
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


async def test_the_deadline_ends_an_export_that_is_not_committed():
    pair = Pair()
    await credit_on_its_way(pair)
    pair.pass_time(DEADLINE_S)
    await pair.settle()
    assert isinstance(pair.p_sink.ends[KEY].error, DeadlineExceeded)
    assert isinstance(pair.d_sink.ends[KEY].error, DeadlineExceeded)
    await pair.run_dry()
    pair.assert_idle()


@pytest.mark.parametrize(
    "state", [dialling_when_exported, credit_on_its_way, between_segments], ids=lambda s: s.__name__
)
async def test_the_first_token_can_be_the_last(state):
    """The prefill leg finishes, the reservation is freed, the decode leg ends in silence."""
    pair = Pair(script={("r", 0): 0})
    await state(pair)
    await pair.run_dry()
    assert pair.p_sink.ends[KEY].finish_reason.value == "stop"
    end = pair.d_sink.ends[KEY]
    assert (end.error, end.finish_reason) == (None, None)
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
    pair = Pair(streams=False)
    await exported_with_the_first_segment_unread(pair)
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


async def test_the_lease_begins_anew_with_each_piece_of_a_slow_link(monkeypatch):
    """All of a big export may be one segment: its bytes flow, however long they take."""
    pair = Pair(streams=False)
    pieces, link = asyncio.Queue(), pair.wire.sender

    async def send_in_pieces(manifest, export) -> None:
        staging = FakeStaging(manifest.block_bytes)
        for block in range(manifest.num_blocks):
            await pieces.get()
            piece = FakeStaging(manifest.block_bytes)
            export(block, 1, piece)
            staging += piece
        pair.wire.bytes.put_nowait(staging)

    monkeypatch.setattr(link, "_send", send_in_pieces)
    pair.start()
    await pair.prefill_all()
    num_blocks = LAYOUT.num_blocks_for(NUM_PROMPT_TOKENS)
    for _ in range(num_blocks):
        pieces.put_nowait(None)
        await pair.settle()
        pair.pass_time(LEASE_S - 1)
    await pair.run_dry()
    assert pair.p_sink.ends[KEY].error is None
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    # STEP: what it costs is counted from the first piece on.
    (transfer,) = pair.prefill.outbox.take_transfers()
    assert transfer.seconds == (num_blocks - 1) * (LEASE_S - 1)
    pair.assert_idle()


async def test_an_export_whose_manifest_does_not_leave_is_told_to_the_receiver(monkeypatch):
    """It has credited and would wait until its deadline; another would fare no better."""
    pair = Pair()

    async def refuse(manifest, export, timeout_s=None) -> None:
        raise HandoffFailed("manifest.layout: not this one")

    monkeypatch.setattr(pair.wire.sender, "send_export", refuse)
    pair.start()
    await pair.prefill_all()
    assert isinstance(pair.p_sink.ends[KEY].error, HandoffFailed)
    assert isinstance(pair.d_sink.ends[KEY].error, HandoffFailed)
    assert pair.p_sink.waiting == []
    assert pair.d_pool.counts().importing == 0
    assert pair.wire.sender.is_open
    pair.assert_idle()


async def test_no_manifest_follows_an_abort():
    """Given up right after the credit: what was announced by then comes, and is thrown away."""
    pair = Pair()
    pair.wire.hold = {Credit}
    pair.start()
    await pair.prefill_all()
    (credit,) = pair.wire.sender.incoming
    pair.wire.sender.incoming.clear()
    pair.wire.hold = {ManifestBytes}
    pair.prefill.outbox.sender.on_signal(pair.wire.sender, credit)
    abort_prefill(pair)
    await pair.settle()
    assert [type(message) for message in pair.wire.receiver.incoming] == [
        ManifestBytes, AbortHandoff,
    ]  # fmt: skip
    await pair.run_dry()
    assert isinstance(pair.d_sink.ends[KEY].error, Cancelled)
    assert pair.decode.inbox.counts["dropped_segments"] == 1
    pair.assert_idle()


async def test_what_nobody_waits_for_ends_in_the_workers_fault(monkeypatch, caplog):
    """A bug in a task, or on a link's loss, must not leave legs waiting in silence."""
    pair = Pair()

    async def fail(*_, **__) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(pair.wire.sender, "send_export", fail)
    pair.start()
    await pair.prefill_all()
    assert {type(error) for error in pair.faults} == {ZeroDivisionError}
    num_before = len(pair.faults)
    monkeypatch.setattr(pair.decode.inbox, "_end", lambda *_, **__: 1 / 0)
    cut_link(pair)
    await pair.settle()
    assert len(pair.faults) == num_before + 1
    assert "an errand failed" in caplog.text
    caplog.clear()
