"""What fails before the first token is tried again elsewhere; what can't be helped is an error."""

from __future__ import annotations

import pytest

from cluster.errors import EngineFault, HandoffFailed, NoWorker, WorkerLost
from cluster.handoff import AbortCause
from cluster.request import FinishReason
from cluster.rpc.legs import abort_error
from tests.router.fakes import FakeCluster, make_router, metric, speaks, until
from tests.router.reading import finished, read, start

A, B, C, D = b"abcd"


async def test_a_worker_lost_before_the_first_token_is_survived_elsewhere():
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), ("p1", "d0")]
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=2)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.die()
    (second,) = await cluster.started("p1")
    await until(lambda: len(decode.legs) == 2)

    # The decode leg of the first attempt is told, and the dead one is avoided.
    assert decode.aborts == [(decode.legs[0].key, AbortCause.FAULT)]
    assert cluster.route.wants[1].avoid == ("p0.1",)
    assert [leg.key.attempt for leg in decode.legs] == [0, 1]

    # Words of the old attempt count for nothing.
    second.say(A, ends=True)
    decode.say(A, B, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.timeline.num_attempts) == ("ab", 2)
    assert cluster.route.dones == [("g0", 0), ("g1", 2)]
    await finished(service, cluster)


@pytest.mark.parametrize(("named", "avoided"), [("d0", "d0.1"), ("p0", "p0.1"), ("x9", "p0.1")])
async def test_a_prefill_leg_that_tells_of_its_peers_loss_makes_the_peer_avoided(named, avoided):
    """The prefill worker lives, but can't reach its decode worker."""
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), ("p0.2", "d0.2")]
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=1)
    prefill, _ = await cluster.started("p0", "d0")
    prefill.say(error=WorkerLost("cannot be reached", worker_id=named))
    await until(lambda: len(cluster.route.wants) == 2)
    assert cluster.route.wants[1].avoid == (avoided,)
    generation.cancel()
    await finished(service, cluster)


async def test_a_worker_that_cannot_be_reached_is_lost():
    cluster = FakeCluster()
    cluster.refusing = {"p0.1"}
    cluster.route.pairs = [("p0", "d0"), ("p0.2", "d0")]
    cluster.script = speaks([A], FinishReason.STOP)
    service = make_router(cluster)
    text, _, finish = await read(await start(cluster, service, max_tokens=1))
    assert (text, finish.timeline.num_attempts) == ("a", 2)
    await finished(service, cluster)


async def test_a_worker_declared_dead_is_lost_though_its_stream_is_open():
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0")]
    service = make_router(cluster)
    generation = await start(cluster, service)
    prefill, _ = await cluster.started("p0", "d0")
    cluster.route.default_pair = None
    service.dispatcher.on_worker_dead("p0", "p0.1")
    service.dispatcher.on_worker_dead("p0", "p0.1")
    await until(lambda: len(cluster.route.wants) == 2)
    await until(lambda: prefill.is_closed)
    generation.cancel()
    await finished(service, cluster)


async def test_three_attempts_are_all():
    cluster = FakeCluster()
    cluster.script = lambda worker, leg: worker.say(error=HandoffFailed("no"))
    service = make_router(cluster)
    _, _, error = await read(await start(cluster, service))
    assert isinstance(error, HandoffFailed)
    assert len(cluster.route.wants) == 3
    await finished(service, cluster)


async def test_no_worker_for_the_second_attempt_is_the_last_word():
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service)
    prefill, _ = await cluster.started("p0", "d0")
    cluster.route.error = NoWorker("none", retry_after_s=3)
    prefill.die()
    _, _, error = await read(generation)
    assert isinstance(error, NoWorker)
    assert error.retry_after_s == 3
    await finished(service, cluster)


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_a_router_that_lost_its_prefill_worker_alone_goes_on_with_another(first):
    """P-20: that one tells the decode worker, who may be heard before its own stream is missed."""
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), ("p1", "d1")]
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=3)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(A)
    if first == "prefill":
        prefill.give_up()
    decode.say(error=abort_error(AbortCause.LEASE, "handoff"))
    if first == "decode":
        cluster.route.pairs = [None, ("p1", "d1")]  # nobody takes the export meanwhile
        await until(lambda: len(cluster.route.wants) == 2)
        prefill.give_up()
    heir, other = await cluster.started("p1", "d1")
    assert heir.legs[0].output_ids == (A,)
    heir.say(B, start=1, ends=True)
    other.say(B, C, start=1, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.num_resumed) == ("abc", 1)
    await finished(service, cluster)


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_prefill_leg_that_fails_after_the_commit_is_no_failure(is_late):
    """The decode worker's COMMIT decides, whichever of the two is heard first."""
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=3)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(A)
    if is_late:
        prefill.say(error=HandoffFailed("the link broke"))
        await generation.next()
        decode.say(A, B)
    else:
        decode.say(A, B)
        prefill.die()
    decode.say(C, start=2, finish=FinishReason.LENGTH)
    _, ids, finish = await read(generation)
    assert ids[-2:] == [B, C]
    assert finish.num_output_tokens == 3
    await finished(service, cluster)


