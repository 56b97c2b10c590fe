"""What the service refuses before any work, and what it makes of a good call."""

from __future__ import annotations

import logging

import pytest

from cluster.config import Role
from cluster.errors import InvalidRequest, NoWorker, PdserveError, QueueFull
from cluster.request import FinishReason
from router.given import GenerateInput
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
    return make_view(
        make_worker("p0", Role.PREFILL, num_blocks=prefill_blocks),
        make_worker("d0", Role.DECODE, num_blocks=decode_blocks),
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
        ((4, 2), {"prompt": "x" * 33}, "prompt"),
        ((2, 4), {"prompt": "x" * 33, "max_tokens": 1}, "prompt"),
    ],
)
async def test_what_no_pool_can_hold_is_refused_before_any_work(blocks, given, field):
    cluster = FakeCluster()
    cluster.route.view = make_pair(*blocks)
    service = make_router(cluster)
    error = await refusal(service, **given)
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert cluster.route.wants == []


async def test_what_just_fits_is_taken():
    cluster = FakeCluster()
    cluster.route.view = make_pair(2, 2)
    service = make_router(cluster)
    assert (await leg_of(cluster, service)).params.max_tokens == 33 - 5
    await leg_of(cluster, service, prompt="x" * 32, max_tokens=1)
    await service.stop()


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

    cluster.route.view, cluster.route.age_s = make_view(), 11.0
    error = await refusal(service)
    assert isinstance(error, NoWorker)
    assert "control plane" in error.message

    # A mistake is a mistake, overloaded or not; a text that can't fit is not tokenised either.
    assert isinstance(await refusal(service, temperature=5), InvalidRequest)
    assert isinstance(await refusal(service, prompt="x" * 400), InvalidRequest)
    assert metric(service, "pdserve_requests_rejected_total") == 5


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
