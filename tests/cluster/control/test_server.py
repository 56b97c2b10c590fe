"""Routers, workers and the control plane over real gRPC on loopback."""

import asyncio
import contextlib
import dataclasses
import socket
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.clock import SystemClock
from cluster.control.facts import Health
from cluster.control.membership import LEFT_FOR_FAULT
from cluster.control.server import SERVICE_NAME, ControlServer
from cluster.control.status import get_cluster
from cluster.errors import (
    Cancelled,
    ClusterFull,
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    NoWorker,
    StartupError,
)
from cluster.wire import control_pb2 as pb
from cluster.wire.control_pb2_grpc import ControlStub
from tests.cluster.control.conftest import QUICK, FakeWorker, Router, until
from tests.cluster.control.factory import make_config, make_registration, make_want, two_pools


async def test_a_want_is_granted_and_given_back(cluster):
    await cluster.start(*two_pools(slots=1))
    prefill, decode = await cluster.workers()
    router = await cluster.router()
    first = await router.client.want(make_want("r1"))
    assert first.prefill.peer.address == prefill.registration.address
    assert first.decode.peer.incarnation == decode.registration.incarnation
    decode.hold(first.grant_id)
    second = asyncio.create_task(router.client.want(make_want("r2")))
    await until(lambda: router.client.view.num_waiting == 1)
    router.client.done(first.grant_id, 16)
    decode.hold()
    assert (await second).request_id == "r2"
    assert router.client.view_age_s(SystemClock().now()) < 5.0


async def test_a_want_that_cannot_be_is_told_why(cluster):
    await cluster.start()
    await cluster.workers()
    router = await cluster.router()
    with pytest.raises(InvalidRequest) as caught:
        await router.client.want(make_want(num_prompt_tokens=5000))
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        await router.client.want(make_want(num_prompt_tokens=0))
    assert caught.value.field == "num_prompt_tokens"


@pytest.mark.parametrize("what", ["views", "door", "time"])
async def test_a_control_plane_that_stands_still_is_not_well(what, monkeypatch):
    """CASES P-26: whoever hosts it starts another."""

    def fail(self):
        raise RuntimeError("a bug")

    control = ControlServer(make_config(), SystemClock(), settings=QUICK)
    with pytest.raises(EngineFault):
        control.check_health()
    await control.start("127.0.0.1", 0)
    control.check_health()
    if what == "views":
        monkeypatch.setattr("cluster.control.desk.Desk.push_view", fail)
        await until(lambda: control._tasks[1].done())
    elif what == "time":
        monkeypatch.setattr("cluster.control.desk.Desk.tick", fail)
        monkeypatch.setattr("cluster.control.server._FAILING_S", 0.1)
        await until(lambda: control._is_failing)
    else:
        await control.stop()
    with pytest.raises(EngineFault):
        control.check_health()
    await control.stop()


class HeldClock:
    """Stands still, but for what the test lets pass."""

    def __init__(self):
        self.at = 1000.0

    def now(self):
        return self.at


async def test_ticks_that_fail_are_told_until_one_is_done_again(monkeypatch):
    """CASES P-26: nobody is judged dead meanwhile. A process that was stopped has missed none."""
    clock, is_broken, num_ticks = HeldClock(), True, 0
    settings = dataclasses.replace(QUICK, gap_s=1.0)

    def tick(self):
        nonlocal num_ticks
        num_ticks += 1
        if is_broken:
            raise RuntimeError("a bug")

    async def let_pass(seconds):
        clock.at += seconds
        seen = num_ticks
        await until(lambda: num_ticks > seen + 1)

    monkeypatch.setattr("cluster.control.desk.Desk.tick", tick)
    control = ControlServer(make_config(), clock, settings=settings)
    address = await control.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def is_serving():
            answer = await health.Check(health_pb2.HealthCheckRequest())
            return answer.status == health_pb2.HealthCheckResponse.SERVING

        await let_pass(60.0)
        control.check_health()
        assert await is_serving(), "it was stopped, and has failed for a moment"
        for _ in range(3):
            await let_pass(0.9)
        with pytest.raises(EngineFault, match="ticks have failed for"):
            control.check_health()
        assert not await is_serving()
        is_broken = False
        await let_pass(0.1)
        control.check_health()
        assert await is_serving()
    await control.stop()


async def test_no_worker_is_told_after_the_window(cluster):
    await cluster.start()
    router = await cluster.router()
    with pytest.raises(NoWorker) as caught:
        await router.client.want(make_want())
    assert caught.value.retry_after_s > 0