@pytest.mark.parametrize(
    "speak",
    [
        lambda prefill, decode: (prefill.say(ends=True), decode.say(ends=True)),
        lambda prefill, decode: (prefill.say(A), decode.say(B, start=2),
                                 decode.say(finish=FinishReason.STOP)),
        lambda prefill, decode: decode.say(finish=FinishReason.STOP),
        lambda prefill, decode: prefill.say(error=EngineFault("a step failed")),
    ],
    ids=["no finish", "a gap", "no token", "engine fault"],
)  # fmt: skip
async def test_our_own_faults_are_errors_and_never_a_short_answer(speak):
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service)
    speak(*await cluster.started("p0", "d0"))
    _, _, error = await read(generation)
    assert isinstance(error, EngineFault)
    await finished(service, cluster)


async def test_tokens_beyond_the_limit_are_dropped():
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=2)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(A, ends=True)
    decode.say(A, B, C, D, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.num_output_tokens) == ("ab", 2)


async def test_a_bug_in_the_router_ends_the_request_and_gives_back(monkeypatch):
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service)
    prefill, _ = await cluster.started("p0", "d0")
    monkeypatch.setattr("router.stream_text.ChoiceText.push", lambda self, token_id: 1 / 0)
    prefill.say(A)
    _, _, error = await read(generation)
    assert isinstance(error, EngineFault)
    assert error.message == "an internal error"
    await finished(service, cluster)


async def test_tokens_of_an_old_attempt_are_dropped():
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=2)
    prefill, decode = await cluster.started("p0", "d0")
    prefill.say(error=HandoffFailed("the lease ran out"))
    await until(lambda: len(decode.legs) == 2)
    new = decode.legs.pop()
    decode.say(D, D)  # the old leg speaks, late
    decode.legs.append(new)
    assert [leg.key.attempt for leg in decode.legs] == [0, 1]
    prefill.say(A, ends=True)
    decode.say(A, B, finish=FinishReason.LENGTH)
    text, ids, _ = await read(generation)
    assert (text, ids) == ("ab", [A, B])
    assert metric(service, "pdserve_wasted_tokens_total") == 2
    await finished(service, cluster)


async def test_a_request_that_killed_two_workers_is_ended():
    """DESIGN section 4: it may be the request that kills them."""
    cluster = FakeCluster()
    cluster.route.pairs = [("p0", "d0"), ("p1", "d0"), ("p2", "d0")]
    service = make_router(cluster)
    generation = await start(cluster, service)
    for name in ("p0", "p1"):
        (worker,) = await cluster.started(name)
        worker.die()
    _, _, error = await read(generation)
    assert isinstance(error, WorkerLost)
    assert (error.stage, error.worker_id) == ("prefill", "p1")
    assert [want.avoid for want in cluster.route.wants] == [(), ("p0.1",)]
    await finished(service, cluster)


async def test_workers_that_never_had_the_request_are_not_its_victims():
    """They can't be reached: two of them are two retries, and the third try is served."""
    cluster = FakeCluster()
    cluster.refusing = {"p0.1", "p1.1"}
    cluster.route.pairs = [("p0", "d0"), ("p1", "d0"), ("p2", "d0")]
    cluster.script = speaks([A], FinishReason.STOP)
    service = make_router(cluster)
    text, _, finish = await read(await start(cluster, service, max_tokens=1))
    assert (text, finish.timeline.num_attempts, finish.num_resumed) == ("a", 3, 0)
    assert cluster.route.wants[-1].avoid == ("p0.1", "p1.1")
    await finished(service, cluster)


async def test_a_worker_that_says_it_stops_is_no_victim_either():
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service)
    for number in range(3):
        prefill, _ = await cluster.started("p0", "d0")
        await until(lambda number=number: len(cluster.worker("p0").legs) == number + 1)
        prefill.say(error=WorkerLost("the worker is stopping", stage="intake", worker_id="p0"))
    _, _, error = await read(generation)
    assert isinstance(error, WorkerLost)
    assert len(cluster.route.wants) == 3
    await finished(service, cluster)
