"""An export whose decode worker refused it or was lost goes to another one, within its attempt."""

from __future__ import annotations

import asyncio
import time

import pytest

from cluster.control.facts import ExportRef
from cluster.errors import EngineFault, HandoffFailed, NoWorker, WorkerLost
from cluster.handoff import AbortCause
from cluster.request import FinishReason, LegKind
from tests.router.fakes import FakeCluster, make_router, metric, until
from tests.router.reading import finished, read, start

A, B, C, D = b"abcd"
REFUSED = HandoffFailed("handoff aborted: refused", stage="handoff")


async def begun(cluster, service, *, pairs, **given):
    """Start a request on p0 and d0; the pairs answer the wants after that."""
    cluster.route.pairs = [("p0", "d0"), *pairs]
    generation = await start(cluster, service, **{"max_tokens": 3, **given})
    prefill, decode = await cluster.started("p0", "d0")
    return generation, prefill, decode


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_a_refused_export_goes_to_another_decode_worker(first):
    """Either of the two workers may be heard first of the refusal."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, decode = await begun(cluster, service, pairs=[("p0", "d1")])
    prefill.say(A)
    decode.preempted(1)  # its import gave way, and that is why
    if first == "prefill":
        prefill.export_waits(REFUSED)
        await until(lambda: decode.aborts)
        decode.say(error=REFUSED)
    else:
        decode.say(error=REFUSED)
        prefill.export_waits(REFUSED)

    # STEP 1: a decode worker is wanted for what the prefill worker holds.
    (second,) = await cluster.started("d1")
    want = cluster.route.wants[1]
    assert want.export == ExportRef(grant_id="g0", worker_id="p0", incarnation="p0.1")
    assert (want.attempt, want.avoid, want.max_tokens) == (1, (), 2)

    # STEP 2: both workers are told the new handoff, under the old key.
    await until(lambda: prefill.redirects)
    leg, (redirect,) = second.legs[0], prefill.redirects
    assert (leg.kind, leg.key, leg.output_ids) == (LegKind.DECODE, prefill.legs[0].key, ())
    assert redirect.key == leg.key
    assert redirect.handoff_id == leg.handoff_id == "h2"
    assert leg.grant_id == "g1"
    assert redirect.peer == second.peer
    assert redirect.num_preemptions == leg.num_preemptions == 1, "P-15"
    assert len(prefill.legs) == 1

    # STEP 3: it goes on as if nothing had been.
    prefill.say(ends=True)
    second.say(A, B, C, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert text == "abc"
    assert (finish.timeline.num_attempts, finish.timeline.num_redirected) == (1, 1)
    assert (finish.num_resumed, finish.timeline.decode_worker) == (0, "d1")
    assert cluster.route.dones == [("g0", 0), ("g1", 3)]
    assert metric(service, "pdserve_attempts_redirected_total") == 1
    assert metric(service, "pdserve_handoffs_waiting") == 0
    assert metric(service, "pdserve_repeated_tokens_total") == 0
    await finished(service, cluster)


@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_a_decode_worker_that_dies_before_the_handover_is_replaced(num_tokens):
    """P-20: while the prompt is computed, and while its KV moves."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, decode = await begun(cluster, service, pairs=[("p0", "d1")])
    if num_tokens:
        prefill.say(A)
    decode.die()
    (second,) = await cluster.started("d1")
    await until(lambda: prefill.redirects)
    assert cluster.route.wants[1].avoid == ("d0.1",)
    # The prefill worker says late that the old handoff failed: it is redirected already.
    prefill.export_waits(WorkerLost("gone", worker_id="d0"), handoff_id="h1")
    if not num_tokens:
        prefill.say(A)
    prefill.say(ends=True)
    second.say(A, B, C, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.timeline.num_attempts) == ("abc", 1)
    assert len(cluster.route.wants) == 2
    await finished(service, cluster)