async def test_a_deadline_ends_the_wait(cluster):
    await cluster.start(*two_pools(slots=1))
    await cluster.workers()
    router = await cluster.router()
    await router.client.want(make_want("r1"))
    with pytest.raises(DeadlineExceeded):
        await router.client.want(make_want("r2", remaining_s=0.1))
    await until(lambda: router.client.view.num_waiting == 0)


async def test_cancelling_the_caller_withdraws_the_want(cluster):
    await cluster.start(*two_pools(slots=1))
    await cluster.workers()
    router = await cluster.router()
    first = await router.client.want(make_want("r1"))
    gone = asyncio.create_task(router.client.want(make_want("r2")))
    await until(lambda: router.client.view.num_waiting == 1)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    router.client.done(first.grant_id, 0)
    third = await router.client.want(make_want("r3"))
    assert third.request_id == "r3"


async def test_grants_that_cross_a_cancel_are_given_back(cluster):
    """Cancels at every moment of a want's life leave nothing granted."""
    # No timer takes anything back in the routers' stead.
    patient = dataclasses.replace(QUICK, unseen_grant_s=60.0, orphan_s=60.0)
    await cluster.start(*two_pools(slots=4), settings=patient)
    await cluster.workers()
    router = await cluster.router()
    for index in range(40):
        task = asyncio.create_task(router.client.want(make_want(f"r{index}")))
        for _ in range(index % 20):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            router.client.done((await task).grant_id, 0)
    last = await router.client.want(make_want("last"))
    router.client.done(last.grant_id, 0)

    async def is_settled():
        view = await get_cluster(cluster.address, 5.0)
        return (view.num_waiting, view.num_granted) == (0, 0)

    async with asyncio.timeout(20.0):
        while not await is_settled():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_control_plane_that_dies_under_waiting_wants(cluster):
    """Both routers' wants are sent again, the workers register again, FCFS holds across it."""
    await cluster.start(*two_pools(slots=1))
    prefill, decode = await cluster.workers()
    routers = [await cluster.router("a"), await cluster.router("b")]
    first = await routers[0].client.want(make_want("r1"))
    decode.hold(first.grant_id)
    waits = []
    for index, router in enumerate(routers):
        waits.append(asyncio.create_task(router.client.want(make_want(f"w{index}"))))
        await until(lambda n=index + 1: routers[0].client.view.num_waiting == n)
    term = cluster.server.term
    await cluster.server.stop(0.0)
    await until(lambda: not any(router.client.is_connected for router in routers))
    router_done_while_away = routers[0].client.done
    await cluster.restart()
    assert cluster.server.term > term
    await until(lambda: all(router.client.is_connected for router in routers))
    await until(lambda: prefill.client.is_connected and decode.client.is_connected)
    await until(lambda: routers[0].client.view.num_waiting == 2)
    router_done_while_away(first.grant_id, 3)
    decode.hold()
    second = await waits[0]
    assert (second.request_id, second.term) == ("w0", cluster.server.term)
    assert not waits[1].done()
    routers[0].client.done(second.grant_id, 1)
    assert (await waits[1]).request_id == "w1"


async def test_a_done_while_the_control_plane_is_away_is_not_forgotten(cluster):
    await cluster.start()
    await cluster.workers()
    router = await cluster.router()
    grant = await router.client.want(make_want())
    await cluster.server.stop(0.0)
    await until(lambda: not router.client.is_connected)
    router.client.done(grant.grant_id, 4)
    assert len(router.client._unsent_dones) == 1
    await cluster.restart()
    await until(lambda: router.client.is_connected)
    assert router.client._unsent_dones == []


async def test_a_control_plane_that_stays_away_is_told_as_no_worker(cluster):
    await cluster.start()
    router = await cluster.router(unreachable_after_s=0.2)
    waiting = asyncio.create_task(router.client.want(make_want("r1")))
    await cluster.server.stop(0.0)
    with pytest.raises(NoWorker):
        await waiting
    with pytest.raises(NoWorker):
        await router.client.want(make_want("r2"))
    with pytest.raises(NoWorker):
        await router.client.cancel_request("r1", 1.0)


async def test_the_window_begins_once_somebody_can_come_back():
    """CASES P-27: in an update a control plane may have to wait for its predecessor's port."""
    clock = HeldClock()
    control = ControlServer(make_config(), clock, settings=QUICK)
    with socket.socket() as predecessor:
        predecessor.bind(("127.0.0.1", 0))
        predecessor.listen()
        port = predecessor.getsockname()[1]
        starting = asyncio.create_task(control.start("127.0.0.1", port, bind_timeout_s=60.0))
        await asyncio.sleep(0)
        clock.at += 2 * QUICK.reconcile_s
    address = await starting
    assert (await get_cluster(address, 5.0)).is_reconciling
    clock.at += 2 * QUICK.reconcile_s
    assert not (await get_cluster(address, 5.0)).is_reconciling
    await control.stop()


