"""Who is away: the control plane, stopped or restarted under load, or a worker that comes back."""

import asyncio
import threading

import pytest

from cluster.clock import SystemClock
from cluster.control.decisions import AbortLegs
from cluster.control.facts import Health
from cluster.control.server import ControlServer
from cluster.errors import NoWorker
from tests.cluster.control.conftest import QUICK, FakeWorker, Router, until
from tests.cluster.control.factory import (
    deaths,
    grants,
    held_by,
    make_config,
    make_registration,
    make_want,
    two_pools,
)
from tests.cluster.control.story import Story


class StoppableServer:
    """A control plane in a thread of its own, whose loop a test can stop: as SIGSTOP does."""

    def __init__(self, config):
        self._config = config
        self._may_run = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server = None
        self.address = ""

    async def start(self):
        async def build():
            self.server = ControlServer(self._config, SystemClock(), settings=QUICK)
            return await self.server.start("127.0.0.1", 0)

        self.address = await self._on_its_loop(build())

    async def stop(self):
        await self._on_its_loop(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    def pause(self):
        self._may_run.clear()
        self._loop.call_soon_threadsafe(self._may_run.wait, 30.0)

    def go_on(self):
        self._may_run.set()

    async def _on_its_loop(self, work):
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await asyncio.wrap_future(future)


@pytest.fixture
async def stoppable():
    config = make_config(*two_pools(slots=2))
    control = StoppableServer(config)
    await control.start()
    clients = []

    async def started(made):
        await made.client.start()
        clients.append(made.client)
        return made

    control.workers = [
        await started(FakeWorker(control.address, make_registration(pool))) for pool in config.pools
    ]
    control.router = await started(Router(control.address, "a"))
    yield control
    await control.router.client.stop()
    for worker in control.workers:
        await worker.client.stop("the test is over")
    await control.stop()


async def test_a_control_plane_that_was_stopped_judges_nobody(stoppable):
    """Stopped for longer than workers may be silent, with their reports waiting at its door."""
    router, (_, decode) = stoppable.router.client, stoppable.workers
    first = await asyncio.wait_for(router.want(make_want("r1")), 10.0)
    decode.hold(first.grant_id)
    await until(lambda: router.view and held_by(router.view, "decode-0") == (first.grant_id,))
    before = decode.num_reports
    stoppable.pause()
    second = asyncio.create_task(router.want(make_want("r2")))
    num_missed = int(1.5 / 0.1)  # beats of 0.1 s; dead after 0.8 s, and a gap is 1 s
    await until(lambda: decode.num_reports >= before + num_missed)
    assert router.view_age_s(SystemClock().now()) > QUICK.dead_after_s, "it was not stopped"
    assert not second.done()
    stoppable.go_on()
    assert (await asyncio.wait_for(second, 10.0)).request_id == "r2"
    assert stoppable.router.dead == []
    await until(lambda: router.view.num_granted == 2)
    router.done(first.grant_id, 1)
    router.done(second.result().grant_id, 1)
    await until(lambda: router.view.num_granted == 0)
    assert stoppable.router.dead == []


@pytest.mark.parametrize("is_tick_first", [True, False])
def test_after_an_absence_timers_start_again_in_any_order(is_tick_first):
    """Reports that came meanwhile are read before the first look at the clock, or after it."""
    story = Story(counts={"decode": 2})
    (grant,) = grants(story.want())
    story.report("prefill-0", grant.grant_id)
    story.planner.router_left("a", "a-1", story.now)
    story.planner.worker_stream_lost("decode-1", story.workers["decode-1"].incarnation, story.now)
    story.now += 10.0
    decisions = story.planner.tick(story.now) if is_tick_first else []
    for worker_id in ("prefill-0", "decode-0"):
        decisions += story.report(worker_id, grant.grant_id)
    decisions += story.planner.tick(story.now)
    story.planner.router_joined("a", "a-1", story.now)
    story.join(story.workers["decode-1"])
    decisions += story.advance(1.0, reporting=tuple(story.workers))
    assert deaths(decisions) == []
    assert grants(story.want()) == [grant], "it lives on"
    assert len(story.view().workers) == 3


async def test_restarted_under_load(cluster):
    """Two routers, wants that wait and legs that run: nobody fails, nobody is dead, FCFS holds."""
    await cluster.start(*two_pools(slots=4))
    prefill, decode = await cluster.workers()
    routers = [await cluster.router("a"), await cluster.router("b")]
    held = [(await routers[i % 2].client.want(make_want(f"h{i}"))).grant_id for i in range(4)]
    decode.hold(*held)
    prefill.hold(*held)
    wants = [asyncio.create_task(routers[i % 2].client.want(make_want(f"w{i}"))) for i in range(6)]
    await until(lambda: routers[0].client.view.num_waiting == 6)
    old_term = cluster.server.term
    for _ in range(2):
        await cluster.server.stop(0.0)
        await until(lambda: not any(router.client.is_connected for router in routers))
        await cluster.restart()
        await until(lambda: prefill.client.is_connected and decode.client.is_connected)
        await until(lambda: routers[0].client.view.num_waiting == 6)
    assert not any(want.done() for want in wants), "all slots are held, as the reports say"
    prefill.hold()
    decode.hold()
    new = await asyncio.wait_for(asyncio.gather(*wants[:4]), 10.0)
    assert all(grant.term > old_term for grant in new)
    for index, grant in enumerate(new):
        routers[index % 2].client.done(grant.grant_id, 1)
    await asyncio.wait_for(asyncio.gather(*wants[4:]), 10.0)
    assert [router.dead for router in routers] == [[], []]


async def test_a_grant_of_an_old_term_is_dropped(cluster):
    await cluster.start(*two_pools(slots=1))
    await cluster.workers()
    router = await cluster.router()
    kept = []

    class Keep:
        def outgoing(self, kind, pass_on):
            pass_on()

        def incoming(self, kind, pass_on):
            if kind == "grant":
                kept.append(pass_on)
            else:
                pass_on()

    router.client.set_tap(Keep())
    waiting = asyncio.create_task(router.client.want(make_want()))
    await until(lambda: kept)
    router.client._term += 1  # as a newer control plane's welcome has it
    kept.pop()()
    await asyncio.sleep(0)
    assert not waiting.done()
    assert router.client._held == set()
    waiting.cancel()


def test_suspected_after_one_missed_second_dead_after_three():
    story = Story(counts={"decode": 2})
    talking = ("prefill-0", "decode-1")
    seen = []
    for _ in range(8):
        decisions = story.advance(0.5, reporting=talking)
        health = {v.worker.worker_id: v.health for v in story.view().workers}
        seen.append(health.get("decode-0", "dead"))
        assert bool(deaths(decisions)) is (seen[-1] == "dead" and seen[-2] != "dead")
    alive, suspected = Health.ALIVE, Health.SUSPECTED
    assert seen == [alive] * 3 + [suspected] * 3 + ["dead"] * 2


def test_a_worker_that_was_stopped_comes_back_as_the_same():
    """P-19, SIGSTOP and SIGCONT: it registers again, and ends the legs nobody waits for."""
    story = Story(counts={"decode": 2})
    (grant,) = grants(story.want())
    stopped = grant.decode.worker_id
    others = [worker_id for worker_id in story.workers if worker_id != stopped]
    story.report(stopped, grant.grant_id)
    assert deaths(story.advance(4.0, reporting=others)) == [stopped]
    story.done(grant)
    story.advance(26.0, reporting=others)
    assert deaths(story.join(story.workers[stopped])) == []
    decisions = []
    for _ in range(8):
        story.now += 0.5
        for worker_id in others:
            story.report(worker_id)
        decisions += story.report(stopped, grant.grant_id)
        decisions += story.planner.tick(story.now)
    assert AbortLegs(worker_id=stopped, grant_id=grant.grant_id) in decisions
    story.report(stopped)
    picks = {grants(story.want(f"r{i}"))[0].decode.worker_id for i in range(2)}
    assert picks == {"decode-0", "decode-1"}
    assert len(story.view().workers) == 3


async def test_no_worker_is_told_only_after_the_window_of_a_restart(cluster):
    await cluster.start()
    _, decode = await cluster.workers()
    router = await cluster.router()
    await decode.client.stop("drained")
    await cluster.server.stop(0.0)
    await until(lambda: not router.client.is_connected)
    await cluster.restart()
    with pytest.raises(NoWorker):
        await asyncio.wait_for(router.client.want(make_want()), 10.0)
