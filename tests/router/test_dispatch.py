"""The life of one request: every way through it, and an abort and a fault in every phase."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import (
    Cancelled,
    DeadlineExceeded,
)
from cluster.handoff import AbortCause
from cluster.lifetime import LegTimes
from cluster.request import FinishReason, LegKind
from tests.router import fakes
from tests.router.fakes import FakeCluster, make_router, metric, speaks, until
from tests.router.reading import finished, read, start

A, B, C, D = b"abcd"


async def test_first_token_goes_out_before_the_transfer_and_its_repeat_is_dropped():
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=3)
    prefill, decode = await cluster.started("p0", "d0")

    # STEP 1: the legs carry the same handoff, and the prefill leg knows its peer.
    (first,), (second,) = prefill.legs, decode.legs
    assert (first.kind, second.kind) == (LegKind.PREFILL, LegKind.DECODE)
    assert first.handoff_id == second.handoff_id == "h1"
    assert first.peer == decode.peer
    assert second.peer is None
    assert first.prompt_ids == tuple(b"hello")

    # STEP 2: token 0 reaches the reader while the decode worker has said nothing.
    prefill.say(A)
    event = await generation.next()
    assert (event.text, event.token_ids) == ("a", (A,))

    # STEP 3: the decode worker repeats it and goes on.
    prefill.say(ends=True)
    decode.say(A, B, C, finish=FinishReason.LENGTH)
    text, ids, finish = await read(generation)
    assert (text, ids) == ("bc", [B, C])
    assert finish.finish_reason is FinishReason.LENGTH
    assert finish.num_output_tokens == 3
    assert (cluster.route.dones, cluster.route.whole_outputs) == ([("g0", 3)], [3])
    assert prefill.aborts == decode.aborts == []
    assert metric(service, "pdserve_repeated_tokens_total") == 0
    await finished(service, cluster)


async def test_the_legs_say_what_the_order_goes_by():
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, priority="low", expected_tokens=7)
    for worker in await cluster.started("p0", "d0"):
        assert (worker.legs[0].priority, worker.legs[0].expected_tokens) == ("low", 7)
    generation.cancel()
    await finished(service, cluster)


async def test_decode_may_overtake_prefill_and_repeat_what_is_out():
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=4)
    prefill, decode = await cluster.started("p0", "d0")
    decode.say(A, B)
    decode.say(D, start=3)  # 3 before 2
    prefill.say(A, ends=True)
    decode.say(B, C, start=1)
    decode.say(finish=FinishReason.LENGTH)
    text, ids, _ = await read(generation)
    assert (text, ids) == ("abcd", [A, B, C, D])
    # The late token 0 of the prefill leg, and the second token 1.
    assert metric(service, "pdserve_repeated_tokens_total") == 2
    await finished(service, cluster)


async def test_a_choice_that_ends_at_its_first_token_closes_the_decode_leg():
    """P-08: one token, one finish, one end, though two workers have a leg."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=5)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(fakes.EOS_ID, finish=FinishReason.STOP)
    text, _, finish = await read(generation)
    assert (text, finish.finish_reason, finish.num_output_tokens) == ("", FinishReason.STOP, 1)
    await until(lambda: decode.aborts)
    assert decode.aborts == [(decode.legs[0].key, AbortCause.FINISHED)]
    await finished(service, cluster)


async def test_the_decode_leg_may_close_silently_before_the_finish_arrives():
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=5)
    prefill, decode = await cluster.started("p0", "d0")
    decode.say(ends=True)
    prefill.say(A, finish=FinishReason.STOP)
    _, _, finish = await read(generation)
    assert finish.finish_reason is FinishReason.STOP
    await finished(service, cluster)


@pytest.mark.parametrize(
    ("pair", "kind"), [((None, "d0"), LegKind.LOCAL), (("p0", None), LegKind.PREFILL)]
)
async def test_one_worker_does_all_where_the_grant_says_so(pair, kind):
    cluster = FakeCluster()
    cluster.route.default_pair = pair
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=1)
    (worker,) = await cluster.started(pair[0] or pair[1])
    assert (worker.legs[0].kind, worker.legs[0].handoff_id) == (kind, "")
    worker.say(A, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.num_output_tokens) == ("a", 1)
    await finished(service, cluster)