async def test_a_router_that_starts_first_knows_that_a_view_may_come(cluster):
    """CASES P-27: in an update it may be up before the control plane is."""
    # Its workers come back while nobody is refused yet.
    await cluster.start(*two_pools(slots=1), settings=dataclasses.replace(QUICK, reconcile_s=30.0))
    await cluster.server.stop(0.0)
    early = await cluster.router("early", is_early=True)
    waiting = asyncio.create_task(early.client.want(make_want("r1")))
    late = await cluster.router("late", is_early=True, unreachable_after_s=0.0)
    await until(lambda: not late.client.awaits_first_view)
    assert early.client.awaits_first_view
    await cluster.restart()
    await cluster.workers()
    assert (await waiting).request_id == "r1"
    await until(lambda: not early.client.awaits_first_view)


async def test_what_waited_for_a_first_view_may_find_the_queue_full(cluster):
    """CASES P-25, P-27: it was let in by nobody yet, and a whole router full of it may come."""
    await cluster.start(*two_pools(slots=1), max_queue_requests=2)
    _, decode = await cluster.workers()
    router = await cluster.router("first")
    decode.hold((await router.client.want(make_want("runs"))).grant_id)
    waits = [asyncio.create_task(router.client.want(make_want(f"w{i}"))) for i in range(2)]
    view = lambda: router.client.view  # noqa: E731
    await until(lambda: view().num_waiting == 2 and not view().is_reconciling)
    late = Router(cluster.address, "late")
    early = [asyncio.create_task(late.client.want(make_want(f"e{i}"))) for i in range(3)]
    await asyncio.sleep(0)
    await late.client.start()
    answers = await asyncio.gather(*early, return_exceptions=True)
    await late.client.stop()
    assert all(isinstance(answer, ClusterFull) for answer in answers), answers
    assert all(answer.retry_after_s >= 1.0 for answer in answers)
    assert not any(each.done() for each in waits)
    for each in waits:
        each.cancel()


async def test_a_stopping_router_ends_its_waits(cluster):
    await cluster.start()
    router = await cluster.router()
    waiting = asyncio.create_task(router.client.want(make_want("r1")))
    await asyncio.sleep(0)
    await router.client.stop()
    with pytest.raises(Cancelled):
        await waiting


@pytest.mark.parametrize("owner", ["b", None])
async def test_a_cancel_reaches_every_other_router(cluster, owner):
    await cluster.start()
    routers = {name: await cluster.router(name) for name in ("a", "b", "c")}
    if owner is not None:
        routers[owner].running.add("r1")
    assert await routers["a"].client.cancel_request("r1", 5.0) is (owner is not None)
    assert routers["a"].asked == []
    await until(lambda: routers["b"].asked == routers["c"].asked == ["r1"])


async def test_a_cancel_is_answered_when_there_is_nobody_to_ask(cluster):
    await cluster.start()
    router = await cluster.router()
    assert await router.client.cancel_request("r1", 5.0) is False


async def test_a_lost_router_frees_its_wants_and_grants(cluster):
    await cluster.start(*two_pools(slots=1))
    await cluster.workers()
    lost, other = await cluster.router("a"), await cluster.router("b")
    await lost.client.want(make_want("r1"))
    waits = [
        asyncio.create_task(r.client.want(make_want(n))) for r, n in ((lost, "r2"), (other, "r3"))
    ]
    await until(lambda: other.client.view.num_waiting == 2)
    await lost.client.stop()
    with pytest.raises(Cancelled):
        await waits[0]
    assert (await waits[1]).request_id == "r3"
    await until(lambda: other.client.view.num_granted == 1)
    assert other.client.view.num_routers == 1


async def test_a_worker_that_vanishes_is_told_to_every_router(cluster):
    await cluster.start()
    _, decode = await cluster.workers()
    routers = [await cluster.router("a"), await cluster.router("b")]
    await routers[0].client.want(make_want("r1"))
    await decode.client._stream.stop(0.0)
    incarnation = decode.registration.incarnation
    await until(lambda: all(router.dead == [incarnation] for router in routers))
    with pytest.raises(NoWorker):
        await routers[0].client.want(make_want("r2"))


async def test_a_worker_that_leaves_is_gone_at_once(cluster):
    await cluster.start()
    _, decode = await cluster.workers()
    router = await cluster.router()
    await decode.client.stop("drained")
    with pytest.raises(NoWorker):
        await router.client.want(make_want())
    assert router.dead == [], "its legs run on"