async def test_the_same_worker_may_take_it_later_but_only_after_its_old_leg_has_ended():
    """It refused for want of memory; the two legs have the same name."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, decode = await begun(cluster, service, pairs=[("p0", "d0")])
    prefill.say(A)
    prefill.export_waits(REFUSED)
    await until(lambda: len(cluster.route.grants) == 2 and decode.aborts)
    assert len(decode.legs) == 1
    assert not prefill.redirects
    decode.say(error=REFUSED)
    await until(lambda: len(decode.legs) == 2)
    await until(lambda: prefill.redirects)
    assert [leg.handoff_id for leg in decode.legs] == ["h1", "h2"]
    prefill.say(ends=True)
    decode.say(A, B, C, finish=FinishReason.LENGTH)
    text, _, _ = await read(generation)
    assert text == "abc"
    await finished(service, cluster)


async def test_an_end_that_comes_with_the_grant_is_the_old_legs_end():
    """The worker's old and new leg have one name: one ends before the other begins."""
    cluster = FakeCluster()
    service = make_router(cluster)
    cluster.route.default_pair = None
    generation, prefill, decode = await begun(cluster, service, pairs=[])
    prefill.say(A)
    prefill.export_waits(REFUSED)
    await until(lambda: cluster.route.answer is not None and decode.aborts)
    # Both are here before the request's task takes either.
    cluster.route.answer.set_result(cluster.route.grant(cluster.route.wants[1], ("p0", "d0")))
    asyncio.get_running_loop().call_soon(lambda: decode.say(error=REFUSED))
    await until(lambda: prefill.redirects)
    prefill.say(ends=True)
    decode.say(A, B, C, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.timeline.num_attempts, finish.timeline.num_redirected) == ("abc", 1, 1)
    assert len(cluster.route.wants) == len(decode.legs) == 2
    assert len(decode.aborts) == 1
    await finished(service, cluster)


async def test_redirects_of_an_attempt_that_failed_count_too():
    cluster = FakeCluster()
    service = make_router(cluster)
    pairs = [("p0", "d1"), ("p0", "d1")]
    generation, prefill, _ = await begun(cluster, service, pairs=pairs)
    prefill.say(A)
    prefill.export_waits(REFUSED)
    (second,) = await cluster.started("d1")
    await until(lambda: prefill.redirects)
    prefill.say(ends=True)
    second.say(A, B, error=HandoffFailed("lost", stage="decode"))
    await until(lambda: len(second.legs) == 2)
    second.say(C, start=2, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.num_resumed, finish.timeline.num_redirected) == ("abc", 1, 1)
    assert metric(service, "pdserve_attempts_redirected_total") == 1
    await finished(service, cluster)


async def test_late_words_of_the_old_decode_worker_are_dropped():
    """Both legs have one key; their workers tell them apart."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, decode = await begun(cluster, service, pairs=[("p0", "d1")])
    prefill.say(A)
    prefill.export_waits(HandoffFailed("the link broke"))
    (second,) = await cluster.started("d1")
    assert decode.aborts == [(decode.legs[0].key, AbortCause.FAULT)]
    decode.say(A, D, D)
    decode.say(error=HandoffFailed("aborted"))
    second.say(A, B, C, finish=FinishReason.LENGTH)
    text, ids, finish = await read(generation)
    assert (text, ids) == ("abc", [A, B, C])
    assert finish.timeline.decode_worker == "d1"
    assert metric(service, "pdserve_wasted_tokens_total") == 2
    await finished(service, cluster)


async def test_an_export_waits_in_vain_where_only_the_commit_was_lost():
    """The decode worker has spoken: it has the KV, and the prefill worker may drop its own."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, decode = await begun(cluster, service, pairs=[])
    prefill.say(A)
    decode.say(A, B)
    prefill.export_waits(HandoffFailed("the link broke"))
    await until(lambda: prefill.aborts)
    assert prefill.aborts == [(prefill.legs[0].key, AbortCause.FINISHED)]
    prefill.say(ends=True)
    decode.say(C, start=2, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.timeline.num_redirected) == ("abc", 0)
    assert len(cluster.route.wants) == 1
    await finished(service, cluster)


