"""Layers travel out of a running step: what is sent when, and what becomes of it in a bad end."""

import dataclasses

import pytest

from cluster.errors import EngineFault, HandoffFailed
from cluster.handoff import AbortCause, Credit, ManifestBytes
from cluster.request import LegKind
from cluster.transport.manifest import Manifest
from tests.factories import expected_tokens, make_key
from tests.lifecycle.fakes import LAYERS
from tests.lifecycle.pair import LAYOUT, LEASE_S, MAX_TOKENS, NUM_PROMPT_TOKENS, Pair
from tests.lifecycle.states import (
    KEY,
    abort_decode,
    abort_prefill,
    all_layers_sent,
    cut_and_dial_again,
    fail_prefill_engine,
    first_layers_not_landed,
    first_layers_sent,
    first_layers_unread,
    names,
    redirect_to_another,
)

NUM_BLOCKS = LAYOUT.num_blocks_for(NUM_PROMPT_TOKENS)


def make_pair(*, chunk_tokens: int = 0, **fields) -> Pair:
    """A pair whose prefill worker computes whole prompts, or chunks."""
    pair = Pair(**fields)
    shares = pair.p_engine.scheduler._shares
    pair.p_engine.scheduler._shares = dataclasses.replace(shares, chunk_tokens=chunk_tokens)
    return pair


async def store(pair: Pair, *nums_layers: int) -> None:
    for num_layers in nums_layers:
        pair.p_engine.store(num_layers)
        await pair.settle()


async def begin(pair: Pair) -> None:
    pair.p_engine.begin()
    await pair.settle()


async def end(pair: Pair) -> None:
    pair.p_engine.end()
    await pair.settle()


def parts(pair: Pair) -> list[tuple[int, int, int, int]]:
    """First block, end block, first layer, end layer of each part that left."""
    return [(b.start, b.stop, la.start, la.stop) for b, la in pair.wire.parts]


async def assert_streams_to_its_end(pair: Pair) -> None:
    await pair.run_dry()
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    assert pair.decode.inbox.counts["bytes"] == NUM_BLOCKS * LAYOUT.block_bytes
    covered = [
        (block, layer) for blocks, layers in pair.wire.parts for block in blocks for layer in layers
    ]
    assert sorted(covered) == [(b, la) for b in range(NUM_BLOCKS) for la in range(LAYERS)]
    pair.assert_idle()


# ---- what is sent when


async def test_layers_leave_while_later_ones_are_computed():
    """The rest goes with the first token, in one part."""
    pair = make_pair()
    pair.start()
    await begin(pair)
    assert parts(pair) == []
    await store(pair, 1)
    assert parts(pair) == [(0, 5, 0, 1)]
    await store(pair, 3)
    assert parts(pair) == [(0, 5, 0, 1), (0, 5, 1, 3)]
    assert not pair.p_sink.tokens
    await end(pair)
    assert parts(pair)[2:] == [(0, 5, 3, 4)]
    assert pair.prefill.outbox.counts["segments"] == 3
    await assert_streams_to_its_end(pair)


async def test_all_layers_leave_before_the_token_is_drawn_which_goes_alone():
    pair = make_pair()
    await all_layers_sent(pair)
    assert parts(pair) == [(0, 5, 0, 2), (0, 5, 2, 4)]
    assert pair.decode.inbox.counts["committed"] == 0
    await end(pair)
    assert parts(pair)[2:] == [(5, 5, 0, 0)]
    assert pair.decode.inbox.counts["committed"] == 1
    await assert_streams_to_its_end(pair)


async def test_a_token_alone_waits_for_layers_that_have_not_landed():
    pair = make_pair()
    pair.wire.holds_landing = True
    await all_layers_sent(pair)
    await end(pair)
    assert pair.decode.inbox.counts["committed"] == 0
    pair.wire.let_go()
    await assert_streams_to_its_end(pair)


async def test_a_token_that_never_comes_fails_the_handoff_within_the_lease():
    """All KV has landed; without the tokens nobody may decode over it."""
    pair = make_pair()
    await all_layers_sent(pair)
    pair.wire.hold = {ManifestBytes}
    await end(pair)
    pair.pass_time(LEASE_S + 1)
    await pair.settle()
    assert pair.decode.inbox.counts["committed"] == 0
    assert isinstance(pair.p_sink.ends[KEY].error, HandoffFailed)
    pair.wire.let_go()
    await pair.run_dry()
    pair.assert_idle()


