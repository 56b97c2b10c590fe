"""Caps: one more than allowed, and a billion, are refused at once, while health goes on."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from cluster.config import LimitsConfig
from cluster.errors import InvalidRequest
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from router.grpc_api.requests import generate_input
from router.served import ServedModel
from router.validate import Validator
from tests.router.doors import JSON, grpc_request, open_doors
from tests.router.fakes import (
    EOS_ID,
    MODEL,
    POOLS,
    VOCAB_SIZE,
    FakeCluster,
    assert_conserved,
    make_router,
    metric,
    speaks,
    until,
)

LIMITS = LimitsConfig()
MAX_CPU_S = 2.0
"""Of the event loop's thread, the client's part of it included: the machine may be busy."""
HI = [{"role": "user", "content": "hi"}]
TURN = HI[0]
ABOVE = {
    "n": [{"n": LIMITS.max_n + 1}, {"n": 10**9}],
    "choices": [{"prompt": ["a"] * 5, "n": 16}],
    "prompts": [{"prompt": ["a"] * (LIMITS.max_prompts + 1)}, {"prompt": [[1]] * 100_000}],
    "prompt": [{"prompt": "x" * 900_000}, {"prompt": [1] * 400_000}],
    "logprobs": [{"logprobs": 6}, {"logprobs": 10**9}],
    "top_logprobs": [{"messages": HI, "logprobs": True, "top_logprobs": 10**9}],
    "stop": [{"stop": ["a"] * 100_000}, {"stop": "x" * 900_000}],
    "stop_token_ids": [{"stop_token_ids": [1] * 400_000}],
    "logit_bias": [{"logit_bias": {str(i): 1 for i in range(50_000)}}],
    "max_tokens": [{"max_tokens": 10**9}, {"max_tokens": 2**62}],
    "min_tokens": [{"min_tokens": 10**9}],
    "best_of": [{"best_of": 10**9}],
    "user": [{"user": "x" * 900_000}],
    "model": [{"model": "x" * 900_000}],
    "messages": [{"messages": [TURN] * 20_000}, {"messages": [{**TURN, "content": "x" * 900_000}]}],
    "tools": [{"messages": HI, "tools": [{"type": "function"}] * 20_000}],
}


def rss_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("what", ABOVE)
async def test_above_a_cap_is_refused_at_once_and_cheaply(what):
    """S-10: 4xx, before tokenising, nothing in proportion to the value is made."""
    service = make_router(FakeCluster(), limits=LIMITS)
    async with open_doors(service) as doors:
        for given in ABOVE[what]:
            given = given if "messages" in given else {"prompt": "hello", **given}
            began, before = time.thread_time(), rss_bytes()
            verdict = await doors.http_verdict(given)
            assert verdict.status in (400, 404, 413), verdict
            assert time.thread_time() - began < MAX_CPU_S
            assert rss_bytes() - before < 50 << 20
        assert_conserved(service)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"prompt": "hi", "x": ' + b"[" * 31 + b"]" * 31 + b"}", 200),
        (b'{"prompt": "hi", "x": ' + b"[" * 32 + b"]" * 32 + b"}", 400),
        (b'{"prompt": "hi", "x": ' + b'{"a":' * 32 + b"1" + b"}" * 33, 400),
        (b'{"prompt": "' + b"[" * 40 + b'"}', 200),
        (b'{"prompt": "a\\"' + b"[" * 40 + b'"}', 200),
        (b'{"prompt": "a\\\\", "x": "' + b"{" * 40 + b'"}', 200),
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'"' * 500_001, 400),
        (b'"' + b'\\"' * 250_000, 400),
        (b'"' + b"\\" * 500_001, 400),
        (b'{"prompt": "hi", "x": [' + b"[]," * 200_000 + b"1]}", 200),
    ],
)
async def test_depth_is_counted_outside_of_strings(body, status):
    """P-10, S-10: deep bodies are refused before they are parsed."""
    cluster = FakeCluster()
    cluster.script = speaks([*b"ok", EOS_ID])
    async with open_doors(make_router(cluster, limits=LIMITS)) as doors:
        began = time.thread_time()
        response = await doors.http.post("/v1/completions", content=body, headers=JSON)
        assert response.status_code == status, response.text
        assert time.thread_time() - began < MAX_CPU_S


MANY = 100_000
ENTRIES = {
    # Two bytes of a message each, and a whole turn, tool or call once they are read.
    "prompt": lambda: {"prompts": pb.Prompts(prompts=[pb.Prompt()] * MANY)},
    "messages": lambda: {"chat": pb.Chat(messages=[pb.Message()] * MANY)},
    "tools": lambda: {
        "chat": pb.Chat(messages=[pb.Message(role="user", content="hi")], tools=[pb.Tool()] * MANY)
    },
    "messages[0].content": lambda: {
        "chat": pb.Chat(messages=[pb.Message(role="user", parts=[""] * MANY)])
    },
    "messages[0].tool_calls": lambda: {
        "chat": pb.Chat(messages=[pb.Message(role="assistant", tool_calls=[pb.ToolCall()] * MANY)])
    },
}


@pytest.mark.parametrize("field", ENTRIES)
def test_many_empty_entries_are_not_made_into_objects(field):
    """S-10: nothing is made of a message in proportion to its lists before they are counted."""
    request = pb.GenerateRequest(**ENTRIES[field]())
    began = time.thread_time()
    given = generate_input(request, None, LIMITS)
    assert time.thread_time() - began < MAX_CPU_S / 5
    with pytest.raises(InvalidRequest) as caught:
        Validator(MODEL, LIMITS, max_prompt_chars=100).check(given)
    assert caught.value.field == field


async def test_health_answers_while_large_bodies_come_in():
    """P-10, S-10: the event loop is never held for long."""
    service = make_router(FakeCluster(), limits=LIMITS)
    async with open_doors(service) as doors:
        bodies = [given for givens in ABOVE.values() for given in givens]

        async def flood():
            for given in bodies:
                await doors.http_verdict(given, "/v1/completions")

        flooding = asyncio.create_task(flood())
        waits = []
        while not flooding.done():
            began = time.thread_time()
            await asyncio.sleep(0)
            waits.append(time.thread_time() - began)
            assert (await doors.http.get("/health/live")).status_code == 200
        await flooding
        assert max(waits) < MAX_CPU_S


# ---- gRPC


async def test_a_request_of_5_mb_is_refused_and_an_answer_of_5_mb_comes():
    """P-28: the documented caps: max_body_bytes in, the client's own limit out."""
    limits = LimitsConfig(max_logprobs=20)
    model = ServedModel(
        name="tiny", max_model_len=4096, vocab_size=VOCAB_SIZE, eos_ids=frozenset({EOS_ID})
    )
    cluster = FakeCluster()
    cluster.script = speaks([ord("a") + i % 26 for i in range(4000)])
    pools = tuple(replace(pool, kv_tokens=4096) for pool in POOLS)
    service = make_router(cluster, limits=limits, model=model, pools=pools)
    async with open_doors(service) as doors:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await doors.stub.GenerateOnce(pb.GenerateRequest(prompt="x" * 5_000_000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        given = {"messages": HI, "logprobs": True, "top_logprobs": 20, "n": 3}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await doors.once(given)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in caught.value.details()
        large = (("grpc.max_receive_message_length", 64 << 20),)
        async with grpc.aio.insecure_channel(doors.address, options=large) as channel:
            stub = pb_grpc.InferenceStub(channel)
            answer = await stub.GenerateOnce(grpc_request(given))
        assert answer.ByteSize() > 4 << 20
        assert_conserved(service)


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce"])
async def test_a_deadline_of_either_kind_ends_both_methods(method):
    """P-28: DEADLINE_EXCEEDED, and the work ends; a cancelled call stops too."""
    cluster = FakeCluster()
    service = make_router(cluster)
    async with open_doors(service) as doors:

        def call(**timing):
            request = pb.GenerateRequest(prompt="hi", timeout_s=timing.pop("timeout_s", 60.0))
            started = getattr(doors.stub, method)(request, **timing)
            return started.read() if method == "Generate" else started

        for timing in ({"timeout": 0.2}, {"timeout_s": 0.2}):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(**timing)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: service.dispatcher.num_open == 0)
        started = getattr(doors.stub, method)(pb.GenerateRequest(prompt="hi"))
        await until(lambda: service.dispatcher.num_open == 1)
        await cluster.started("p0", "d0")
        started.cancel()
        await until(lambda: service.dispatcher.num_open == 0)
        assert metric(service, "pdserve_requests_aborted_total") >= 1
        assert_conserved(service)