async def test_nobody_takes_the_export_so_it_is_computed_again():
    cluster = FakeCluster()
    cluster.route.export_error = NoWorker("none", stage="placement")
    service = make_router(cluster)
    generation, prefill, _ = await begun(cluster, service, pairs=[("p1", "d1")])
    prefill.say(A)
    prefill.export_waits(REFUSED)
    second, third = await cluster.started("p1", "d1")
    await until(lambda: prefill.aborts)
    assert second.legs[0].output_ids == third.legs[0].output_ids == (A,)
    assert cluster.route.wants[2].export is None
    second.say(B, start=1, ends=True)
    third.say(B, C, start=1, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.num_resumed) == ("abc", 1)
    await finished(service, cluster)


async def test_the_lease_ends_the_search():
    """The prefill leg is over: the want is withdrawn, and the prompt computed again."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, _ = await begun(cluster, service, pairs=[None, ("p1", "d1")])
    prefill.say(A)
    prefill.export_waits(REFUSED)
    await until(lambda: len(cluster.route.wants) == 2)
    assert metric(service, "pdserve_handoffs_waiting") == 1
    prefill.say(error=HandoffFailed("handoff aborted: lease", stage="handoff"))
    await cluster.started("p1", "d1")
    assert cluster.route.withdrawn == cluster.route.wants[1:2]
    assert metric(service, "pdserve_handoffs_waiting") == 0
    generation.cancel()
    await finished(service, cluster)


async def test_a_prefill_worker_that_dies_with_the_export_is_resumed_from():
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, _ = await begun(cluster, service, pairs=[None, ("p1", "d1")])
    prefill.say(A)
    prefill.export_waits(REFUSED)
    await until(lambda: len(cluster.route.wants) == 2)
    prefill.die()
    second, _ = await cluster.started("p1", "d1")
    assert second.legs[0].output_ids == (A,)
    assert cluster.route.wants[2].avoid == ("p0.1",)
    generation.cancel()
    await finished(service, cluster)


async def test_a_redirect_that_crosses_with_the_handover_is_noticed(monkeypatch):
    """The old decode worker died right after its COMMIT: nobody will offer the new one anything."""
    monkeypatch.setattr("router.attempt.COMMIT_GRACE_S", 0.02)
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, decode = await begun(cluster, service, pairs=[("p0", "d1"), ("p0", "d2")])
    prefill.say(A)
    decode.die()
    (second,) = await cluster.started("d1")
    await until(lambda: prefill.redirects)
    prefill.say(ends=True)
    await until(lambda: len(prefill.legs) == 2)
    await until(lambda: second.aborts)
    assert prefill.legs[1].output_ids == (A,)
    generation.cancel()
    await finished(service, cluster)


async def test_a_handover_that_is_heard_during_the_search_ends_the_attempt():
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, decode = await begun(cluster, service, pairs=[None, ("p1", "d1")])
    prefill.say(A)
    decode.die()
    await until(lambda: len(cluster.route.wants) == 2)
    prefill.say(ends=True)
    second, _ = await cluster.started("p1", "d1")
    assert second.legs[0].output_ids == (A,)
    assert cluster.route.withdrawn == cluster.route.wants[1:2]
    generation.cancel()
    await finished(service, cluster)


async def test_a_choice_that_ends_at_its_first_token_needs_no_other_decode_worker():
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, decode = await begun(cluster, service, pairs=[None])
    decode.die()
    await until(lambda: len(cluster.route.wants) == 2)
    prefill.say(A, finish=FinishReason.STOP)
    text, _, finish = await read(generation)
    assert (text, finish.finish_reason) == ("a", FinishReason.STOP)
    await until(lambda: cluster.route.withdrawn == cluster.route.wants[1:])
    await finished(service, cluster)


async def test_a_redirect_may_fail_ever_so_often_until_the_lease_is_over(monkeypatch):
    """CASES P-16: the prompt is not computed again while its KV is kept."""
    monkeypatch.setattr("router.attempt.REDIRECT_GAP_S", 0.0)
    cluster = FakeCluster()
    service = make_router(cluster)
    others = [("p0", f"d{number}") for number in range(1, 21)]
    generation, prefill, _ = await begun(cluster, service, pairs=[*others, None, ("p1", "d0")])
    prefill.say(A)
    for number in range(20):
        prefill.export_waits(REFUSED)
        await cluster.started(f"d{number + 1}")
        await until(lambda number=number: len(prefill.redirects) == number + 1)
    prefill.export_waits(REFUSED)
    await until(lambda: len(cluster.route.wants) == 22)
    prefill.say(error=HandoffFailed("no decode worker within the lease", stage="handoff"))
    (second,) = await cluster.started("p1")
    assert all(want.export is not None for want in cluster.route.wants[1:22])
    assert second.legs[0].output_ids == (A,)
    generation.cancel()
    await finished(service, cluster)


async def test_handoffs_that_fail_at_once_do_not_make_a_rush(monkeypatch):
    """The first redirect is for no fault of a redirect, and waits for nothing."""
    monkeypatch.setattr("router.attempt.REDIRECT_GAP_S", 0.1)
    cluster = FakeCluster()
    service = make_router(cluster)
    pairs = [("p0", "d1"), ("p0", "d2")]
    generation, prefill, _ = await begun(cluster, service, pairs=pairs)
    prefill.say(A)
    began = time.monotonic()
    prefill.export_waits(REFUSED)
    await until(lambda: len(prefill.redirects) == 1)
    prefill.export_waits(REFUSED)
    await until(lambda: len(prefill.redirects) == 2)
    assert time.monotonic() - began >= 0.1
    assert cluster.route.wants[2].remaining_s <= cluster.route.wants[1].remaining_s - 0.1
    generation.cancel()
    await finished(service, cluster)


async def test_a_cancel_between_two_redirects_leaves_nothing(monkeypatch):
    """P-11."""
    monkeypatch.setattr("router.attempt.REDIRECT_GAP_S", 60.0)
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, _ = await begun(cluster, service, pairs=[("p0", "d1")])
    prefill.say(A)
    prefill.export_waits(REFUSED)
    await until(lambda: len(prefill.redirects) == 1)
    prefill.export_waits(REFUSED)
    await until(lambda: metric(service, "pdserve_handoffs_waiting") == 1)
    generation.cancel()
    await read(generation)
    assert len(cluster.route.wants) == 2
    await until(lambda: metric(service, "pdserve_handoffs_waiting") == 0)
    await finished(service, cluster)


async def test_the_second_worker_that_dies_with_a_leg_ends_it():
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, decode = await begun(cluster, service, pairs=[("p0", "d1")])
    prefill.say(A)
    decode.die()
    (second,) = await cluster.started("d1")
    await until(lambda: prefill.redirects)
    second.die()
    _, _, error = await read(generation)
    assert isinstance(error, WorkerLost)
    assert len(cluster.route.wants) == 2
    await finished(service, cluster)


async def test_a_cancel_during_the_search_withdraws_it_and_aborts_the_export():
    """P-11."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, _ = await begun(cluster, service, pairs=[None])
    prefill.export_waits(REFUSED)
    await until(lambda: len(cluster.route.wants) == 2)
    generation.cancel()
    await read(generation)
    await until(lambda: cluster.route.withdrawn == cluster.route.wants[1:])
    await until(lambda: prefill.aborts)
    assert prefill.aborts == [(prefill.legs[0].key, AbortCause.CANCELLED)]
    await finished(service, cluster)


async def test_a_grant_that_comes_with_the_cancel_is_given_back():
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, _ = await begun(cluster, service, pairs=[None])
    prefill.export_waits(REFUSED)
    await until(lambda: len(cluster.route.wants) == 2)
    want = cluster.route.wants[1]
    cluster.route.answer.set_result(cluster.route.grant(want, ("p0", "d1")))
    generation.cancel()
    await read(generation)
    await finished(service, cluster)


@pytest.mark.parametrize("pair", [("p0", None), ("p0", "p0")])
async def test_a_grant_that_no_export_can_follow_is_our_fault(pair):
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, _ = await begun(cluster, service, pairs=[pair])
    prefill.export_waits(REFUSED)
    _, _, error = await read(generation)
    assert isinstance(error, EngineFault)
    await finished(service, cluster)