async def test_a_late_credit_and_a_busy_link_make_larger_parts():
    pair = make_pair()
    pair.wire.hold = {Credit}
    pair.start()
    await begin(pair)
    await store(pair, 1)
    assert parts(pair) == []
    pair.wire.hold = set()
    pair.wire.holds_bytes = True
    await pair.settle()
    await store(pair, 2, 3)
    pair.wire.let_go()
    await pair.settle()
    assert parts(pair) == [(0, 5, 0, 1), (0, 5, 1, 3)]
    await assert_streams_to_its_end(pair)


async def test_a_chunk_that_was_begun_is_ended_before_the_next_one():
    """Whose layers, or all of it, may be there by then."""
    pair = make_pair(chunk_tokens=8)
    pair.start()
    await begin(pair)
    await store(pair, 2)
    pair.wire.holds_bytes = True
    await end(pair)
    await begin(pair)
    await store(pair, 3)
    pair.wire.let_go()
    await pair.settle()
    assert parts(pair) == [(0, 2, 0, 2), (0, 2, 2, 4), (2, 4, 0, 3)]
    await end(pair)
    await assert_streams_to_its_end(pair)


async def test_blocks_that_are_whole_go_before_layers_of_those_behind_them():
    """E.g. found in the prefix cache, or of an earlier chunk, when the credit comes."""
    pair = make_pair(chunk_tokens=8)
    pair.wire.hold = {Credit}
    pair.start()
    await begin(pair)
    await end(pair)
    await begin(pair)
    await store(pair, 1)
    pair.wire.let_go()
    await pair.settle()
    assert parts(pair) == [(0, 2, 0, 4), (2, 4, 0, 1)]
    await assert_streams_to_its_end(pair)


async def test_a_redirect_sends_all_of_it_again_from_the_first_layer():
    pair = make_pair()
    pair.start()
    await begin(pair)
    await store(pair, 2)
    side = pair.add_decode("e")
    pair.redirect("e")
    await pair.settle()
    await pair.run_dry()
    assert [(la.start, la.stop) for _, la in side.wire.parts] == [(0, 2), (2, 4)]
    assert side.sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    abort_decode(pair)
    await pair.run_dry()
    pair.assert_idle()


async def test_layers_that_left_before_a_preemption_are_not_sent_again():
    """CASES P-15: what is computed again equals what left before."""
    pair = make_pair(chunk_tokens=12)
    pair.start()
    await begin(pair)
    pair.wire.holds_bytes = True
    await store(pair, 2)
    await end(pair)
    sequence = pair.p_engine.scheduler._live[KEY]
    pair.p_engine.scheduler._preempt(sequence)
    pair.p_pool.release(KEY)
    pair.wire.let_go()
    await pair.settle()
    assert parts(pair) == [(0, 3, 0, 2)]
    await assert_streams_to_its_end(pair)


async def test_without_streaming_nothing_leaves_a_running_step():
    pair = make_pair(streams=False)
    pair.start()
    await begin(pair)
    assert pair.p_engine.running[0].shares[0].stored is None
    await end(pair)
    assert parts(pair) == [(0, 5, 0, 4)]
    await assert_streams_to_its_end(pair)


# ---- bad ends between two parts of one step


MIDST = (first_layers_sent, first_layers_unread, first_layers_not_landed, all_layers_sent)


@pytest.mark.parametrize("state", MIDST, ids=names(MIDST))
async def test_a_step_that_fails_after_layers_left_commits_nothing(state):
    """Blocks are free again on both sides, and the client's leg hears of a fault."""
    pair = make_pair()
    await state(pair)
    assert pair.d_pool.counts().importing == NUM_BLOCKS
    fail_prefill_engine(pair)
    await pair.run_dry()
    assert isinstance(pair.p_sink.ends[KEY].error, EngineFault)
    assert isinstance(pair.d_sink.ends[KEY].error, HandoffFailed)
    assert pair.decode.inbox.counts["committed"] == 0
    assert not pair.d_sink.output(KEY)
    pair.assert_idle()


ENDS = (abort_prefill, abort_decode, cut_and_dial_again)


