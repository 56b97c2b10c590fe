"""What a router tells the control plane of a prompt, and a client of what was cached."""

from __future__ import annotations

import dataclasses
import secrets

import pytest

from cluster.lifetime import LegTimes
from cluster.request import NO_PREFIX, FinishReason, LegKind
from router.given import Caller, GenerateInput
from router.prefix import PrefixNames
from tests.router.doors import open_doors
from tests.router.fakes import EOS_ID, POOLS, FakeCluster, make_router

TEXT = "a prompt of forty-one bytes, more or less"


def naming(cluster):
    """A router whose control plane has told it a key."""
    cluster.route.prefix_key = secrets.token_bytes(32)
    service = make_router(cluster)
    parts = service.dispatcher._parts
    named = dataclasses.replace(parts, prefixes=PrefixNames("tiny", POOLS))
    service.dispatcher._parts = named
    return service


async def prefix_of(cluster, service, tenant, **given):
    cluster.route.wanted.clear()
    call = await service.generate(GenerateInput(**{"prompt": TEXT, **given}), Caller(tenant, "k"))
    await cluster.route.wanted.wait()
    call.cancel()
    return cluster.route.wants[-1].prefix


async def test_a_want_names_the_beginnings_of_its_prompt_for_its_tenant():
    """P-18, S-12: sampling does not split what is named, the tenant does."""
    cluster = FakeCluster()
    cluster.route.default_pair = None
    service = naming(cluster)
    own = await prefix_of(cluster, service, "a")
    assert (own.stride_tokens, len(own.names)) == (16, 2)
    assert await prefix_of(cluster, service, "a", temperature=0.5, seed=7, user="b") == own
    assert not set((await prefix_of(cluster, service, "b")).names) & set(own.names)
    scored = await prefix_of(cluster, service, "a", echo=True, logprobs=1)
    assert scored == NO_PREFIX, "every position is computed"
    await service.stop()


@pytest.mark.parametrize("kind", [LegKind.PREFILL, LegKind.LOCAL])
async def test_usage_tells_the_cached_tokens_of_each_prompt_once(kind):
    """P-18: by both doors; of a prompt's choices the first one's count."""
    cluster = FakeCluster()
    cluster.route.default_pair = ("p0", "d0") if kind is LegKind.PREFILL else (None, "d0")

    def script(worker, leg):
        if leg.kind is LegKind.DECODE:
            worker.say(*b"ok", EOS_ID, key=leg.key, finish=FinishReason.STOP, ends=True)
            return
        times = LegTimes(num_cached_tokens=32 if leg.key.request_id.count("-") == 0 else 16)
        if leg.kind is LegKind.PREFILL:
            worker.say(*b"o", key=leg.key, ends=True, times=times)
        else:
            worker.say(
                *b"ok", EOS_ID, key=leg.key, finish=FinishReason.STOP, ends=True, times=times
            )

    cluster.script = script
    async with open_doors(make_router(cluster)) as doors:
        for given in ({}, {"n": 2}):
            body = {"prompt": TEXT, "max_tokens": 4, **given}
            answer = (await doors.http.post("/v1/completions", json=body)).json()
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
            assert (await doors.once(body)).usage.cached_tokens == 32
