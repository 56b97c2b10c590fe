"""When a worker counts as hung: a stopped process, or an engine that is stuck in a step."""

from __future__ import annotations

import pytest

from cluster.errors import WorkerLost
from cluster.request import Beat, FinishReason
from router.pulse import PATIENCE_S, Pulse
from tests.router.fakes import FakeCluster, make_router, metric, until
from tests.router.reading import finished, read, start

A, B = b"ab"
LOOK_S = 0.5


class Watched:
    """A pulse that is looked at twice a second, on a clock of its own."""

    def __init__(self) -> None:
        self.pulse = Pulse()
        self.now = 100.0
        self.pulse.look(self.now)

    def after(self, seconds: float, beat: Beat | None = None, *, num_per_step: int = 0):
        """Let time pass; with a beat it comes each second, its steps counted on."""
        flaw = None
        for number in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            if beat is not None and number % 2:
                steps = beat.num_steps + number * num_per_step
                self.pulse.heard(Beat(steps, beat.patience_s))
            flaw = flaw or self.pulse.look(self.now)
        return flaw


def test_a_process_that_says_nothing_is_lost_after_five_seconds():
    watched = Watched()
    assert watched.after(PATIENCE_S) is None
    assert "said nothing" in watched.after(1.0)


def test_an_engine_that_waits_is_no_stuck_one():
    """Idle, or a leg that waits for its KV: no step runs, and none comes."""
    assert Watched().after(60.0, Beat(7, 0.0)) is None


def test_an_engine_that_steps_is_fine():
    assert Watched().after(60.0, Beat(7, 5.0), num_per_step=3) is None


def test_a_live_loop_does_not_hide_a_hung_engine():
    watched = Watched()
    assert watched.after(10.0, Beat(7, 5.0), num_per_step=1) is None
    assert watched.after(4.0, Beat(99, 5.0)) is None
    assert "one step" in watched.after(3.0, Beat(99, 5.0))


def test_a_step_that_is_predicted_to_be_long_has_longer():
    watched = Watched()
    assert watched.after(19.0, Beat(7, 20.0)) is None
    assert "one step" in watched.after(5.0, Beat(7, 20.0))


def test_its_silence_is_borne_as_long_as_its_step():
    watched = Watched()
    watched.after(1.0, Beat(7, 20.0))
    assert watched.after(19.0) is None
    assert watched.after(3.0) is not None


def test_a_router_that_had_been_stopped_itself_judges_nobody():
    """It has not read what came meanwhile."""
    watched = Watched()
    watched.after(2.0, Beat(7, 5.0))
    watched.now += 30.0
    assert watched.pulse.look(watched.now) is None
    assert watched.after(PATIENCE_S - 1.0) is None
    assert watched.after(2.0) is not None


# ---- in the router


@pytest.mark.parametrize("beat", [None, Beat(3, 5.0)], ids=["stopped", "engine hangs"])
async def test_a_worker_that_hangs_in_mid_stream_is_replaced(beat):
    """P-19, P-20: SIGSTOP breaks no stream."""
    cluster = FakeCluster()
    cluster.route.pairs = [(None, "d0"), (None, "d1")]
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=2)
    (worker,) = await cluster.started("d0")
    worker.say(A)
    await generation.next()
    workers = service.dispatcher.workers
    for number in range(15):
        if beat is not None:
            worker.events.on_beat(beat)
        workers.tick(number * LOOK_S)
    await until(lambda: worker.is_closed)
    (second,) = await cluster.started("d1")
    assert cluster.route.wants[1].avoid == ("d0.1",)
    worker.say(B, start=1)  # it wakes up
    second.say(B, start=1, finish=FinishReason.LENGTH)
    text, _, finish = await read(generation)
    assert (text, finish.num_resumed) == ("b", 1)
    await finished(service, cluster)


async def test_workers_without_legs_are_left_alone():
    cluster = FakeCluster()
    cluster.route.pairs = [(None, "d0"), (None, "d0")]
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=1)
    (worker,) = await cluster.started("d0")
    worker.say(A, finish=FinishReason.LENGTH)
    await read(generation)
    for number in range(60):
        service.dispatcher.workers.tick(number * LOOK_S)
    assert not worker.is_closed
    # Its silence so far does not count against it.
    generation = await start(cluster, service, max_tokens=1)
    await until(lambda: len(worker.legs) == 2)
    service.dispatcher.workers.tick(60 * LOOK_S)
    worker.say(A, finish=FinishReason.LENGTH)
    await read(generation)
    assert len(cluster.connections) == 1
    await finished(service, cluster)


async def test_the_router_looks_by_itself(monkeypatch):
    monkeypatch.setattr("router.dispatch.TICK_S", 0.01)
    monkeypatch.setattr("router.pulse.PATIENCE_S", 0.05)
    cluster = FakeCluster()
    cluster.route.pairs = [(None, "d0")]
    cluster.route.error = None
    service = make_router(cluster)
    await service.start()
    generation = await start(cluster, service, max_tokens=2)
    (worker,) = await cluster.started("d0")
    worker.say(A)
    await until(lambda: worker.is_closed)
    generation.cancel()
    assert isinstance((await read(generation))[2], Exception)
    await service.stop()
    assert metric(service, "pdserve_requests_in_flight") == 0


async def test_a_death_before_any_answer_is_not_the_requests_doing():
    """The stream to it never came about."""
    cluster = FakeCluster()
    cluster.route.pairs = [(None, "d0"), (None, "d1"), (None, "d2")]
    cluster.muted = {"d0.1", "d1.1"}
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=1)
    for name in ("d0", "d1"):
        (worker,) = await cluster.started(name)
        worker.die()
    (last,) = await cluster.started("d2")
    last.say(error=WorkerLost("stopping", stage="intake"))
    _, _, error = await read(generation)
    assert isinstance(error, WorkerLost)
    assert len(cluster.route.wants) == 3
    await finished(service, cluster)
