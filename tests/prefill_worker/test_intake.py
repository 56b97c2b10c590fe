"""What the prefill half does with the engine's events; the handoff itself is in lifecycle/."""

import dataclasses

from cluster.errors import Cancelled, DeadlineExceeded
from cluster.handoff import AbortCause
from cluster.request import FinishReason, LegKind, TokenLogprobs
from tests.factories import expected_tokens, make_key, make_params
from tests.lifecycle.pair import DEADLINE_S, LAYOUT, MAX_TOKENS, NUM_PROMPT_TOKENS, Pair

KEY = make_key()


async def test_the_first_token_does_not_wait_for_the_transfer():
    pair = Pair()
    pair.dialer.may_dial.clear()
    pair.start_prefill()
    await pair.prefill_all()
    assert pair.p_sink.output(KEY) == expected_tokens("r", 1)
    assert not pair.p_sink.ends


async def test_an_abort_that_crosses_the_handover_frees_the_blocks(monkeypatch):
    """CASES P-11: the engine lets go of a sequence that was given up a moment before."""
    pair = Pair()
    pair.start_prefill()
    await pair.step_prefill(2)
    with monkeypatch.context() as patch:
        patch.setattr(pair.p_engine, "abort", lambda key, error: None)
        pair.prefill.abort_leg(KEY, AbortCause.CANCELLED)
        await pair.prefill_all()
    assert isinstance(pair.p_sink.ends[KEY].error, Cancelled)
    assert pair.p_sink.output(KEY) == []
    pair.assert_idle()


async def test_a_leg_without_a_handoff_ends_at_its_first_token():
    pair = Pair()
    leg = pair.leg(LegKind.PREFILL, handoff_id="", peer=None, params=make_params(1))
    pair.prefill.start_leg(leg, pair.p_sink)
    await pair.prefill_all()
    assert pair.p_sink.ends[KEY].finish_reason is FinishReason.LENGTH
    pair.assert_idle()


async def test_times_and_counts_tell_what_happened():
    """CASES P-29: bytes are blocks times block bytes; durations are not negative."""
    pair = Pair()
    pair.start()
    await pair.step_prefill()
    pair.clock.advance(1.0)
    await pair.prefill_all()
    times = pair.p_sink.ends[KEY].times
    num_bytes = -(-NUM_PROMPT_TOKENS // 4) * LAYOUT.block_bytes
    assert times.transfer_bytes == num_bytes
    assert times.num_computed_tokens == NUM_PROMPT_TOKENS
    assert times.compute_s == 1.0
    assert times.transfer_s == times.exposed_s == 0.0
    counts = pair.prefill.outbox.counts
    assert counts == {"started": 1, "segments": 3, "committed": 1, "bytes": num_bytes}
    (transfer,) = pair.prefill.outbox.take_transfers()
    assert (transfer.peer_worker_id, transfer.num_bytes) == ("d", num_bytes)
    assert pair.prefill.outbox.take_transfers() == ()
    assert pair.prefill.book.counts == {"received": 1, "handed_over": 1}


async def test_one_message_for_each_step_and_router():
    pair = Pair()
    for i in range(3):
        pair.start(f"r{i}", num_prompt_tokens=4)
    await pair.step_prefill()
    assert len(pair.p_sink.tokens) == 3
    assert pair.p_sink.num_messages - len(pair.p_sink.ends) == 1


async def test_the_deadline_ends_a_leg_in_the_engine_and_after_it():
    for num_steps in (1, 5):
        pair = Pair()
        pair.start_prefill()
        await pair.step_prefill(num_steps)
        pair.pass_time(DEADLINE_S + 1)
        await pair.step_prefill()
        assert isinstance(pair.p_sink.ends[KEY].error, DeadlineExceeded)
        assert pair.p_pool.num_free == pair.p_pool.num_blocks


async def test_the_first_tokens_logprobs_travel_with_it():
    """The decode worker repeats the token; its router may read of it there first."""
    pair = Pair()
    logprobs = TokenLogprobs(-0.5, ((7, -0.5),))
    half, on_step = pair.prefill, pair.prefill.on_step

    def with_logprobs(events) -> None:
        tokens = tuple(dataclasses.replace(token, logprobs=logprobs) for token in events.tokens)
        on_step(dataclasses.replace(events, tokens=tokens))

    pair.p_engine.on_step = with_logprobs
    seen = []
    emit = pair.d_sink.emit
    pair.d_sink.emit = lambda tokens, *rest: (seen.extend(tokens), emit(tokens, *rest))
    pair.start()
    await pair.prefill_all()
    assert half.book.counts["handed_over"] == 1
    assert [token.logprobs for token in seen] == [logprobs]


async def test_a_resumed_choice_hands_over_after_its_next_token():
    pair = Pair()
    done = tuple(expected_tokens("r", 2))
    pair.start(output_ids=done)
    await pair.run_dry()
    assert pair.p_sink.output(KEY) == expected_tokens("r", 3)[2:]
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)[2:]
    pair.assert_idle()
