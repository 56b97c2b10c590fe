"""An export travels while it is computed: what is sent when, and what a receiver takes."""

import dataclasses

import pytest

from cluster.errors import Cancelled, HandoffFailed
from cluster.handoff import AbortCause, Commit, Credit, ManifestBytes
from cluster.transport.manifest import Manifest
from tests.factories import expected_tokens, make_key, make_sequence
from tests.lifecycle.pair import CHUNK, LAYOUT, MAX_TOKENS, NUM_PROMPT_TOKENS, Pair
from tests.lifecycle.states import KEY, between_segments, last_manifest_on_its_way

NUM_BLOCKS = LAYOUT.num_blocks_for(NUM_PROMPT_TOKENS)
PER_CHUNK = CHUNK // LAYOUT.block_size


def sent(pair: Pair) -> list[int]:
    """Blocks of each segment that left for the decode worker."""
    return [len(segment) for segment in pair.wire.sent]


async def test_finished_blocks_leave_while_later_chunks_are_computed():
    pair = Pair()
    pair.start()
    for num_chunks in (1, 2):
        await pair.step_prefill()
        assert sent(pair) == [PER_CHUNK] * num_chunks
        assert not pair.p_sink.tokens
    await pair.step_prefill()
    assert sent(pair) == [2, 2, 1]
    await pair.run_dry()
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    assert pair.prefill.outbox.counts["segments"] == 3
    assert pair.decode.inbox.counts["bytes"] == NUM_BLOCKS * LAYOUT.block_bytes
    pair.assert_idle()


async def test_a_late_credit_sends_what_is_there_as_one_segment():
    pair = Pair()
    pair.wire.hold = {Credit}
    pair.start()
    await pair.step_prefill(2)
    assert sent(pair) == []
    pair.wire.let_go()
    await pair.settle()
    assert sent(pair) == [2 * PER_CHUNK]
    await pair.run_dry()
    assert sent(pair) == [4, 1]
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    pair.assert_idle()


async def test_chunks_that_were_computed_while_a_segment_left_go_as_one():
    pair = Pair()
    pair.wire.holds_bytes = True
    pair.start()
    await pair.prefill_all()
    await pair.run_dry()
    assert sent(pair) == [2, 3]
    pair.assert_idle()


@pytest.mark.parametrize("num_prompt_tokens", [1, 4, 5, 8, 16, 17])
async def test_the_last_block_waits_for_the_first_token(num_prompt_tokens):
    """Also where it is full: the segment with the tokens must hold something."""
    pair = Pair()
    pair.start(num_prompt_tokens=num_prompt_tokens)
    await pair.run_dry()
    assert sum(sent(pair)) == LAYOUT.num_blocks_for(num_prompt_tokens)
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    pair.assert_idle()


async def test_without_streaming_everything_leaves_at_the_end():
    pair = Pair(streams=False)
    pair.start()
    await pair.step_prefill(2)
    assert sent(pair) == []
    await pair.run_dry()
    assert sent(pair) == [NUM_BLOCKS]
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    pair.assert_idle()


async def test_waiting_for_what_is_not_computed_is_no_cost_of_the_link():
    """The exposed time begins with the first token; the link's with each segment's turn."""
    pair = Pair()
    await between_segments(pair)
    pair.clock.advance(5.0)
    pair.wire.holds_bytes = True
    await pair.step_prefill()
    pair.clock.advance(0.5)  # for its turn
    pair.wire.released.set()
    await pair.settle()
    pair.clock.advance(5.0)
    pair.wire.hold = {Commit}
    await pair.prefill_all()
    pair.clock.advance(0.25)
    await pair.run_dry()
    times = pair.p_sink.ends[KEY].times
    assert times.exposed_s == 0.25
    assert times.transfer_s == 0.75
    (transfer,) = pair.prefill.outbox.take_transfers()
    assert transfer.seconds == 0.25
    assert transfer.num_bytes == times.transfer_bytes == NUM_BLOCKS * LAYOUT.block_bytes


