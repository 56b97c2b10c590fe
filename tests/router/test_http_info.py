"""Tokens, models, the cluster and the OpenAPI document: over HTTP, and gRPC where it has them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields, replace

import grpc
import pytest
from fastapi.routing import APIRoute

from cluster.config import LimitsConfig, Role
from cluster.lifetime import LegTimes, Timeline
from cluster.wire import public_v1_pb2 as pb
from router.api import build_api
from router.auth import Keys
from router.cluster_body import BlocksBody, ClusterBody, LinkBody, QueueBody, WorkerBody
from router.given import GenerateInput
from router.http_errors import ErrorEnvelope
from router.openai_shapes import (
    ChatCompletion,
    LegTimesBody,
    PromptTokensDetails,
    TextCompletion,
    TimelineBody,
    Usage,
)
from router.service import Door
from tests.router.doors import JSON, Verdict, open_doors, verdict_of
from tests.router.fakes import (
    EOS_ID,
    VOCAB_SIZE,
    FakeCluster,
    make_router,
    make_view,
    make_worker,
    speaks,
    until,
)

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def cluster():
    cluster = FakeCluster()
    cluster.script = speaks([*b"ok", EOS_ID])
    return cluster


@pytest.fixture
async def doors(cluster):
    async with open_doors(make_router(cluster)) as doors:
        yield doors


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return verdict_of(caught.value)


async def test_text_to_tokens_and_back(doors):
    answer = (await doors.post({"prompt": "hé"}, "/tokenize")).json()
    tokens = list("hé".encode())
    assert answer == {"count": 3, "max_model_len": 64, "tokens": tokens}
    assert (await doors.post({"tokens": tokens}, "/detokenize")).json() == {"prompt": "hé"}
    told = await doors.stub.Tokenize(pb.TokenizeRequest(prompt="hé"))
    assert (list(told.tokens), told.max_model_len) == (tokens, 64)
    back = await doors.stub.Detokenize(pb.DetokenizeRequest(tokens=tokens))
    assert back.prompt == "hé"

    chat = (await doors.post({"messages": HI}, "/tokenize")).json()
    assert bytes(chat["tokens"]) == b"[user]hi[assistant]"
    request = pb.TokenizeRequest(chat=pb.Chat(messages=[pb.Message(role="user", content="hi")]))
    assert list((await doors.stub.Tokenize(request)).tokens) == chat["tokens"]


@pytest.mark.parametrize(
    ("path", "given", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x" * 10_000}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": HI, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"messages": [5]}, "messages[0]"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 65}, "tokens"),
    ],
)
async def test_what_has_no_tokens_or_text(doors, path, given, field):
    assert (await doors.http_verdict(given, path)).param == field


async def test_tokens_are_checked_alike_at_both_doors(doors):
    for tokens in ([VOCAB_SIZE], [-1], [1] * 65):
        verdict = await doors.http_verdict({"tokens": tokens}, "/detokenize")
        assert await refused(doors.stub.Detokenize(pb.DetokenizeRequest(tokens=tokens))) == verdict
    verdict = await doors.http_verdict({"model": "other", "prompt": "a"}, "/tokenize")
    assert verdict.status == 404
    told = doors.stub.Tokenize(pb.TokenizeRequest(model="other", prompt="a"))
    assert await refused(told) == verdict


async def test_calls_that_only_tokenise_count_for_their_key(cluster):
    """S-14: one key can't take all places at the edge with bodies that never come."""
    keys, limits = Keys({"a-secret-key": "acme"}), LimitsConfig(max_streams_per_key=2)
    service = make_router(cluster, limits=limits, door=Door(keys=keys))
    caller = keys.caller("Bearer a-secret-key")
    async with open_doors(service, authorization="Bearer a-secret-key") as doors:
        with service.edge(caller), service.edge(caller):
            verdict = await doors.http_verdict({"prompt": "a"}, "/tokenize")
            assert verdict.status == 429
            assert "2 calls of this API key are open" in verdict.message
            entry = (("authorization", "Bearer a-secret-key"),)
            told = doors.stub.Tokenize(pb.TokenizeRequest(prompt="a"), metadata=entry)
            assert (await refused(told)).status == 429
        assert (await doors.post({"prompt": "a"}, "/tokenize")).status_code == 200


async def test_models(doors):
    (card,) = (await doors.http.get("/v1/models")).json()["data"]
    (model,) = (await doors.stub.ListModels(pb.ListModelsRequest())).models
    assert (model.id, model.created) == (card["id"], card["created"]) == ("tiny", 7)
    assert model.max_model_len == card["max_model_len"] == 64


async def test_the_cluster_without_its_inside(doors, cluster):
    """S-13: no address, process or incarnation; over HTTP and gRPC the same."""
    busy = make_worker("d0", Role.DECODE, num_running=2, num_waiting=1)
    cluster.route.view = make_view(make_worker("p0", Role.PREFILL), busy, num_waiting=3)
    response = await doors.http.get("/v1/cluster")
    view = response.json()
    assert [worker["worker_id"] for worker in view["workers"]] == ["p0", "d0"]
    assert view["workers"][1]["num_running"] == 2
    assert view["workers"][0]["blocks"]["total"] == view["workers"][0]["blocks"]["free"] == 8
    assert (view["queue"]["num_waiting"], view["links"][0]["num_bytes"]) == (3, 300)
    for inside in ("p0:1", "p0.1", "pid", "address", "incarnation"):
        assert inside not in response.text
    told = await doors.stub.GetCluster(pb.GetClusterRequest())
    assert told.workers[1].num_running == 2
    assert told.workers[0].blocks.total == 8
    assert (told.queue.num_waiting, told.links[0].num_bytes) == (3, 300)

    cluster.route.view = None
    gone = await doors.http.get("/v1/cluster")
    assert (gone.status_code, gone.headers["retry-after"]) == (503, "1")
    verdict = await refused(doors.stub.GetCluster(pb.GetClusterRequest()))
    assert verdict == Verdict(503, None, gone.json()["error"]["message"])


