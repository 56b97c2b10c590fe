"""What the decode half does with legs and the engine's events; handoffs are in lifecycle/."""

from types import SimpleNamespace

from cluster.errors import Cancelled, DeadlineExceeded
from cluster.handoff import AbortCause
from cluster.request import FinishReason, LegKind
from tests.factories import expected_tokens, make_key, make_params
from tests.lifecycle.pair import DEADLINE_S, MAX_TOKENS, NUM_PROMPT_TOKENS, Pair

KEY = make_key()


async def test_a_local_leg_is_computed_here_from_its_prompt_on():
    pair = Pair()
    pair.decode.start_leg(pair.leg(LegKind.LOCAL), pair.d_sink)
    await pair.run_dry()
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    end = pair.d_sink.ends[KEY]
    assert end.finish_reason is FinishReason.LENGTH
    assert end.times.num_computed_tokens == NUM_PROMPT_TOKENS + MAX_TOKENS - 1
    assert pair.decode.book.counts == {"received": 1, "length": 1}
    pair.assert_idle()


async def test_a_local_leg_can_be_aborted_in_the_queue_and_in_decode():
    for num_steps in (0, 1, 5):
        pair = Pair()
        pair.decode.start_leg(pair.leg(LegKind.LOCAL), pair.d_sink)
        await pair.step_decode(num_steps)
        pair.decode.abort_leg(KEY, AbortCause.CANCELLED)
        pair.decode.abort_leg(KEY, AbortCause.CANCELLED)
        await pair.run_dry()
        assert isinstance(pair.d_sink.ends[KEY].error, Cancelled)
        pair.assert_idle()


async def test_a_resumed_choice_can_be_computed_here_alone():
    """What its client has is computed like a prompt, and drawing goes on after it."""
    pair = Pair()
    done = tuple(expected_tokens("r", 3))
    pair.start_local(output_ids=done)
    await pair.run_dry()
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)[3:]
    end = pair.d_sink.ends[KEY]
    assert end.finish_reason is FinishReason.LENGTH
    assert end.times.num_computed_tokens == NUM_PROMPT_TOKENS + MAX_TOKENS - 1
    pair.assert_idle()


async def test_a_stop_string_ends_a_leg_without_an_error():
    pair = Pair()
    pair.start()
    await pair.prefill_all()
    await pair.step_decode()
    pair.decode.abort_leg(KEY, AbortCause.STOPPED)
    await pair.run_dry()
    end = pair.d_sink.ends[KEY]
    assert (end.error, end.finish_reason) == (None, None)
    assert pair.decode.book.counts["stop"] == 1
    pair.assert_idle()


async def test_the_first_token_comes_again_before_any_step():
    pair = Pair()
    pair.start()
    await pair.prefill_all()
    assert pair.d_sink.output(KEY) == expected_tokens("r", 1)


async def test_a_leg_whose_offer_never_comes_ends_at_its_deadline():
    """CASES P-19: no hang when the prefill worker is gone before it offered."""
    pair = Pair()
    pair.start_decode()
    pair.pass_time(DEADLINE_S - 1)
    assert not pair.d_sink.ends
    pair.pass_time(2)
    assert isinstance(pair.d_sink.ends[KEY].error, DeadlineExceeded)
    pair.assert_idle()


async def test_one_message_for_each_step_and_router():
    pair = Pair()
    for i in range(3):
        leg = pair.leg(LegKind.LOCAL, f"r{i}", num_prompt_tokens=4, params=make_params(4))
        pair.decode.start_leg(leg, pair.d_sink)
    await pair.step_decode(2)
    assert len(pair.d_sink.tokens) == 6
    assert pair.d_sink.num_messages == 2


async def test_routers_get_their_own_legs_only():
    pair = Pair()
    pair.decode.start_leg(pair.leg(LegKind.LOCAL, "a"), pair.d_sink)
    pair.decode.start_leg(pair.leg(LegKind.LOCAL, "b"), pair.p_sink)
    await pair.step_decode(3)
    pair.decode.router_lost(pair.d_sink, AbortCause.CANCELLED)
    await pair.run_dry()
    assert pair.p_sink.output(make_key("b")) == expected_tokens("b", MAX_TOKENS)
    assert set(pair.p_sink.ends) == {make_key("b")}
    assert set(pair.d_sink.ends) == {make_key("a")}
    pair.assert_idle()


async def test_the_commit_leaves_before_the_engine_begins():
    """CASES P-20: and a leg that is given up between the two ends, with its blocks free."""
    pair = Pair()
    behind_the_commit = []
    pair.decode._errands = SimpleNamespace(soon=behind_the_commit.append)
    pair.start()
    await pair.prefill_all()
    assert pair.p_sink.ends[KEY].error is None
    assert pair.d_engine.scheduler.num_waiting == 0
    pair.decode.abort_leg(KEY, AbortCause.CANCELLED)
    assert KEY not in pair.d_sink.ends
    (go_on,) = behind_the_commit
    go_on()
    await pair.run_dry()
    assert isinstance(pair.d_sink.ends[KEY].error, Cancelled)
    assert not pair.d_sink.output(KEY)
    pair.assert_idle()