async def preempted(pair: Pair, num_steps: int) -> None:
    """An older sequence of the same engine grows, and takes the blocks of our prompt."""
    older = make_sequence("older", num_prompt_tokens=4, max_tokens=30, arrived=pair.clock.now())
    pair.p_engine.add(older)
    await pair.step_prefill()
    pair.start(num_prompt_tokens=20)
    await pair.step_prefill(num_steps)
    filler = pair.p_pool.num_free
    pair.p_pool.allocate(filler, "filler")
    while pair.p_engine.scheduler.num_preemptions == 0:
        await pair.step_prefill()
    pair.p_pool.release("filler")


async def test_blocks_that_were_sent_before_a_preemption_are_not_sent_again():
    """CASES P-15: what is computed again equals what left before."""
    pair = Pair(p_blocks=24)
    pair.p_engine.scheduler._shares = dataclasses.replace(
        pair.p_engine.scheduler._shares, chunk_tokens=4
    )
    await preempted(pair, 2)
    num_sent = sum(sent(pair))
    assert 0 < num_sent < 5
    await pair.run_dry()
    assert sum(sent(pair)) == 5
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    pair.assert_idle()


# ---- what a receiver takes


async def changed_manifest(pair: Pair, **changes) -> None:
    """Let the last segment's manifest arrive changed."""
    await last_manifest_on_its_way(pair)
    manifest = Manifest.unpack(pair.wire.receiver.incoming.popleft().payload)
    changed = dataclasses.replace(manifest, **changes)
    pair.wire.receiver.incoming.append(ManifestBytes(payload=changed.pack()))
    pair.wire.let_go()
    await pair.settle()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"first_block": 3, "is_last": False, "output_ids": ()}, "first_block"),
        ({"first_block": 0, "is_last": False, "output_ids": ()}, "first_block"),
        ({"first_block": 5}, "num_blocks"),
        ({"num_tokens": NUM_PROMPT_TOKENS - 3}, "num_tokens"),
        ({"attempt": 1}, "attempt"),
        ({"choice": 1}, "choice"),
        ({"request_id": "other"}, "request_id"),
        ({"output_ids": (5, 6)}, "output_ids"),
        ({"layout": LAYOUT.describe().replace("num_layers=4", "num_layers=2")}, "layout"),
        ({"layout": "nonsense"}, "layout"),
        ({"num_bytes": 2 * LAYOUT.block_bytes}, "num_bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_segment_that_does_not_fit_fails_the_handoff(changes, name):
    """CASES P-22, S-13: gaps, overlaps and wrong totals; the bytes are thrown away, and counted."""
    pair = Pair()
    await changed_manifest(pair, **changes)
    error = pair.d_sink.ends[KEY].error
    assert isinstance(error, HandoffFailed)
    assert name in error.message
    assert isinstance(pair.p_sink.ends[KEY].error, HandoffFailed)
    assert pair.p_sink.waiting == [], "its KV is not to be trusted"
    assert pair.decode.inbox.counts["dropped_segments"] == 1
    pair.start("next")
    await pair.run_dry()
    assert pair.d_sink.output(make_key("next")) == expected_tokens("next", MAX_TOKENS)
    pair.assert_idle()


async def test_segments_of_a_handoff_that_was_aborted_are_dropped_and_counted():
    pair = Pair()
    await between_segments(pair)
    pair.wire.holds_landing = True
    await pair.prefill_all()
    pair.decode.abort_leg(KEY, AbortCause.CANCELLED)
    pair.wire.let_go()
    await pair.settle()
    assert isinstance(pair.p_sink.ends[KEY].error, Cancelled)
    assert pair.decode.inbox.counts["dropped_segments"] >= 1
    pair.assert_idle()


async def test_a_commit_before_the_last_segment_is_not_believed():
    """Its sender would free blocks that it has not sent."""
    pair = Pair()
    await between_segments(pair)
    pair.prefill.outbox.sender.on_signal(pair.wire.sender, Commit(handoff_id="handoff-r"))
    await pair.run_dry()
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    pair.assert_idle()
