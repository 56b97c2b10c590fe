"""A choice whose workers are lost after its first token goes on with others, and nobody sees it."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import (
    IN_STEP,
    Cancelled,
    DeadlineExceeded,
    HandoffFailed,
    NoWorker,
    WorkerLost,
)
from cluster.handoff import AbortCause
from cluster.lifetime import LegTimes
from cluster.request import MAX_PREEMPTIONS, FinishReason, LegKind
from router.events import Delta, Finish
from tests.router.doors import Doors, events_of, grpc_request, open_doors
from tests.router.fakes import FakeCluster, make_router, metric, until
from tests.router.reading import finished, read, start

A, B, C, D, E = b"abcde"


async def streaming(cluster, service, **given):
    """Start a request and let p0 and d0 give its first two tokens; p0 has handed over."""
    generation = await start(cluster, service, **{"max_tokens": 5, **given})
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(A, ends=True)
    decode.say(A, B)
    await until(lambda: metric(service, "pdserve_requests_queued") == 0)
    assert [(await generation.next()).token_ids for _ in range(2)] == [(A,), (B,)]
    return generation, prefill, decode


async def test_a_decode_worker_that_dies_in_mid_stream_is_replaced():
    """P-20: nothing lost, repeated or out of order; the answer says that it was resumed."""
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), ("p1", "d1")]
    service = make_router(cluster)
    generation, _, decode = await streaming(cluster, service)
    (first_leg,) = decode.legs
    decode.die()

    # STEP 1: what is wanted is what is left, elsewhere.
    prefill, second = await cluster.started("p1", "d1")
    first_want, want = cluster.route.wants
    assert (first_want.num_prompt_tokens, first_want.max_tokens) == (5, 5)
    assert (want.num_prompt_tokens, want.max_tokens) == (7, 3)
    assert (want.attempt, want.avoid, want.export) == (1, ("d0.1",), None)

    # STEP 2: the legs know what the client has; limits keep their meaning for the whole.
    for leg in (prefill.legs[0], second.legs[0]):
        assert leg.output_ids == (A, B)
        assert leg.prompt_ids == tuple(b"hello")
        assert leg.params.max_tokens == 5
        assert leg.key.attempt == 1
        assert leg.waited_s >= want.waited_s > first_leg.waited_s >= first_want.waited_s > 0

    # STEP 3: the first new token has the next index; its repeat is dropped.
    prefill.say(C, start=2, ends=True)
    second.say(C, D, E, start=2, finish=FinishReason.LENGTH)
    text, ids, finish = await read(generation)
    assert (text, ids) == ("cde", [C, D, E])
    assert (finish.num_output_tokens, finish.num_resumed) == (5, 1)
    assert (finish.timeline.num_attempts, finish.timeline.num_resumed) == (2, 1)
    assert (finish.timeline.prefill_worker, finish.timeline.decode_worker) == ("p1", "d1")
    assert finish.timeline.queue_s <= finish.timeline.first_token_s
    assert cluster.route.dones == [("g0", 2), ("g1", 3)]
    assert cluster.route.whole_outputs == [5], "outputs are learned from as wholes"
    assert metric(service, "pdserve_requests_resumed_total") == 1
    assert metric(service, "pdserve_generated_tokens_total") == 5
    assert metric(service, "pdserve_repeated_tokens_total") == 0
    await finished(service, cluster)


async def over_http(doors: Doors, given) -> int:
    return (await doors.post(given)).json()["pdserve"]["num_resumed"]


async def over_http_streamed(doors: Doors, given) -> int:
    events = events_of((await doors.post({**given, "stream": True})).text)
    (told,) = (data["pdserve"] for _, data in events if "pdserve" in data)
    return told["num_resumed"]


async def over_grpc(doors: Doors, given) -> int:
    return (await doors.once(given)).choices[0].num_resumed


async def over_grpc_streamed(doors: Doors, given) -> int:
    *_, last = [message async for message in doors.stub.Generate(grpc_request(given))]
    return last.num_resumed


@pytest.mark.parametrize("ask", [over_http, over_http_streamed, over_grpc, over_grpc_streamed])
async def test_the_answer_says_that_it_was_resumed_without_a_timeline(ask):
    """P-20."""
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), ("p1", "d1")]
    async with open_doors(make_router(cluster)) as doors:
        asking = asyncio.create_task(ask(doors, {"prompt": "hello", "max_tokens": 2}))
        prefill, decode = await cluster.started("p0", "d0")
        prefill.say(A, ends=True)
        decode.say(A)
        decode.die()
        prefill, decode = await cluster.started("p1", "d1")
        prefill.say(B, start=1, ends=True)
        decode.say(B, start=1, finish=FinishReason.LENGTH)
        assert await asking == 1


async def test_preemptions_are_counted_over_all_workers_and_attempts():
    """P-15: told as they happen, so that a worker which dies takes no count with it."""
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), ("p1", "d1"), (None, "d2")]
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=5)
    prefill, decode = await cluster.started("p0", "d0")
    assert [worker.legs[0].num_preemptions for worker in (prefill, decode)] == [0, 0]
    prefill.preempted(1)
    prefill.say(A, ends=True)
    decode.say(A, B)
    decode.preempted(2)
    decode.die()

    # STEP 2: a prefill that fails says at its end what it has cost.
    prefill, _ = await cluster.started("p1", "d1")
    assert cluster.route.wants[-1].num_preemptions == prefill.legs[0].num_preemptions == 2
    prefill.say(error=WorkerLost("stopping"), times=LegTimes(num_preemptions=1))

    # STEP 3: what is said beyond all sense is cut off, or no worker would take another leg.
    (last,) = await cluster.started("d2")
    assert last.legs[0].num_preemptions == 3
    last.preempted(1 << 30)
    last.say(C, D, E, start=2, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.timeline.num_preemptions) == ("abcde", MAX_PREEMPTIONS)
    await finished(service, cluster)


async def test_it_may_be_resumed_on_the_worker_that_lives():
    """The decode worker prefills by itself: a LOCAL leg."""
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), (None, "d1")]
    service = make_router(cluster)
    generation, _, decode = await streaming(cluster, service)
    decode.die()
    (second,) = await cluster.started("d1")
    assert (second.legs[0].kind, second.legs[0].output_ids) == (LegKind.LOCAL, (A, B))
    second.say(C, D, start=2, finish=FinishReason.STOP)
    text, _, finish = await read(generation)
    assert (text, finish.finish_reason) == ("cd", FinishReason.STOP)
    await finished(service, cluster)


async def test_a_prefill_worker_that_dies_before_the_handover_is_replaced(monkeypatch):
    """P-19: its first token is out, its KV is lost."""
    monkeypatch.setattr("router.attempt.COMMIT_GRACE_S", 0.02)
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), ("p1", "d0")]
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=3)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(A)
    prefill.die()
    (second,) = await cluster.started("p1")
    await until(lambda: len(decode.legs) == 2 and decode.aborts)
    assert decode.aborts == [(decode.legs[0].key, AbortCause.FAULT)]
    assert second.legs[0].output_ids == (A,)
    second.say(B, start=1, ends=True)
    decode.say(B, C, start=1, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.num_resumed) == ("abc", 1)
    await finished(service, cluster)


async def test_text_in_the_making_survives():
    """P-05: a stop string that began before the loss is completed after it, and cut."""
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), ("p1", "d1")]
    service = make_router(cluster)
    generation, _, decode = await streaming(cluster, service, stop=["bcd"], max_tokens=9)
    decode.die()
    prefill, second = await cluster.started("p1", "d1")
    prefill.say(C, start=2, ends=True)
    second.say(C, D, E, start=2)
    text, ids, finish = await read(generation)
    assert (text, ids, finish.finish_reason) == ("", [C, D], FinishReason.STOP)
    assert metric(service, "pdserve_wasted_tokens_total") == 1
    await until(lambda: second.aborts)
    await finished(service, cluster)


async def test_half_a_character_survives():
    """P-02: the bytes of one character come from two attempts."""
    euro = "\N{EURO SIGN}".encode()
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), (None, "d1")]
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=3)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(euro[0], ends=True)
    decode.say(*euro[:2])
    decode.die()
    (second,) = await cluster.started("d1")
    second.say(euro[2], start=2, finish=FinishReason.LENGTH)
    text, ids, _ = await read(generation)
    assert (text, ids) == ("\N{EURO SIGN}", list(euro))


async def test_logprobs_ride_along():
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), (None, "d1")]
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=3)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(A, logprob=-0.5, ends=True)
    decode.say(A, B, logprob=-0.5)
    decode.die()
    (second,) = await cluster.started("d1")
    second.say(C, start=2, logprob=-0.25, finish=FinishReason.LENGTH)
    deltas = []
    while not isinstance(event := await generation.next(), Finish):
        deltas.append(event)
    assert [d.logprobs[0].logprob for d in deltas] == [-0.5, -0.5, -0.25]


async def test_what_had_overtaken_a_missing_token_is_computed_again():
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), (None, "d1")]
    service = make_router(cluster)
    generation, _, decode = await streaming(cluster, service)
    decode.say(D, start=3)  # token 2 never comes
    decode.die()
    (second,) = await cluster.started("d1")
    assert second.legs[0].output_ids == (A, B)
    second.say(C, D, E, start=2, finish=FinishReason.LENGTH)
    text, ids, _ = await read(generation)
    assert (text, ids) == ("cde", [C, D, E])
    assert metric(service, "pdserve_wasted_tokens_total") == 1
    await finished(service, cluster)


async def test_a_step_that_fails_is_a_death_for_all_that_are_in_it():
    """P-26: the streams of its neighbours go on; what fails two steps is ended."""
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), (None, "d1"), (None, "d2")]
    service = make_router(cluster)
    generation, _, decode = await streaming(cluster, service)
    decode.say(error=WorkerLost("a step failed: RuntimeError", stage=IN_STEP))
    (second,) = await cluster.started("d1")
    assert second.legs[0].output_ids == (A, B)
    assert cluster.route.wants[1].avoid == ("d0.1",)
    second.say(C, start=2)
    second.say(error=WorkerLost("a step failed: RuntimeError", stage=IN_STEP))
    text, _, error = await read(generation)
    assert (text, type(error), error.stage, error.worker_id) == ("c", WorkerLost, "step", "d1")
    assert len(cluster.route.wants) == 2
    await finished(service, cluster)


async def test_those_that_a_failed_step_left_out_have_killed_nobody():
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), (None, "d1"), (None, "d2")]
    service = make_router(cluster)
    generation, _, decode = await streaming(cluster, service)
    decode.say(error=WorkerLost("the engine failed in a step without this", stage="queue"))
    (second,) = await cluster.started("d1")
    second.say(error=WorkerLost("the engine failed in a step without this", stage="queue"))
    (third,) = await cluster.started("d2")
    assert cluster.route.wants[2].avoid == ("d0.1", "d1.1")
    third.say(C, D, E, start=2, finish=FinishReason.LENGTH)
    text, _, _ = await read(generation)
    assert text == "cde"
    await finished(service, cluster)


async def test_the_second_dead_worker_ends_it():
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), (None, "d1"), (None, "d2")]
    service = make_router(cluster)
    generation, _, decode = await streaming(cluster, service)
    decode.die()
    (second,) = await cluster.started("d1")
    second.say(C, start=2)
    second.die()
    text, _, error = await read(generation)
    assert (text, type(error), error.stage) == ("c", WorkerLost, "decode")
    assert len(cluster.route.wants) == 2
    assert metric(service, 'pdserve_requests_failed_total{code="worker_lost"}') == 1
    assert metric(service, "pdserve_wasted_tokens_total") == 3
    await finished(service, cluster)


async def test_a_router_that_was_away_blames_no_worker():
    """Both have given it up meanwhile, with the legs that they had; neither has died."""
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), ("p1", "d1")]
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=3)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(A)
    prefill.give_up()
    decode.give_up()
    prefill, decode = await cluster.started("p1", "d1")
    prefill.say(B, start=1, ends=True)
    decode.say(B, start=1)
    decode.die()
    await until(lambda: len(cluster.connections) == 6)
    await until(lambda: cluster.worker("d0").legs)
    cluster.worker("p0").say(C, start=2, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.num_resumed) == ("abc", 2)
    await finished(service, cluster)


async def test_failures_count_in_a_row():
    """Three in a row end it; a new token between them starts the count anew."""
    cluster = FakeCluster()
    cluster.route.default_pair = (None, "d0")
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=9)
    for number, token_id in enumerate([None, None, A, None, None]):
        await until(lambda number=number: len(cluster.route.wants) == number + 1)
        (worker,) = await cluster.started("d0")
        await until(lambda number=number, worker=worker: len(worker.legs) == number + 1)
        if token_id is not None:
            worker.say(token_id)
        worker.say(error=HandoffFailed("no luck"))
    # The attempt that gave a token failed too.
    text, _, error = await read(generation)
    assert (text, type(error)) == ("a", HandoffFailed)
    assert len(cluster.route.wants) == 5
    await finished(service, cluster)


async def test_nobody_to_go_on_is_an_error_after_the_first_token():
    """It was served: it counts as failed, not as refused before work."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, _, decode = await streaming(cluster, service)
    cluster.route.error = NoWorker("none", stage="placement", retry_after_s=3)
    decode.die()
    _, _, error = await read(generation)
    assert isinstance(error, NoWorker)
    assert metric(service, 'pdserve_requests_failed_total{code="no_worker"}') == 1
    await finished(service, cluster)


