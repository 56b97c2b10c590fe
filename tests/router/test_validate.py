"""One table of inputs, played over HTTP and gRPC: value by value the same verdict."""

from __future__ import annotations

import json

import grpc
import httpx
import pytest

from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from router.api import build_api
from router.grpc_api import GrpcDoor
from tests.router.fakes import (
    EOS_ID,
    VOCAB_SIZE,
    FakeCluster,
    assert_conserved,
    make_router,
    speaks,
)

INF, NAN = float("inf"), float("nan")
ROOM = 64 - len(b"hello")  # the context, less the prompt

GOOD = [
    {},
    {"max_tokens": 1},
    {"max_tokens": ROOM},
    {"max_tokens": ROOM - 1},
    {"temperature": 0.0},
    {"temperature": -0.0},
    {"temperature": 1e-45},
    {"temperature": 2.0},
    {"top_p": 1.0},
    {"top_p": 1e-9},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 1},
    {"top_k": 10**9},
    {"seed": 0},
    {"seed": -1},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"stop": []},
    {"stop": ["a", "b", "c", "d"]},
    {"stop": ["x" * 256]},
    {"ignore_eos": True},
    {"timeout_s": 600.0},
    {"model": "tiny"},
    {"prompt": [0, VOCAB_SIZE - 1]},
    {"prompt": [1] * 63, "max_tokens": 1},
]
BAD = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": ROOM + 1}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": 2**63 - 1}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.0001}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.0001}, "top_p"),
    ({"top_p": -1.0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ["x" * 257]}, "stop"),
    ({"stop": ["x" * 10_000]}, "stop"),
    ({"timeout_s": 0.0}, "timeout_s"),
    ({"timeout_s": -1.0}, "timeout_s"),
    ({"timeout_s": 601.0}, "timeout_s"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": "x" * 64}, "prompt"),
    ({"prompt": "x" * 10_000}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [VOCAB_SIZE]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": [1] * 64}, "prompt"),
    ({"prompt": [1] * 65}, "prompt"),
]
# Numbers that JSON has no words for: 1e999 is read as infinity, NaN is no JSON at all.
NOT_FINITE = [
    ({name: value}, name)
    for name in ("temperature", "top_p", "timeout_s")
    for value in (NAN, INF, -INF)
]
# What only JSON can say.
BAD_JSON = [
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_k": 1.0}, "top_k"),
    ({"top_k": True}, "top_k"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"seed": True}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": ["\ud800"]}, "stop"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"timeline": "yes"}, "timeline"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": "half \ud83d"}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"model": 5}, "model"),
    ({"n": 2}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"logprobs": 0}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.1}, "presence_penalty"),
    ({"frequency_penalty": -2}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 0.5}, "min_p"),
    ({"min_tokens": 4}, "min_tokens"),
    ({"stop_token_ids": [5]}, "stop_token_ids"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
]
GOOD_JSON = [
    {"max_tokens": None},
    {"max_completion_tokens": 1},
    {"max_tokens": 1, "max_completion_tokens": 1},
    {"temperature": 1},
    {"temperature": None, "top_p": None, "top_k": None, "seed": None, "stop": None},
    {"stop": "one"},
    {"prompt": ["one"]},
    {"prompt": [[1, 2]]},
    {"n": 1, "logprobs": None, "presence_penalty": 0, "frequency_penalty": 0.0, "echo": False},
    {"logit_bias": {}, "tools": [], "response_format": {"type": "text"}, "tool_choice": "auto"},
    {"user": "me", "metadata": {"a": 1}, "no_such_field": [1]},
]


@pytest.fixture
async def doors():
    """Yield a service, an HTTP client and a gRPC stub onto it."""
    cluster = FakeCluster()
    cluster.script = speaks([*b"ok", EOS_ID])
    service = make_router(cluster)
    door = GrpcDoor(service, host="127.0.0.1", port=0)
    port = await door.start()
    transport = httpx.ASGITransport(build_api(service))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://test") as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield service, http, pb_grpc.InferenceStub(channel)
    await door.stop()
    await service.stop()


