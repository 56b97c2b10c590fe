"""What the service refuses before any work, and what it makes of a good call."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from cluster.config import DeployConfig, ModelConfig, PoolConfig, Role, from_tree, to_tree
from cluster.control.facts import RefusedWorker
from cluster.control.planner import Planner
from cluster.control.settings import ControlSettings
from cluster.errors import EngineFault, InvalidRequest, NoWorker, PdserveError, QueueFull
from cluster.request import FinishReason
from router.given import ANYBODY, Caller, GenerateInput
from tests.cluster.control.factory import (
    grants,
    make_registration,
    make_report,
    make_want,
    rejects,
)
from tests.router.fakes import (
    FakeCluster,
    assert_conserved,
    make_router,
    make_view,
    make_worker,
    metric,
    speaks,
    until,
)


def make_pair(prefill_blocks, decode_blocks):
    return (
        PoolConfig(name="prefill", role=Role.PREFILL, kv_tokens=16 * prefill_blocks),
        PoolConfig(name="decode", role=Role.DECODE, kv_tokens=16 * decode_blocks),
    )


async def leg_of(cluster, service, **given):
    generation = await service.generate(GenerateInput(**{"prompt": "hello", **given}))
    prefill, _ = await cluster.started("p0", "d0")

    def is_this(leg):
        return leg.key.request_id == generation.request_id

    await until(lambda: any(map(is_this, prefill.legs)))
    return next(filter(is_this, prefill.legs))


async def refusal(service, **given):
    with pytest.raises(PdserveError) as caught:
        await service.generate(GenerateInput(**{"prompt": "hello", **given}))
    assert_conserved(service)
    return caught.value


async def test_absent_values_have_their_documented_meaning():
    cluster = FakeCluster()
    service = make_router(cluster)
    params = (await leg_of(cluster, service)).params
    assert params.max_tokens == 64 - len("hello")  # fills the context
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == ((), (), False)
    other = (await leg_of(cluster, service)).params
    assert params.seed != other.seed
    await service.stop()


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"temperature": 1e-45}, "temperature", 0.0),
        ({"temperature": -0.0}, "temperature", 0.0),
        ({"temperature": 1e-4}, "temperature", 1e-4),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 10**9}, "top_k", 0),
        ({"top_k": 259}, "top_k", 259),
        ({"seed": -1}, "seed", 2**64 - 1),
        ({"stop": "x"}, "stop", ("x",)),
    ],
)
async def test_values_reach_the_workers_in_one_form(given, name, expected):
    """P-03: tiny temperatures are greedy, -1 and above the vocabulary is no top_k."""
    cluster = FakeCluster()
    service = make_router(cluster)
    assert getattr((await leg_of(cluster, service, **given)).params, name) == expected
    await service.stop()


@pytest.mark.parametrize(
    ("blocks", "given", "field"),
    [
        # 2 blocks are 32 tokens of KV; the last token needs none.
        ((4, 2), {"max_tokens": 33 - 5 + 1}, "max_tokens"),
        ((4, 2), {"prompt": "x" * 33, "max_tokens": 2}, "max_tokens"),
        ((4, 2), {"prompt": "x" * 64}, "prompt"),
        ((2, 4), {"prompt": "x" * 33, "max_tokens": 1}, "prompt"),
    ],
)
async def test_what_no_pool_can_hold_is_refused_before_any_work(blocks, given, field):
    cluster = FakeCluster()
    service = make_router(cluster, pools=make_pair(*blocks))
    error = await refusal(service, **given)
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert cluster.route.wants == []


async def test_what_just_fits_is_taken():
    cluster = FakeCluster()
    service = make_router(cluster, pools=make_pair(2, 2))
    assert (await leg_of(cluster, service)).params.max_tokens == 33 - 5
    await leg_of(cluster, service, prompt="x" * 32, max_tokens=1)
    await service.stop()


CAPACITIES = {
    "small pairs": make_pair(2, 2),
    "small prefill": make_pair(2, 3),
    "small decode": make_pair(3, 2),
    "mixed": (PoolConfig(name="both", role=Role.MIXED, kv_tokens=32),),
    "mixed beside pairs": (
        *make_pair(2, 2),
        PoolConfig(name="both", role=Role.MIXED, kv_tokens=48),
    ),
    "mixed for decode": (
        make_pair(2, 2)[0],
        PoolConfig(name="both", role=Role.MIXED, kv_tokens=48),
    ),
    "all of the context": make_pair(8, 8),
}


@pytest.mark.parametrize("pools", CAPACITIES)
async def test_router_and_planner_give_the_same_verdict(pools):
    """What the router lets through is granted, and what is one token more is not by either."""
    config = from_tree(
        to_tree(DeployConfig(pools=CAPACITIES[pools], model=ModelConfig(max_model_len=64)))
    )

    def verdict(want):
        planner = Planner(config, term=1, settings=ControlSettings(reconcile_s=0.0), now=0.0)
        planner.router_joined("a", "a-1", 0.0)
        for pool in config.pools:
            registration = make_registration(pool, max_model_len=64)
            planner.register(registration, 0.0)
            report = make_report(registration)
            planner.report(registration.worker_id, registration.incarnation, report, 0.0)
        return planner.want("a", want, 0.0)

    cluster = FakeCluster()
    cluster.route.default_pair = None
    cluster.route.view = make_view(max_queue_requests=100)
    service = make_router(cluster, pools=config.pools)
    for num_prompt_tokens in (1, 16, 31, 32, 33, 47, 48, 49, 63, 64):
        for max_tokens in (None, 1, 2, 17, 33):
            given = GenerateInput(prompt="x" * num_prompt_tokens, max_tokens=max_tokens)
            cluster.route.wanted.clear()
            try:
                await service.generate(given)
            except InvalidRequest:
                want = make_want(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens or 1)
                assert len(rejects(verdict(want))) == 1, given
            else:
                await cluster.route.wanted.wait()
                want = cluster.route.wants[-1]
                assert len(grants(verdict(want))) == 1, want
                if max_tokens is None:
                    more = replace(want, max_tokens=want.max_tokens + 1)
                    assert len(rejects(verdict(more))) == 1, more
    await service.stop()


async def test_a_prompt_for_a_worker_that_restarts_is_no_mistake():
    """The large decode worker is away: the planner says 503 then, the router not 400."""
    small, big = PoolConfig(name="small", role=Role.DECODE, kv_tokens=16), make_pair(4, 4)
    cluster = FakeCluster()
    cluster.route.view = make_view(
        make_worker("p0", Role.PREFILL), make_worker("d0", Role.DECODE, num_blocks=1)
    )
    cluster.route.error = NoWorker("no decode worker is ready", retry_after_s=2.0)
    service = make_router(cluster, pools=(*big, small))
    generation = await service.generate(GenerateInput(prompt="x" * 40, max_tokens=8))
    with pytest.raises(NoWorker):
        await generation.next()


async def test_a_full_edge_refuses_before_anything_is_read():
    """S-10, P-25: calls that are still being read and requests that run count together."""
    cluster = FakeCluster()
    service = make_router(cluster, max_open_calls=2)
    generation = await service.generate(GenerateInput(prompt="hello"))
    with service.admission():
        with pytest.raises(QueueFull) as caught, service.admission():
            raise AssertionError("read")
        assert caught.value.retry_after_s == 2.0
    with service.admission():
        pass
    generation.cancel()
    await until(lambda: service.dispatcher.num_open == 0)
    assert metric(service, "pdserve_requests_rejected_total") == 1
    assert_conserved(service)
    await service.stop()


async def test_a_bug_at_the_edge_is_a_fault_of_ours_and_counted(monkeypatch, caplog):
    def explode(self, text):
        raise RuntimeError("inside")

    monkeypatch.setattr("router.text.TextCodec.encode", explode)
    service = make_router(FakeCluster())
    error = await refusal(service)
    assert isinstance(error, EngineFault)
    assert "inside" not in error.message
    assert "inside" in caplog.text
    assert metric(service, "pdserve_requests_failed_total") == 1


async def test_overload_is_refused_before_tokenising(monkeypatch):
    def explode(self, text):
        raise AssertionError("tokenised")

    monkeypatch.setattr("router.text.TextCodec.encode", explode)
    cluster = FakeCluster()
    service = make_router(cluster)
    cluster.route.view = make_view(num_waiting=8)
    error = await refusal(service)
    assert isinstance(error, QueueFull)
    assert error.retry_after_s == 2.0

    cluster.route.view = make_view(workers=())
    error = await refusal(service)
    assert isinstance(error, NoWorker)
    assert "no prefill and no decode worker" in error.message

    cluster.route.view, cluster.route.age_s = make_view(), 16.0
    error = await refusal(service)
    assert isinstance(error, NoWorker)
    assert "control plane" in error.message

    # A mistake is a mistake, overloaded or not; a text that can't fit is not tokenised either.
    assert isinstance(await refusal(service, temperature=5), InvalidRequest)
    assert isinstance(await refusal(service, prompt="x" * 400), InvalidRequest)
    assert metric(service, "pdserve_requests_rejected_total") == 5


async def test_a_client_is_told_why_a_role_has_no_worker():
    """P-22: role, field and both values; no worker's name."""
    cluster = FakeCluster()
    reason = "layout.num_layers: 2 at the other workers, 3 at this one"
    refused = RefusedWorker(worker_id="d0", pool="decode", role="decode", reason=reason, age_s=1.0)
    prefill = make_worker("p0", Role.PREFILL)
    cluster.route.view = make_view(prefill, refused=(refused,))
    error = await refusal(make_router(cluster))
    assert isinstance(error, NoWorker)
    assert error.message == f"not ready: no decode worker: one was refused, {reason}"