async def test_the_deadline_holds_over_all_attempts():
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), None]
    cluster.route.default_pair = None
    service = make_router(cluster)
    generation, _, decode = await streaming(cluster, service, timeout_s=0.3)
    decode.die()
    _, _, error = await read(generation)
    assert isinstance(error, DeadlineExceeded)
    assert error.stage == "placement"
    first, second = cluster.route.wants
    assert 0 < second.remaining_s <= first.remaining_s
    assert cluster.route.withdrawn == [second]
    await finished(service, cluster)


async def test_a_cancel_while_it_is_placed_again_withdraws_the_want():
    """P-11."""
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), None]
    service = make_router(cluster)
    generation, _, decode = await streaming(cluster, service)
    decode.die()
    await until(lambda: len(cluster.route.wants) == 2)
    generation.cancel()
    await read(generation)
    assert cluster.route.withdrawn == cluster.route.wants[1:]
    assert metric(service, 'pdserve_requests_aborted_total{phase="placement"}') == 1
    await finished(service, cluster)


@pytest.mark.parametrize("loser", ["p0", "d0"])
async def test_without_resume_a_loss_after_the_first_token_is_an_error(loser, monkeypatch):
    monkeypatch.setattr("router.attempt.COMMIT_GRACE_S", 0.02)
    cluster = FakeCluster()
    cluster.route.export_error = NoWorker("none")
    service = make_router(cluster, resumes=False)
    generation = await start(cluster, service)
    prefill, _ = await cluster.started("p0", "d0")
    prefill.say(A)
    assert (await generation.next()).text == "a"
    cluster.worker(loser).die()
    _, _, error = await read(generation)
    assert isinstance(error, WorkerLost)
    assert metric(service, 'pdserve_requests_failed_total{code="worker_lost"}') == 1
    await finished(service, cluster)