async def over_http(http, given, *, path="/v1/completions"):
    # Not httpx' own JSON: it refuses to say NaN, and half a character.
    body = json.dumps({"prompt": "hello", **given})
    return await http.post(path, content=body, headers={"content-type": "application/json"})


async def over_grpc(stub, given):
    """Return the status and the field that is named."""
    given = {"prompt": "hello", **given}
    prompt = given.pop("prompt")
    request = pb.GenerateRequest(**given)
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.prompt_ids.SetInParent()
        request.prompt_ids.ids.extend(prompt)
    call = stub.Generate(request)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), dict(error.trailing_metadata()).get("pdserve-param"), error.details()
    return grpc.StatusCode.OK, None, ""


async def test_good_values_are_good_at_both_doors(doors):
    """P-01, P-03: limits themselves are legal."""
    service, http, stub = doors
    for given in GOOD:
        response = await over_http(http, given)
        assert response.status_code == 200, (given, response.text)
        assert await over_grpc(stub, given) == (grpc.StatusCode.OK, None, ""), given
    assert_conserved(service)


async def test_bad_values_are_refused_alike_at_both_doors(doors):
    """P-01, P-02, P-03, P-05: 400 and INVALID_ARGUMENT, naming the same field and rule."""
    service, http, stub = doors
    for given, field in BAD:
        response = await over_http(http, given)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, field), (given, error)
        assert error["type"] == "invalid_request_error"
        code, param, details = await over_grpc(stub, given)
        assert (code, param) == (grpc.StatusCode.INVALID_ARGUMENT, field), given
        assert details == error["message"]
    assert_conserved(service)


async def test_numbers_that_are_no_numbers(doors):
    """P-03: NaN is false in every comparison; the refusal is itself valid JSON."""
    _, http, stub = doors
    for given, field in NOT_FINITE:
        response = await over_http(http, given)
        assert response.status_code == 400
        json.loads(response.text, parse_constant=pytest.fail)
        code, param, _ = await over_grpc(stub, given)
        assert (code, param) == (grpc.StatusCode.INVALID_ARGUMENT, field), given
    for name in ("temperature", "top_p", "top_k", "max_tokens", "seed"):
        body = f'{{"prompt": "hello", "{name}": 1e999}}'
        response = await http.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_what_only_json_can_say(doors):
    """P-01, P-02, P-03, P-08: wrong types, several prompts, and fields that are not served."""
    service, http, _ = doors
    for given, field in BAD_JSON:
        response = await over_http(http, given)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, field), (given, error)
    for given in GOOD_JSON:
        response = await over_http(http, given)
        assert response.status_code == 200, (given, response.text)
    assert_conserved(service)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "nobody", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "messages"),
        ([{"role": "user", "content": "x" * 40}] * 2, "messages"),
        ([{"role": "user", "content": "x" * 10_000}], "messages[0].content"),
        ([{"role": "user", "content": "x" * 9}] * 300, "messages"),
    ],
)
async def test_messages_that_are_refused(doors, messages, field):
    """P-09 in part: illegal turns are named; the template's own refusal is a 400 too."""
    _, http, _ = doors
    response = await over_http(http, {"messages": messages}, path="/v1/chat/completions")
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_unknown_model_is_not_found_at_both_doors(doors):
    _, http, stub = doors
    response = await over_http(http, {"model": "gpt-5"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    code, param, _ = await over_grpc(stub, {"model": "gpt-5"})
    assert (code, param) == (grpc.StatusCode.NOT_FOUND, "model")


async def test_nothing_to_generate_from_is_refused(doors):
    _, http, stub = doors
    response = await http.post("/v1/completions", json={})
    assert response.json()["error"]["param"] == "prompt"
    call = stub.Generate(pb.GenerateRequest())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