async def test_a_worker_that_leaves_for_a_fault_is_dead(cluster):
    await cluster.start()
    _, decode = await cluster.workers()
    router = await cluster.router()
    await decode.client.stop(LEFT_FOR_FAULT)
    await until(lambda: router.dead == [decode.registration.incarnation])


async def test_a_restarted_worker_replaces_itself_and_the_old_one_is_refused(cluster):
    await cluster.start()
    _, old = await cluster.workers()
    router = await cluster.router()
    await cluster.worker("decode", incarnation="second")
    await until(lambda: router.dead == [old.registration.incarnation])
    error = await asyncio.wait_for(old.client.refused, 10.0)
    assert "replaced" in str(error)
    assert (await router.client.want(make_want())).decode.incarnation == "second"


async def test_a_worker_that_does_not_fit_is_refused_with_both_values(cluster):
    await cluster.start()
    registration = make_registration(cluster.config.pool("decode"), num_blocks=9)
    worker = FakeWorker(cluster.address, registration)
    await worker.client.start()
    with pytest.raises(StartupError, match="num_blocks: 64 in the deploy file, 9 at the worker"):
        await worker.client.accepted
    assert worker.num_reports == 0
    await worker.client.stop("refused")


async def test_a_silent_worker_comes_back_after_it_was_declared_dead(cluster):
    await cluster.start()
    _, decode = await cluster.workers()
    router = await cluster.router()
    decode.client._is_connected = False  # it is silent, its stream is not broken
    await until(lambda: router.dead == [decode.registration.incarnation])
    await until(lambda: decode.client.is_connected)
    assert (await router.client.want(make_want())).decode.worker_id == "decode-0"


async def test_legs_that_a_router_is_done_with_are_aborted(cluster):
    await cluster.start()
    _, decode = await cluster.workers()
    router = await cluster.router()
    grant = await router.client.want(make_want())
    decode.hold(grant.grant_id)
    await until(
        lambda: any(grant.grant_id in v.report.held_grants for v in router.client.view.workers)
    )
    router.client.done(grant.grant_id, 1)
    await until(lambda: grant.grant_id in decode.aborted)


async def test_status_shows_the_cluster(cluster):
    await cluster.start()
    _, decode = await cluster.workers()
    await cluster.router()
    await until(lambda: decode.num_reports > 0)
    view = await get_cluster(cluster.address, 5.0)
    assert [worker.worker.worker_id for worker in view.workers] == ["decode-0", "prefill-0"]
    assert view.num_routers == 1
    assert view.max_queue_requests == cluster.config.scheduling.max_queue_requests
    assert view.workers[0].health in (Health.ALIVE, Health.SUSPECTED)
    await cluster.server.stop()
    with pytest.raises(NoWorker):
        await get_cluster(cluster.address, 1.0)


async def test_watch_sends_the_view_when_it_changes(cluster):
    await cluster.start()
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        views = ControlStub(channel).WatchCluster(pb.GetClusterRequest())
        assert len((await views.read()).workers) == 0
        await cluster.worker("decode")
        while not (view := await views.read()).workers:
            pass
        assert view.workers[0].worker.worker_id == "decode-0"
        views.cancel()


async def test_reports_carry_counters(cluster):
    """P-29: each worker's counters reach whoever exports them."""
    await cluster.start()
    worker = await cluster.worker("decode")
    router = await cluster.router()
    await until(lambda: router.client.view.workers)
    first = router.client.view.workers[0].report.counters["reports_total"]
    worker.client.changed()
    await until(lambda: router.client.view.workers[0].report.counters["reports_total"] > first)


async def test_health_and_reflection_answer(cluster):
    await cluster.start()
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE_NAME):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = [s.name for s in (await call.read()).list_services_response.service]
        assert SERVICE_NAME in names
        call.cancel()


@pytest.mark.parametrize("method", ["Route", "Report"])
async def test_a_stream_that_does_not_say_hello_is_refused(cluster, method):
    await cluster.start()
    first = pb.RouterFact(done=pb.Done()) if method == "Route" else pb.WorkerFact(leave=pb.Leave())
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        call = getattr(ControlStub(channel), method)(iter([first]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_taken_port_is_told(cluster):
    await cluster.start()
    port = int(cluster.address.rpartition(":")[2])
    second = ControlServer(cluster.config, SystemClock())
    with pytest.raises(StartupError, match="cannot listen"):
        await second.start("127.0.0.1", port, bind_timeout_s=0.0)


def test_the_control_room_loads_no_torch():
    code = (
        "import sys, pkgutil, importlib, cluster.control as room\n"
        "for m in pkgutil.iter_modules(room.__path__):\n"
        "    importlib.import_module('cluster.control.' + m.name)\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