async def test_another_first_token_from_the_decode_worker_is_a_failed_handoff():
    """What is out stays; the choice is computed again from there."""
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), (None, "d1")]
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=2)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(A)
    decode.say(B)
    (second,) = await cluster.started("d1")
    assert second.legs[0].output_ids == (A,)
    second.say(B, start=1, finish=FinishReason.LENGTH)
    text, _, _ = await read(generation)
    assert text == "ab"
    await finished(service, cluster)


@pytest.mark.parametrize("num_steps", range(5))
async def test_a_cancel_that_comes_with_news_is_not_lost(num_steps):
    """P-12: the decode worker shows that it has the KV just as the client leaves."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=3)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(A, error=WorkerLost("gone", worker_id="p0"))
    assert isinstance(await generation.next(), Delta)
    for _ in range(5):
        await asyncio.sleep(0)
    decode.say(A)
    for _ in range(num_steps):
        await asyncio.sleep(0)
    generation.cancel()
    async with asyncio.timeout(2):
        _, _, end = await read(generation)
    assert isinstance(end, Cancelled)
    await finished(service, cluster)


async def test_a_worker_that_dies_with_nothing_but_the_last_word_is_not_missed():
    """Its tokens are all out: there is nothing left that another could be asked for."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=3)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(A, ends=True)
    decode.say(A, B, C)
    decode.die()
    text, _, finish = await read(generation)
    assert (text, finish.finish_reason) == ("abc", FinishReason.LENGTH)
    assert (finish.num_resumed, len(cluster.route.wants)) == (0, 1)
    await finished(service, cluster)


async def test_the_wait_for_a_timeline_does_not_outlive_the_deadline():
    """P-15: every token is out in time, and the prefill worker's durations never come."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=3, timeline=True, timeout_s=0.2)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(A)
    decode.say(A, B, C, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.finish_reason) == ("abc", FinishReason.LENGTH)
    await finished(service, cluster)