async def test_a_control_plane_that_has_just_started_is_waited_for():
    """Its workers are coming back: requests wait there, and readiness does not claim too much."""
    cluster = FakeCluster()
    cluster.route.view = replace(make_view(), workers=(), is_reconciling=True)
    service = make_router(cluster)
    assert not service.readiness().is_ready
    generation = await service.generate(GenerateInput(prompt="hi"))
    generation.cancel()
    await service.stop()


async def test_a_router_that_has_just_started_lets_requests_wait_for_the_control_plane():
    """CASES P-27: its doors are open before it has heard anything; half of all calls come to it."""
    cluster = FakeCluster()
    cluster.route.view = None
    cluster.route.default_pair = None
    service = make_router(cluster)
    assert not service.readiness().is_ready
    generation = await service.generate(GenerateInput(prompt="hi"))
    await cluster.route.wanted.wait()
    generation.cancel()
    await until(lambda: service.dispatcher.num_open == 0)
    cluster.route.is_away_for_long = True
    error = await refusal(service)
    assert isinstance(error, NoWorker)
    assert "control plane" in error.message
    await service.stop()


async def test_no_prompt_text_in_logs(caplog):
    """S-17 in part: neither prompts nor answers are logged."""
    caplog.set_level(logging.DEBUG)
    cluster = FakeCluster()
    cluster.script = speaks([*b"answertext"], FinishReason.STOP)
    service = make_router(cluster)
    generation = await service.generate(GenerateInput(prompt="promptmarker"))
    while not hasattr(await generation.next(), "finish_reason"):
        pass
    await refusal(service, prompt="promptmarker", stop=["stopmarker"] * 9)
    assert generation.request_id in caplog.text
    assert "marker" not in caplog.text
    assert "answertext" not in caplog.text
    await service.stop()


async def test_a_request_has_its_tenants_tier_unless_it_names_one():
    """The tier goes with the want; one that there is not, or above the ceiling, gets 400."""
    cluster = FakeCluster()
    cluster.route.default_pair = None
    service = make_router(cluster)
    plain, bound = ANYBODY, Caller("acme", "key-0", "low", "normal")
    for caller, priority, tier in (
        (plain, None, "normal"),
        (plain, 0, "normal"),
        (plain, "high", "high"),
        (bound, None, "low"),
        (bound, "normal", "normal"),
    ):
        cluster.route.wanted.clear()
        given = GenerateInput(prompt="hello", priority=priority, expected_tokens=9)
        await service.generate(given, caller)
        await cluster.route.wanted.wait()
        want = cluster.route.wants[-1]
        assert (want.priority, want.tenant, want.expected_tokens) == (tier, caller.tenant, 9)
    for caller, priority in ((plain, "gold"), (bound, "high")):
        with pytest.raises(InvalidRequest) as caught:
            await service.generate(GenerateInput(prompt="hello", priority=priority), caller)
        assert (caught.value.field, caught.value.http_status) == ("priority", 400)
    await service.stop()
