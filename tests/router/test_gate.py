"""What a router refuses by its last view and by what it has let in since, before it tokenises."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from dataclasses import replace

import pytest

from cluster.config import Policy, SchedulingConfig
from cluster.control.overload import MAX_TENANTS_SHOWN
from cluster.errors import ClusterFull, QueueFull
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from router.given import Caller, GenerateInput
from router.service import Door
from tests.router.doors import JSON, open_doors
from tests.router.fakes import (
    FakeCluster,
    assert_conserved,
    make_router,
    make_view,
    metric,
    until,
)

HELLO = GenerateInput(prompt="hello", max_tokens=4)


@contextlib.asynccontextmanager
async def waiting_router(**options):
    """A router whose requests all wait, for the view that a test sets."""
    cluster = FakeCluster()
    cluster.route.default_pair = None
    service = make_router(cluster, **options)
    yield cluster, service
    await service.stop()
    assert_conserved(service)


async def fill(service, count, given=HELLO):
    before = metric(service, "pdserve_requests_queued")
    for number in range(1, count + 1):
        await service.generate(given)
        await until(lambda now=before + number: metric(service, "pdserve_requests_queued") == now)


async def refused(service, given=HELLO, **caller):
    with pytest.raises(QueueFull) as caught:
        await service.generate(given, Caller(**caller))
    return caught.value


def never_tokenise(monkeypatch):
    def explode(self, text):
        raise AssertionError("tokenised")

    monkeypatch.setattr("router.text.TextCodec.encode", explode)


async def test_a_burst_between_two_views_is_counted_here(monkeypatch):
    """P-25: eight may wait, and four slots are free; the view still says that nobody waits."""
    async with waiting_router() as (_, service):
        await fill(service, 12)
        never_tokenise(monkeypatch)
        assert isinstance(await refused(service), ClusterFull)


async def test_calls_that_are_being_checked_take_their_place_in_the_queue():
    """P-25: of many at once the surplus is refused before it is read; whoever leaves makes room."""
    async with waiting_router() as (cluster, service):
        cluster.route.view = make_view(num_waiting=1, max_queue_requests=3)
        with contextlib.ExitStack() as entering:
            entering.enter_context(service.admission())
            with service.admission():
                with pytest.raises(QueueFull), service.admission():
                    pass
                await service.generate(HELLO)
            await until(lambda: metric(service, "pdserve_requests_queued") == 1)
            with pytest.raises(QueueFull), service.admission():
                pass
        with service.admission():
            pass


async def test_a_refused_call_leaves_nothing_for_the_garbage_collector():
    """P-25: after a thousand of them it would stop the loop, and those that wait to be refused."""

    async with waiting_router() as (_, service):
        await fill(service, 12)
        for ask in (read, ask_whole):
            gc.collect()
            gc.disable()
            try:
                error = await ask(service)
                assert error() is None, ask.__name__
            finally:
                gc.enable()


async def read(service):
    try:
        with service.reading(Caller(), generates=True):
            raise AssertionError("read")
    except QueueFull as error:
        return weakref.ref(error)


async def ask_whole(service):
    try:
        await service.generate(HELLO)
    except QueueFull as error:
        return weakref.ref(error)


async def test_what_waits_at_other_routers_counts_with_the_next_view():
    async with waiting_router() as (cluster, service):
        await fill(service, 2)
        cluster.route.view = make_view(num_waiting=5)
        await fill(service, 3)
        assert isinstance(await refused(service), ClusterFull)
        cluster.route.view = make_view(num_waiting=5)
        await fill(service, 3)
        await refused(service)


async def test_who_would_wait_past_its_deadline_is_told_so(monkeypatch):
    """Four wait, half a second each: two seconds."""
    async with waiting_router() as (cluster, service):
        cluster.route.view = make_view(num_waiting=4)
        await fill(service, 1, GenerateInput(prompt="hello", max_tokens=4, timeout_s=2.5))
        never_tokenise(monkeypatch)
        error = await refused(service, GenerateInput(prompt="hello", timeout_s=0.5))
        assert isinstance(error, ClusterFull)
        assert error.retry_after_s == pytest.approx(2.0), "a fifth is there by now"


async def test_a_caller_with_its_share_is_told_429_and_others_are_let_in():
    async with waiting_router() as (cluster, service):
        cluster.route.view = make_view(
            num_waiting=4, waiting_tenants={"many": 4}, tenant_queue_share=0.5
        )
        error = await refused(service, tenant="many", key="key-0")
        assert (error.http_status, error.retry_after_s) == (429, 1.0)
        await service.generate(HELLO, Caller("few", "key-1"))


async def test_the_length_of_a_text_tells_how_many_tokens_will_wait(monkeypatch):
    """A byte is a token here; until that was seen, four are taken for one."""
    async with waiting_router() as (cluster, service):
        cluster.route.view = make_view(num_waiting=1, waiting_tokens=80, max_queue_tokens=100)
        text = GenerateInput(prompt="x" * 44, max_tokens=1)
        await fill(service, 5, text)
        cluster.route.view = make_view(num_waiting=1, waiting_tokens=80, max_queue_tokens=100)
        never_tokenise(monkeypatch)
        assert isinstance(await refused(service, text), ClusterFull)
        ids = GenerateInput(prompt=[1] * 21, max_tokens=1)
        assert isinstance(await refused(service, ids), ClusterFull)
        await service.generate(GenerateInput(prompt=[1] * 20, max_tokens=1))


async def test_only_those_ahead_of_its_tier_are_waited_for():
    tiered = SchedulingConfig(policy=Policy.PRIORITY)
    door = Door(tiers=Tiers.of(tiered), ordering=Ordering.of(tiered))
    async with waiting_router(door=door) as (cluster, service):
        view = make_view(num_waiting=6, waiting_standings={0: 1, 1: 2, 2: 3})
        cluster.route.view = view
        for tier, timeout_s in (("low", 2.0), ("normal", 1.0), ("high", 0.4)):
            given = GenerateInput(prompt="hello", priority=tier, timeout_s=timeout_s)
            assert isinstance(await refused(service, given), ClusterFull)
        for tier, timeout_s in (("normal", 1.6), ("high", 0.6)):
            await service.generate(
                GenerateInput(prompt="hello", priority=tier, timeout_s=timeout_s)
            )


async def test_by_work_only_what_it_will_take_at_least_is_waited_for():
    """Of a long prompt all may be cached, and its tenant's outputs may be short: only the control
    plane knows. What a client expects both know, and never more of it than it asks for."""
    by_work = SchedulingConfig(policy=Policy.SJF)
    door = Door(tiers=Tiers.of(by_work), ordering=Ordering.of(by_work))
    asks = GenerateInput(prompt=[1] * 24, max_tokens=30, timeout_s=1.0)
    # Half a second for each of eight who are of 8 to 15 tokens.
    waits = {"num_waiting": 8, "waiting_standings": {4: 8}}
    async with waiting_router(door=door) as (cluster, service):
        cluster.route.view = make_view(max_queue_requests=20, **waits)
        await fill(service, 1, asks)
        await fill(service, 1, replace(asks, expected_tokens=4))
        await fill(service, 1, replace(asks, expected_tokens=30, max_tokens=4))
        error = await refused(service, replace(asks, expected_tokens=30))
        assert "to wait" in error.message
        cluster.route.view = make_view(max_queue_requests=8, **waits)
        error = await refused(service, replace(asks, expected_tokens=30, timeout_s=9.0))
        assert "at most" in error.message
        small = replace(asks, prompt=[1] * 3, expected_tokens=2)
        await fill(service, 1, small)
        error = await refused(service, small)
        assert "at most" in error.message, "of those who are the first there is a surplus of one"


@pytest.mark.parametrize("most", [{"max_tokens": 30}, {"max_tokens": None}])
async def test_by_work_the_bounds_hold_for_whoever_only_may_be_the_first(most, monkeypatch):
    """P-25: nothing of it need be cached, and it may have all the output that it asks for."""
    by_work = SchedulingConfig(policy=Policy.SJF)
    door = Door(tiers=Tiers.of(by_work), ordering=Ordering.of(by_work))
    asks = GenerateInput(prompt=[1] * 2, **most)
    async with waiting_router(door=door) as (cluster, service):
        waits = {"num_waiting": 1, "waiting_standings": {4: 1}}
        cluster.route.view = make_view(waiting_tokens=99, max_queue_tokens=100, **waits)
        await fill(service, 1, replace(asks, expected_tokens=2))
        never_tokenise(monkeypatch)
        assert "prompt tokens wait" in (await refused(service, asks)).message
        waits["num_waiting"] = 8
        cluster.route.view = make_view(**waits)
        assert "requests wait" in (await refused(service, asks)).message


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("kind", "status"), [(ClusterFull, 503), (QueueFull, 429)])
async def test_a_call_that_the_control_plane_refuses_is_told_when_to_come_back(
    kind, status, is_streamed
):
    """P-25: also one that was taken before anything was known of the queue."""
    async with waiting_router() as (cluster, service), open_doors(service) as doors:
        cluster.route.view = None
        cluster.route.error = kind("full", stage="queue", retry_after_s=3.0)
        response = await doors.post({"prompt": "hi", "stream": is_streamed})
        assert (response.status_code, response.headers["retry-after"]) == (status, "3")


async def test_a_queue_full_of_lower_tiers_lets_in_the_first_of_a_higher_one():
    """P-25: before it is read, too; a burst of them between two views fills the surplus only."""
    tiered = SchedulingConfig(policy=Policy.PRIORITY)
    door = Door(tiers=Tiers.of(tiered), ordering=Ordering.of(tiered))
    high = GenerateInput(prompt="hello", max_tokens=4, priority="high")
    async with waiting_router(door=door) as (cluster, service):
        cluster.route.view = make_view(
            num_waiting=20, max_queue_requests=20, waiting_standings={2: 20}
        )
        with service.admission():
            assert isinstance(await refused(service, replace(high, priority="low")), ClusterFull)
        with service.admission():
            await fill(service, 2, high)
        assert isinstance(await refused(service, high), ClusterFull)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_full_queue_refuses_a_call_whose_body_was_not_read(path):
    """P-25: the body may be of any size, or no JSON at all; the answer says when to come back."""
    async with waiting_router() as (cluster, service), open_doors(service) as doors:
        cluster.route.view = make_view(num_waiting=8)
        seconds = []
        for _ in range(9):
            began = time.thread_time()
            response = await doors.http.post(path, content=b"[" * 10_000, headers=JSON)
            seconds.append(time.thread_time() - began)
        assert sorted(seconds)[4] < 0.05, "of this thread, its client included"
        assert response.status_code == 503
        assert response.headers["retry-after"] == "2"
        assert response.json()["error"]["code"] == "cluster_full"
        assert metric(service, 'pdserve_requests_rejected_total{code="cluster_full"}') == 9


def test_a_view_names_a_bounded_number_of_tenants():
    assert MAX_TENANTS_SHOWN <= 64
