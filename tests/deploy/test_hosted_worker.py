"""Workers that drain, leave, and come back in other roles: whole ones, in one process."""

import asyncio
import dataclasses

import pytest

from cluster.config import Role
from cluster.control.orders import give_order
from cluster.control.status import get_cluster
from cluster.errors import EngineFault, InvalidRequest, WorkerLost
from cluster.request import FinishReason, LegKind, Peer, Redirect
from deploy import worker, worker_life
from tests.deploy.world import KEY, Sink, blocked_runner, make_leg
from tests.factories import expected_tokens, make_key


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Late grants come within less than a second here."""
    monkeypatch.setattr(worker_life, "LAST_GRANTS_S", 0.3)


async def roles(world, until):
    """Wait for what the control plane says of roles; returns the incarnations."""
    async with asyncio.timeout(10):
        while True:
            view = await get_cluster(world.address, timeout_s=5.0)
            if until({w.worker.worker_id: w.worker.role for w in view.workers}):
                return {w.worker.worker_id: w.worker.incarnation for w in view.workers}
            await asyncio.sleep(0.02)


async def order(world, worker_id, role=None):
    return await give_order(world.address, worker_id, role, timeout_s=5.0)


async def test_what_runs_ends_and_late_grants_are_served(world):
    """CASES P-27: it says so first; a grant on its way is served, a later leg sent elsewhere."""
    runner, entered, go = blocked_runner()
    hosted = world.host("m", "m-0", runner)
    await hosted.start()
    legs, sink = hosted.worker.legs, Sink()
    legs.start_leg(make_leg(LegKind.LOCAL), sink)
    await asyncio.to_thread(entered.wait, 10)
    ending = asyncio.ensure_future(hosted.end(10.0))
    await world.reports(lambda reports: reports["m-0"].is_draining)
    legs.start_leg(make_leg(LegKind.LOCAL, "on-its-way"), sink)
    assert make_key("on-its-way") not in sink.ends
    await asyncio.sleep(2 * worker_life.LAST_GRANTS_S)
    legs.start_leg(make_leg(LegKind.LOCAL, "too-late"), sink)
    assert isinstance(sink.ends[make_key("too-late")].error, WorkerLost)
    assert not ending.done(), "it left its legs"
    go.set()
    await ending
    for request_id in ("r", "on-its-way"):
        assert sink.ends[make_key(request_id)].finish_reason is FinishReason.LENGTH
    await world.reports(lambda reports: not reports)


async def test_after_the_grace_what_is_left_ends_retryably(world):
    runner, entered, go = blocked_runner()
    hosted = world.host("m", "m-0", runner)
    await hosted.start()
    sink = Sink()
    hosted.worker.legs.start_leg(make_leg(LegKind.LOCAL), sink)
    hosted.worker.legs.start_leg(make_leg(LegKind.DECODE, "waits"), sink)
    await asyncio.to_thread(entered.wait, 10)
    ending = asyncio.ensure_future(hosted.end(0.3))
    assert isinstance((await sink.end_of(make_key("waits"))).error, WorkerLost)
    go.set()
    await ending
    assert isinstance(sink.ends[KEY].error, WorkerLost)


async def test_an_export_that_waits_keeps_its_worker_until_it_is_fetched(world):
    """CASES P-27: a P that computes nothing is not idle; it follows redirects while it drains."""
    hosted = world.host("p", "p-0")
    await hosted.start()
    decode = await world.start("d", "d-0")
    nobody = Peer(worker_id="gone", incarnation="gone-1", address="127.0.0.1:1")
    p_sink, d_sink = Sink(), Sink()
    hosted.worker.legs.start_leg(make_leg(LegKind.PREFILL, peer=nobody), p_sink)
    await p_sink.until(lambda sink: sink.waiting)
    ending = asyncio.ensure_future(hosted.end(10.0))
    await world.reports(lambda reports: reports["p-0"].is_draining)
    await asyncio.sleep(2 * worker_life.LAST_GRANTS_S)
    assert not ending.done(), "it left with KV that nobody had"
    ids = {"handoff_id": "handoff-2", "grant_id": "grant-2"}
    decode.legs.start_leg(make_leg(LegKind.DECODE, **ids), d_sink)
    hosted.worker.legs.redirect_leg(Redirect(key=KEY, peer=decode.me, handoff_id="handoff-2"))
    assert (await d_sink.end_of(KEY)).finish_reason is FinishReason.LENGTH
    assert d_sink.output() == expected_tokens("r", 6)
    await ending


async def test_an_order_to_drain_ends_in_an_unhealthy_worker(world):
    """Whoever hosts it puts another in its place."""
    hosted = world.host("m", "m-0")
    await hosted.start()
    hosted.check_health()
    assert await order(world, "m-0") == hosted.worker.incarnation
    await asyncio.wait_for(asyncio.shield(hosted.drained), 10)
    await world.reports(lambda reports: not reports)
    assert not hosted.fault.done()
    with pytest.raises(EngineFault, match="drained"):
        hosted.check_health()


async def test_a_worker_that_fails_is_unhealthy(world):
    """CASES P-26: whoever hosts it is told, also in the role that it has taken."""
    runner, entered, go = blocked_runner()
    hosted = world.host("m", "m-0", runner)
    await hosted.start()
    await order(world, "m-0", Role.DECODE)
    await roles(world, lambda roles: roles.get("m-0") is Role.DECODE)
    hosted.worker.legs.start_leg(make_leg(LegKind.LOCAL), Sink())
    await asyncio.to_thread(entered.wait, 10)
    hosted.check_health()
    runner.draw = lambda share: 1 / 0
    go.set()
    await asyncio.wait_for(asyncio.shield(hosted.fault), 10)
    with pytest.raises(EngineFault, match="failed"):
        hosted.check_health()


async def test_a_worker_comes_back_in_another_role_over_the_same_parts(world):
    """Another incarnation, other halves, the same weights; and back again."""
    hosted = world.host("d", "d-0")
    await hosted.start()
    parts, seen = hosted._parts, {hosted.worker.incarnation}
    for role in (Role.MIXED, Role.PREFILL, Role.DECODE):
        told = await order(world, "d-0", role)
        incarnations = await roles(world, lambda roles, role=role: roles.get("d-0") is role)
        assert told in seen
        assert incarnations["d-0"] not in seen
        seen |= set(incarnations.values())
        await asyncio.wait_for(asyncio.shield(hosted._following), 10)
        halves = hosted.worker.legs
        assert (halves.prefill is None, halves.decode is None) == (
            role is Role.DECODE,
            role is Role.PREFILL,
        )
        assert hosted.worker._parts.runner is parts.runner
        if role is Role.MIXED:
            sink = Sink()
            hosted.worker.legs.start_leg(make_leg(LegKind.LOCAL), sink)
            assert (await sink.end_of(KEY)).finish_reason is FinishReason.LENGTH
            assert sink.output() == expected_tokens("r", 6)
    assert len(seen) == 4


async def test_a_second_order_at_once_is_refused(world):
    """The worker cannot have said yet that it follows the first."""
    hosted = world.host("m", "m-0")
    await hosted.start()
    told = await order(world, "m-0", Role.PREFILL)
    with pytest.raises(InvalidRequest, match="m-0 drains already"):
        await order(world, "m-0")
    incarnations = await roles(world, lambda roles: roles.get("m-0") is Role.PREFILL)
    assert incarnations["m-0"] != told
    assert not hosted.drained.done()


async def test_orders_are_followed_one_after_another(world):
    """The next control plane does not know what this one passed on; and none is lost."""
    hosted = world.host("m", "m-0")
    await hosted.start()
    for role in (Role.PREFILL, None):
        hosted._ordered(role)
    await roles(world, lambda roles: roles.get("m-0") is Role.PREFILL)
    await asyncio.wait_for(asyncio.shield(hosted.drained), 10)
    await world.reports(lambda reports: not reports)
    assert not hosted.fault.done()


async def test_an_end_comes_before_a_change_of_role(world):
    """SIGTERM while it drains for its new role: it leaves for good."""
    runner, entered, go = blocked_runner()
    hosted = world.host("m", "m-0", runner)
    await hosted.start()
    sink = Sink()
    hosted.worker.legs.start_leg(make_leg(LegKind.LOCAL), sink)
    await asyncio.to_thread(entered.wait, 10)
    await order(world, "m-0", Role.PREFILL)
    await world.reports(lambda reports: reports["m-0"].is_draining)
    ending = asyncio.ensure_future(hosted.end(10.0))
    go.set()
    await ending
    assert sink.ends[KEY].finish_reason is FinishReason.LENGTH
    await world.reports(lambda reports: not reports)
    assert not hosted.fault.done()


async def test_a_role_that_cannot_be_started_is_a_fault(world, monkeypatch):
    """The process ends, and its host starts one in the pool's own role."""
    hosted = world.host("m", "m-0")
    await hosted.start()

    def broken(role):
        raise OSError("no memory")

    monkeypatch.setattr(hosted, "_make", broken)
    await order(world, "m-0", Role.PREFILL)
    error = await asyncio.wait_for(asyncio.shield(hosted.fault), 10)
    assert "no memory" in str(error)


