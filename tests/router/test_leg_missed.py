"""The start of a leg that was lost on its way to a living worker: the control plane misses it."""

from __future__ import annotations

import pytest

from cluster.config import Role
from cluster.errors import HandoffFailed, WorkerLost
from cluster.handoff import AbortCause
from cluster.request import FinishReason
from router.parts import Parts
from tests.router.fakes import FakeCluster, make_router, make_view, make_worker, until
from tests.router.reading import finished, read, start

A, B = b"ab"
GIVEN_UP = HandoffFailed("handoff aborted: fault", stage="intake")
PAIRS = {"disaggregated": ("p0", "d0"), "prefill alone": ("p0", None), "local": (None, "p0")}


def missed(service, cluster, attempt=0, worker_id=""):
    """What the control plane says of an attempt."""
    error = WorkerLost("the worker never had the leg", stage="placement", worker_id=worker_id)
    service.dispatcher.on_leg_missed(cluster.route.wants[0].request_id, attempt, error)


async def nothing_comes_of_it(cluster, generation):
    """Everything that was heard so far was acted upon when its next token is out."""
    worker = cluster.worker("p0")
    worker.say(A, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.timeline.num_attempts) == ("a", 1)
    assert len(cluster.route.wants) == 1


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
async def test_a_lost_start_is_tried_elsewhere_long_before_the_deadline(pair, monkeypatch):
    """CASES P-20: its worker lives, so that nobody else would ever end the leg."""
    monkeypatch.setattr("router.attempt.START_S", 0.0)
    cluster = FakeCluster()
    cluster.route.pairs = [pair, ("p1", "d1")]
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=2)
    (first,) = await cluster.started("p0")
    missed(service, cluster)
    second, third = await cluster.started("p1", "d1")
    assert cluster.route.wants[1].avoid == ("p0.1",)
    assert second.legs[0].key.attempt == 1, "what was lost may yet come, and is of an old attempt"
    assert first.aborts == [(first.legs[0].key, AbortCause.FAULT)]
    assert not service.dispatcher.workers._workers["p0.1"].legs, "nobody will say its end"
    second.say(A, ends=True)
    third.say(A, B, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.timeline.num_attempts) == ("ab", 2)
    await finished(service, cluster)


async def test_a_decode_leg_of_a_missed_attempt_is_given_up(monkeypatch):
    monkeypatch.setattr("router.attempt.START_S", 0.0)
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), None]
    service = make_router(cluster)
    generation = await start(cluster, service)
    _, decode = await cluster.started("p0", "d0")
    missed(service, cluster)
    await until(lambda: decode.aborts)
    assert cluster.route.dones == [("g0", 0)]
    generation.cancel()
    await finished(service, cluster)


async def test_a_start_that_may_still_be_on_its_way_is_waited_for():
    """This router was late itself."""
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", None)]
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=1)
    await cluster.started("p0")
    missed(service, cluster)
    await nothing_comes_of_it(cluster, generation)
    await finished(service, cluster)


@pytest.mark.parametrize("has_come", [False, True])
async def test_who_is_told_too_early_looks_again(has_come, monkeypatch):
    """CASES P-20: it is told once; what has come meanwhile its worker has reported."""
    monkeypatch.setattr("router.attempt.START_S", 0.05)
    monkeypatch.setattr("router.attempt.REPORT_S", 0.05)
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", None), ("p1", None)]
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=1)
    await cluster.started("p0")
    missed(service, cluster)
    if has_come:
        cluster.route.view = make_view(make_worker("p0", Role.PREFILL, held_grants=("g0",)))
        looked = count_looks(monkeypatch)
        await until(lambda: looked)
        await nothing_comes_of_it(cluster, generation)
    else:
        (second,) = await cluster.started("p1")
        second.say(A, finish=FinishReason.LENGTH)
        assert (await read(generation))[0] == "a"
    await finished(service, cluster)


def count_looks(monkeypatch):
    """A list that grows with each look at what a worker holds."""
    looks, holds = [], Parts.holds

    def counted(parts, peer, grant_id):
        looks.append(grant_id)
        return holds(parts, peer, grant_id)

    monkeypatch.setattr(Parts, "holds", counted)
    return looks


@pytest.mark.parametrize("speaker", ["prefill", "decode"])
async def test_a_leg_that_was_over_before_any_report_is_not_missed(speaker, monkeypatch):
    """A short prefill may come and go between two reports."""
    monkeypatch.setattr("router.attempt.START_S", 0.0)
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=2)
    prefill, decode = await cluster.started("p0", "d0")
    (prefill if speaker == "prefill" else decode).say(A)
    missed(service, cluster)
    prefill.say(A, ends=True)
    decode.say(A, B, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.timeline.num_attempts) == ("ab", 1)
    assert len(cluster.route.wants) == 1
    await finished(service, cluster)


async def test_what_is_said_of_another_attempt_or_of_nobody_changes_nothing(monkeypatch):
    monkeypatch.setattr("router.attempt.START_S", 0.0)
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", None)]
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=1)
    await cluster.started("p0")
    missed(service, cluster, attempt=1)
    await nothing_comes_of_it(cluster, generation)
    missed(service, cluster)
    await finished(service, cluster)


# ---- the start of a decode leg


async def prefilled(cluster, service, *pairs):
    """A request whose first token is out; the pairs answer the wants after that."""
    cluster.route.pairs = [("p0", "d0"), *pairs]
    generation = await start(cluster, service, max_tokens=2)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(A)
    return generation, prefill, decode