async def test_stop_string_ends_both_legs_and_hides_what_matched():
    """P-05: the match spans tokens; both workers are told, surplus tokens go nowhere."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=9, stop=["bc"])
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(A)
    decode.say(A, B)
    decode.say(C, D, start=2)
    text, ids, finish = await read(generation)
    assert (text, ids, finish.finish_reason) == ("a", [A, B, C], FinishReason.STOP)
    assert finish.num_output_tokens == 3
    await until(lambda: prefill.aborts and decode.aborts)
    assert {cause for _, cause in prefill.aborts + decode.aborts} == {AbortCause.STOPPED}
    # P-29: one surplus token came beside the match, two cross the abort, one of them twice.
    assert metric(service, "pdserve_wasted_tokens_total") == 1
    decode.say(D, D, start=4)
    decode.say(D, start=5, ends=True)
    decode.say(D, start=6)
    assert metric(service, "pdserve_wasted_tokens_total") == 3
    assert metric(service, "pdserve_generated_tokens_total") == 3
    await finished(service, cluster)


async def test_surplus_tokens_of_one_batch_are_wasted_in_whatever_order():
    """P-29: token 1 completes the stop string and sets free two that came before it."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=9, stop=["b"])
    _, decode = await cluster.started("p0", "d0")
    decode.say(A)
    decode.say(C, D, start=2)
    decode.say(B, start=1)
    _, ids, _ = await read(generation)
    assert ids == [A, B]
    assert metric(service, "pdserve_wasted_tokens_total") == 2
    await finished(service, cluster)


async def test_stop_at_the_last_token_is_a_stop():
    """P-08: a stop string that completes exactly at max_tokens."""
    cluster = FakeCluster()
    cluster.script = speaks([A, B], FinishReason.LENGTH)
    service = make_router(cluster)
    _, _, finish = await read(await start(cluster, service, max_tokens=2, stop="b"))
    assert (finish.finish_reason, finish.num_output_tokens) == (FinishReason.STOP, 2)


async def test_held_text_is_flushed_when_the_length_ends_it():
    """P-05: what looked like the beginning of a stop string is text after all."""
    cluster = FakeCluster()
    cluster.script = speaks([A, B], FinishReason.LENGTH)
    service = make_router(cluster)
    text, _, finish = await read(await start(cluster, service, max_tokens=2, stop="bc"))
    assert (text, finish.text, finish.finish_reason) == ("ab", "b", FinishReason.LENGTH)


# ---- leaving, in each phase


async def test_cancel_in_the_queue_withdraws_the_want():
    """P-11: a request that waits for a grant."""
    cluster = FakeCluster()
    cluster.route.default_pair = None
    service = make_router(cluster)
    generation = await start(cluster, service)
    await cluster.route.wanted.wait()
    generation.cancel()
    _, _, error = await read(generation)
    assert isinstance(error, Cancelled)
    assert cluster.route.withdrawn == cluster.route.wants
    assert cluster.connections == []
    assert metric(service, 'pdserve_requests_aborted_total{phase="queue"}') == 1
    await finished(service, cluster)


async def test_cancel_before_the_first_step_of_its_task_still_ends_it():
    """P-11: the client left while its prompt was tokenised."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service)
    generation.cancel()
    _, _, error = await read(generation)
    assert isinstance(error, Cancelled)
    assert cluster.route.wants == []
    await finished(service, cluster)


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
async def test_cancel_while_workers_work_aborts_both_legs(num_tokens):
    """P-11: before the first token, after it, in mid-stream."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=9)
    prefill, decode = await cluster.started("p0", "d0")
    if num_tokens:
        prefill.say(A)
    if num_tokens > 1:
        decode.say(*[A, B, C][:num_tokens])
    for _ in range(num_tokens):
        await generation.next()
    generation.cancel()
    generation.cancel()
    _, _, error = await read(generation)
    assert isinstance(error, Cancelled)
    await until(lambda: prefill.aborts and decode.aborts)
    key = prefill.legs[0].key
    assert prefill.aborts == decode.aborts == [(key, AbortCause.CANCELLED)]
    phase = "decode" if num_tokens else "prefill"
    assert metric(service, f'pdserve_requests_aborted_total{{phase="{phase}"}}') == 1
    assert metric(service, "pdserve_wasted_tokens_total") == num_tokens
    await finished(service, cluster)
    # It has had these tokens, and nobody learns from them how long outputs are.
    assert (cluster.route.dones, cluster.route.whole_outputs) == ([("g0", num_tokens)], [])