async def test_a_worker_that_hangs_is_not_waited_for(world):
    """CASES P-26: its step never ends, so neither do its legs; its place is wanted."""
    runner, entered, go = blocked_runner()
    hosted = world.host("m", "m-0", runner)
    await hosted.start()
    hosted.worker.legs.start_leg(make_leg(LegKind.LOCAL), Sink())
    await asyncio.to_thread(entered.wait, 10)
    ending = asyncio.ensure_future(hosted.worker.drain(60.0))
    await world.reports(lambda reports: reports["m-0"].is_draining)
    hosted.worker._fail(EngineFault("hangs"))
    await asyncio.wait_for(ending, 10)
    again = asyncio.ensure_future(hosted.end(60.0))
    await asyncio.sleep(0.1)
    go.set()
    await asyncio.wait_for(again, 10)


async def test_a_step_that_outlasts_a_change_of_role_is_a_fault(world, monkeypatch):
    """CASES P-21: it still writes to blocks that the next worker's pool would give to others."""
    monkeypatch.setattr(worker, "_ENGINE_STOP_S", 0.1)
    runner, entered, go = blocked_runner()
    hosted = world.host("m", "m-0", runner)
    hosted._config = dataclasses.replace(
        hosted._config, limits=dataclasses.replace(hosted._config.limits, drain_s=0.2)
    )
    await hosted.start()
    first = hosted.worker
    first.legs.start_leg(make_leg(LegKind.LOCAL), Sink())
    await asyncio.to_thread(entered.wait, 10)
    await order(world, "m-0", Role.DECODE)
    fault = await asyncio.wait_for(asyncio.shield(hosted.fault), 10)
    go.set()
    assert "outlasted" in fault.message
    assert hosted.worker is first
    assert await asyncio.to_thread(first._engine.stop, 10)  # the step has let go in the end