async def test_the_cluster_is_watched(doors, cluster):
    call = doors.stub.WatchCluster(pb.GetClusterRequest())
    assert (await call.read()).queue.num_waiting == 0
    cluster.route.view = replace(cluster.route.view, num_waiting=5)
    async with asyncio.timeout(5):
        assert (await call.read()).queue.num_waiting == 5
        cluster.route.view = None
        assert (await refused(call.read())).status == 503


async def test_so_many_watch_the_cluster_and_no_more(doors, monkeypatch):
    """S-14: streams that nobody ends are bounded; those that end make room."""
    monkeypatch.setattr("router.service.MAX_WATCHERS", 2)
    calls = [doors.stub.WatchCluster(pb.GetClusterRequest()) for _ in range(2)]
    for call in calls:
        await call.read()
    verdict = await refused(doors.stub.WatchCluster(pb.GetClusterRequest()).read())
    assert verdict.status == 503
    assert "2 clients watch" in verdict.message
    calls[0].cancel()
    await until(lambda: doors.service._num_watching == 1)
    last = doors.stub.WatchCluster(pb.GetClusterRequest())
    assert (await last.read()).num_routers == 1
    for call in (calls[1], last):
        call.cancel()


async def test_the_document_tells_every_status_and_body(doors):
    """What is answered is what the document says, route by route."""
    document = (await doors.http.get("/openapi.json")).json()
    calls = [
        ("GET", "/health/live", None),
        ("GET", "/health/ready", None),
        ("GET", "/metrics", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/cluster", None),
    ]
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        givens = ({}, {"prompt": "a", "messages": HI}, {"model": "other", "prompt": "a"})
        calls += [("POST", path, given) for given in givens]
    calls += [("POST", "/tokenize", {"prompt": "a"}), ("POST", "/detokenize", {"tokens": [1]})]
    calls.append(("POST", "/v1/completions", {"prompt": "x" * 30_000}))
    for method, path, given in calls:
        content = None if given is None else json.dumps(given)
        response = await doors.http.request(method, path, content=content, headers=JSON)
        answers = document["paths"][path][method.lower()]["responses"]
        assert str(response.status_code) in answers, (path, given)
        kind = response.headers["content-type"].partition(";")[0]
        assert kind in answers[str(response.status_code)]["content"], (path, given)
        if response.status_code >= 400:
            ErrorEnvelope.model_validate(response.json(), strict=True)
    paths = {route.path for route in doors_routes(doors)}
    assert set(document["paths"]) == paths


def doors_routes(doors):
    return [r for r in build_api(doors.service).routes if isinstance(r, APIRoute)]


async def test_answers_are_what_their_models_say(doors):
    for given, kind in (
        ({"prompt": "a", "logprobs": 2, "echo": True}, TextCompletion),
        ({"messages": HI, "logprobs": True, "top_logprobs": 2, "timeline": True}, ChatCompletion),
    ):
        answer = (await doors.post(given)).json()
        assert kind.model_validate(answer, strict=True)


# OpenAI has the cached ones in an object of their own.
HTTP_USAGE = {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}


def test_both_doors_have_every_field():
    """P-28: what one can ask or tell, the other can; the timeline is whole in both."""
    for of_http, of_grpc, ours in (
        (TimelineBody, pb.Timeline, Timeline),
        (LegTimesBody, pb.LegTimes, LegTimes),
        (Usage, pb.Usage, None),
        (WorkerBody, pb.Worker, None),
        (BlocksBody, pb.Blocks, None),
        (LinkBody, pb.Link, None),
        (QueueBody, pb.Queue, None),
        (ClusterBody, pb.Cluster, None),
    ):
        names = set(of_grpc.DESCRIPTOR.fields_by_name)
        assert set(of_http.model_fields) == (names if of_http is not Usage else HTTP_USAGE)
        assert ours is None or {field.name for field in fields(ours)} == names
    assert set(PromptTokensDetails.model_fields) <= set(pb.Usage.DESCRIPTOR.fields_by_name)
    asked = set(pb.GenerateRequest.DESCRIPTOR.fields_by_name) - {"chat", "prompts", "prompt_ids"}
    asked |= {"messages", "tools", "tool_choice", "extras", "call_remaining_s"}
    # A second name for one thing, and a message that is nothing but a chat's.
    asked |= {"max_completion_tokens"}
    assert {field.name for field in fields(GenerateInput)} == asked


async def test_the_document_names_the_key_where_one_is_needed():
    key = "sk-0123456789"
    service = make_router(FakeCluster(), door=Door(keys=Keys({key: "a"})))
    async with open_doors(service, authorization=f"Bearer {key}") as doors:
        document = (await doors.http.get("/openapi.json")).json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]
    assert document["paths"]["/health/live"]["get"]["security"] == []