async def test_cancel_after_the_last_token_changes_nothing():
    """P-11: the request is over though its reader has not read the end."""
    cluster = FakeCluster()
    cluster.script = speaks([A, B], FinishReason.STOP)
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=5)
    await finished(service, cluster)
    generation.cancel()
    text, _, finish = await read(generation)
    assert (text, finish.finish_reason) == ("ab", FinishReason.STOP)
    assert all(not worker.aborts for worker in cluster.connections)


async def test_cancel_by_id_here_and_through_the_control_plane():
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service)
    assert await service.cancel(generation.request_id) is True
    _, _, error = await read(generation)
    assert isinstance(error, Cancelled)
    await finished(service, cluster)
    assert await service.cancel(generation.request_id) is False
    assert cluster.route.cancel_asked == [generation.request_id]


async def test_stopping_the_router_ends_and_gives_back_everything():
    cluster = FakeCluster()
    service = make_router(cluster)
    generations = [await start(cluster, service) for _ in range(3)]
    await cluster.started("p0", "d0")
    await service.stop()
    ends = [(await read(generation))[2] for generation in generations]
    assert all(isinstance(end, Cancelled) for end in ends)
    assert all(worker.is_closed for worker in cluster.connections)
    await finished(service, cluster)
    await service.stop()


@pytest.mark.parametrize("stuck", ["abort_leg", "close"])
async def test_a_worker_that_takes_nothing_does_not_keep_the_router(stuck, monkeypatch):
    async def never(self, *args):
        await asyncio.Event().wait()

    monkeypatch.setattr(fakes.FakeWorker, stuck, never)
    monkeypatch.setattr("router.legs.CLOSE_GRACE_S", 0.02)
    cluster = FakeCluster()
    service = make_router(cluster)
    await start(cluster, service)
    await cluster.started("p0", "d0")
    async with asyncio.timeout(5):
        await service.stop()
    await finished(service, cluster)


# ---- deadlines


@pytest.mark.parametrize("has_grant", [False, True])
async def test_the_deadline_ends_it_wherever_it_is(has_grant):
    cluster = FakeCluster()
    if not has_grant:
        cluster.route.default_pair = None
    service = make_router(cluster)
    generation = await start(cluster, service, timeout_s=0.05)
    _, _, error = await read(generation)
    assert isinstance(error, DeadlineExceeded)
    if has_grant:
        prefill, decode = cluster.worker("p0"), cluster.worker("d0")
        await until(lambda: prefill.aborts and decode.aborts)
        assert {cause for _, cause in prefill.aborts + decode.aborts} == {AbortCause.DEADLINE}
    await finished(service, cluster)


# ---- the timeline


async def test_timeline_holds_both_legs_and_waits_for_the_late_one():
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=2, timeline=True)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(A)
    decode.say(A, B, finish=FinishReason.LENGTH, times=LegTimes(num_steps=1))
    reading = asyncio.create_task(read(generation))
    prefill.say(ends=True, times=LegTimes(transfer_bytes=99))
    _, _, finish = await reading
    timeline = finish.timeline
    assert (timeline.prefill.transfer_bytes, timeline.decode.num_steps) == (99, 1)
    assert (timeline.prefill_worker, timeline.decode_worker) == ("p0", "d0")
    assert 0 <= timeline.queue_s <= timeline.first_token_s <= timeline.total_s
    assert timeline.reason == "lowest cost"


async def test_timeline_of_a_stopped_choice_hears_the_legs_last_words():
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, stop="b", timeline=True)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(A, ends=True)
    decode.say(A, B)
    await until(lambda: decode.aborts)
    decode.say(ends=True, times=LegTimes(num_steps=1))
    _, _, finish = await read(generation)
    assert finish.timeline.decode.num_steps == 1
    await finished(service, cluster)


async def test_timeline_does_not_wait_for_a_leg_that_says_nothing(monkeypatch):
    monkeypatch.setattr("router.life.LAST_WORDS_S", 0.01)
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=2, timeline=True)
    _, decode = await cluster.started("p0", "d0")
    decode.say(A, B, finish=FinishReason.LENGTH)
    _, _, finish = await read(generation)
    assert finish.timeline.prefill == LegTimes()
    await finished(service, cluster)