@pytest.mark.parametrize("bad_end", ENDS, ids=names(ENDS))
async def test_blocks_of_a_running_step_are_held_until_they_were_read(bad_end):
    """CASES P-11, P-21: the step's end gives up the sequence, and the link's thread still reads."""
    pair = make_pair()
    await first_layers_unread(pair)
    wire = pair.wire
    bad_end(pair)
    await pair.settle()
    assert pair.p_pool.counts().held == NUM_BLOCKS
    abort_prefill(pair)
    await end(pair)
    assert pair.p_pool.counts().held == (NUM_BLOCKS if wire.sender.is_open else 0)
    wire.let_go()
    await pair.run_dry()
    assert pair.decode.inbox.counts["committed"] == 0
    pair.assert_idle()


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "unheld"])
async def test_layers_are_sent_as_they_were_announced(is_held):
    """CASES P-21, mirror: the next request must not get blocks that are still to be read."""
    pair = make_pair(p_blocks=10)
    if not is_held:
        pair.p_pool.share = lambda old, block_ids, new: None
    await first_layers_unread(pair)
    slots = dict(pair.p_engine.runner._slots)
    expected = [slots[block, 0] for block in pair.p_pool.blocks_of(KEY)]
    abort_prefill(pair)
    await end(pair)
    leg = pair.leg(LegKind.PREFILL, "next", num_prompt_tokens=18, handoff_id="", peer=None)
    pair.prefill.start_leg(leg, pair.p_sink)
    await pair.step_prefill()
    pair.wire.let_go()
    await pair.settle()
    (sent,) = pair.wire.sent
    assert ([block[0] for block in sent] == expected) == is_held


async def test_the_next_request_computes_undisturbed_in_blocks_that_layers_were_written_to():
    """A canary: the aborted handoff's later parts never reach it."""
    pair = make_pair(d_blocks=6)
    await first_layers_not_landed(pair)
    reserved = pair.d_pool.importing("handoff-r")
    abort_decode(pair)
    pair.start_local("next")
    await pair.step_decode(3)
    assert set(pair.d_pool.blocks_of(make_key("next"))) >= set(reserved)
    await store(pair, 3)
    pair.wire.let_go()
    await pair.run_dry()
    assert pair.d_sink.output(make_key("next")) == expected_tokens("next", MAX_TOKENS)
    assert pair.decode.inbox.counts["dropped_segments"] == 1
    pair.assert_idle()


async def test_a_redirect_in_the_midst_of_a_step_leaves_the_old_one_without_blocks():
    pair = make_pair()
    await first_layers_not_landed(pair)
    redirect_to_another(pair)
    pair.wire.let_go()
    await pair.run_dry()
    assert pair.d_pool.counts().importing == 0
    assert pair.sides["e"].sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    abort_decode(pair)
    await pair.run_dry()
    pair.assert_idle()


# ---- what a receiver takes


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"first_layer": 1, "num_layers": 2}, "first_layer"),
        ({"first_layer": 0, "num_layers": 3}, "first_layer"),
        ({"num_layers": 3}, "num_layers"),
        ({"num_blocks": 4, "piece_blocks": 4}, "num_blocks"),
        ({"first_block": 1, "num_blocks": 4, "piece_blocks": 4}, "first_block"),
        ({"first_block": 5, "num_blocks": 1, "piece_blocks": 1}, "num_blocks"),
    ],
    ids=str,
)
async def test_a_part_that_does_not_follow_the_one_before_it_fails_the_handoff(changes, name):
    """CASES P-22, S-13: gaps, overlaps and another order, in layers as in blocks."""
    pair = make_pair()
    await first_layers_sent(pair)
    pair.wire.hold = {ManifestBytes}
    await store(pair, 3)
    manifest = Manifest.unpack(pair.wire.receiver.incoming.popleft().payload)
    assert manifest.layers == range(2, 3)
    changed = dataclasses.replace(manifest, **changes)
    num_bytes = changed.num_blocks * changed.num_layers * LAYOUT.layer_bytes
    changed = dataclasses.replace(changed, num_bytes=num_bytes)
    pair.wire.receiver.incoming.append(ManifestBytes(payload=changed.pack()))
    pair.wire.let_go()
    await pair.run_dry()
    error = pair.d_sink.ends[KEY].error
    assert isinstance(error, HandoffFailed)
    assert f"manifest.{name}" in error.message
    assert isinstance(pair.p_sink.ends[KEY].error, HandoffFailed)
    assert pair.p_sink.waiting == [], "its KV is not to be trusted"
    assert pair.decode.inbox.counts["committed"] == 0
    pair.start("next")
    await pair.run_dry()
    assert pair.d_sink.output(make_key("next")) == expected_tokens("next", MAX_TOKENS)
    pair.assert_idle()


async def test_a_last_part_without_those_before_it_is_not_the_end():
    """The tokens come with it: to take them would be to decode over what never came."""
    pair = make_pair()
    await first_layers_sent(pair)
    pair.wire.hold = {ManifestBytes}
    await store(pair, 3)
    await end(pair)
    pair.wire.receiver.incoming.popleft()
    pair.wire.let_go()
    await pair.run_dry()
    assert "first_layer: 3, expected 2" in pair.d_sink.ends[KEY].error.message
    assert pair.decode.inbox.counts["committed"] == 0
    pair.prefill.abort_leg(KEY, AbortCause.CANCELLED)
    await pair.run_dry()
    pair.assert_idle()