async def test_a_decode_leg_that_came_late_is_not_given_up(monkeypatch):
    monkeypatch.setattr("router.attempt.START_S", 0.05)
    monkeypatch.setattr("router.attempt.REPORT_S", 0.05)
    cluster = FakeCluster()
    cluster.route.view = make_view(make_worker("d0", Role.DECODE, held_grants=("g0",)))
    service = make_router(cluster)
    generation, prefill, decode = await prefilled(cluster, service)
    missed(service, cluster, worker_id="d0")
    looked = count_looks(monkeypatch)
    await until(lambda: looked)
    prefill.say(A, ends=True)
    decode.say(A, B, finish=FinishReason.LENGTH)
    assert (await read(generation))[0] == "ab"
    assert (len(cluster.route.wants), decode.aborts) == (1, [])
    await finished(service, cluster)


async def test_a_lost_start_is_noted_that_was_told_while_the_old_leg_had_not_ended(monkeypatch):
    """CASES P-20: the grant waited here for longer than workers have to report it."""
    monkeypatch.setattr("router.attempt.START_S", 0.05)
    monkeypatch.setattr("router.attempt.REPORT_S", 0.05)
    monkeypatch.setattr("router.attempt.REDIRECT_GAP_S", 0.0)
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, decode = await prefilled(cluster, service, ("p0", "d0"), ("p0", "d1"))
    missed(service, cluster, worker_id="d0")
    await until(lambda: len(cluster.route.grants) == 2)
    missed(service, cluster, attempt=1, worker_id="d0")
    assert len(decode.legs) == 1, "its old leg has not ended"
    decode.say(error=GIVEN_UP, aborted_grant="g0")
    await until(lambda: len(decode.legs) == 2)
    (second,) = await cluster.started("d1")
    prefill.say(A, ends=True)
    second.say(A, B, finish=FinishReason.LENGTH)
    assert (await read(generation))[0] == "ab"
    await finished(service, cluster)


@pytest.mark.parametrize("other", ["d1", "d0"])
async def test_a_lost_start_of_a_decode_leg_is_made_good_without_a_new_prefill(other, monkeypatch):
    """CASES P-20: long before the export's lease is over, also where there is one worker only."""
    monkeypatch.setattr("router.attempt.START_S", 0.0)
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, decode = await prefilled(cluster, service, ("p0", other))
    missed(service, cluster, worker_id="d0")
    await until(lambda: decode.aborts)
    assert (decode.aborts, decode.aborted_grants) == (
        [(prefill.legs[0].key, AbortCause.FAULT)],
        ["g0"],
    )

    # STEP 1: the worker says the end of what it never had, and is asked again.
    if other == "d0":
        decode.say(error=GIVEN_UP, aborted_grant="g0")
        await until(lambda: len(decode.legs) == 2)
        second = decode
    else:
        (second,) = await cluster.started("d1")
    want = cluster.route.wants[1]
    assert (want.export.grant_id, want.avoid) == ("g0", ())

    # STEP 2: what is said late is of the old leg.
    await until(lambda: prefill.redirects)
    decode.say(error=GIVEN_UP, aborted_grant="g0")
    missed(service, cluster, worker_id=other)
    prefill.say(A, ends=True)
    second.say(A, B, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.timeline.num_attempts, len(prefill.legs)) == ("ab", 1, 1)
    assert (decode.aborted_grants, len(cluster.route.wants)) == (["g0"], 2)
    await finished(service, cluster)


async def test_a_worker_that_loses_two_starts_is_avoided(monkeypatch):
    monkeypatch.setattr("router.attempt.START_S", 0.0)
    monkeypatch.setattr("router.attempt.REDIRECT_GAP_S", 0.0)
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, decode = await prefilled(cluster, service, ("p0", "d0"), ("p0", "d1"))
    missed(service, cluster, worker_id="d0")
    await until(lambda: decode.aborts)
    decode.say(error=GIVEN_UP, aborted_grant="g0")
    await until(lambda: len(decode.legs) == 2)

    # STEP 1: of the first want nothing more is to be heard; of the second one there is.
    missed(service, cluster, attempt=0, worker_id="d0")
    missed(service, cluster, attempt=1, worker_id="d0")
    (second,) = await cluster.started("d1")
    assert [want.avoid for want in cluster.route.wants] == [(), (), ("d0.1",)]
    assert decode.aborted_grants == ["g0", "g1"]
    prefill.say(A, ends=True)
    second.say(A, B, finish=FinishReason.LENGTH)
    assert (await read(generation))[0] == "ab"
    await finished(service, cluster)


async def test_a_lost_start_of_a_decode_leg_whose_kv_is_gone_is_another_attempt(monkeypatch):
    monkeypatch.setattr("router.attempt.START_S", 0.0)
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, decode = await prefilled(cluster, service, (None, "p1"))
    prefill.say(error=HandoffFailed("no decode worker within the lease", stage="handoff"))
    missed(service, cluster, worker_id="d0")
    (again,) = await cluster.started("p1")
    assert again.legs[0].output_ids == (A,)
    assert decode.aborts
    again.say(B, start=1, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.timeline.num_attempts) == ("ab", 2)
    await finished(service, cluster)


async def test_a_decode_leg_that_has_spoken_is_not_missed(monkeypatch):
    monkeypatch.setattr("router.attempt.START_S", 0.0)
    cluster = FakeCluster()
    service = make_router(cluster)
    generation, prefill, decode = await prefilled(cluster, service)
    decode.say(A)
    missed(service, cluster, worker_id="d0")
    prefill.say(A, ends=True)
    decode.say(B, start=1, finish=FinishReason.LENGTH)
    assert (await read(generation))[0] == "ab"
    assert (len(cluster.route.wants), decode.aborts) == (1, [])
    await finished(service, cluster)
