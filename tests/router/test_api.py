"""The HTTP door: shapes, streams, envelopes, and clients that leave. A real server, port 0."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading

import httpx
import openai
import pytest
import uvicorn

from cluster.control.facts import Health
from cluster.errors import EngineFault, HandoffFailed, QueueFull
from cluster.request import FinishReason
from router.answers import ChatAnswer
from router.api import build_api
from tests.router import fakes
from tests.router.fakes import (
    EOS_ID,
    FakeCluster,
    assert_conserved,
    make_router,
    make_view,
    make_worker,
    metric,
    speaks,
    until,
)

A, B, C = b"abc"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@contextlib.asynccontextmanager
async def serving(service):
    """Serve the API on a free port; yields its base URL."""
    config = uvicorn.Config(build_api(service), port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await service.stop()
        await task


@pytest.fixture
async def cluster():
    return FakeCluster()


@pytest.fixture
async def service(cluster):
    return make_router(cluster)


@pytest.fixture
async def http(service):
    async with serving(service) as url, httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield client


async def events_of(response):
    """Return (event, data) pairs of an SSE body."""
    events, name = [], "message"
    async for line in response.aiter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            events.append((name, value if value == "[DONE]" else json.loads(value)))
            name = "message"
    return events


# ---- shapes


async def test_an_answer_with_logprobs_is_written_beside_the_event_loop(http, cluster, monkeypatch):
    """P-07, P-10: of 16 choices with 20 each it is megabytes."""
    cluster.script = speaks([*b"Paris.", EOS_ID])
    threads, whole = [], ChatAnswer.whole

    def write(answer):
        threads.append(threading.current_thread())
        return whole(answer)

    monkeypatch.setattr(ChatAnswer, "whole", write)
    body = {**HELLO, "logprobs": True, "top_logprobs": 2}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert len(answer["choices"][0]["logprobs"]["content"]) == 7
    assert threads != [threading.main_thread()]


async def test_the_openai_client_reads_everything(cluster, service):
    cluster.script = speaks([*b"Paris.", EOS_ID])
    async with serving(service) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        async with client:
            models = await client.models.list()
            assert [model.id for model in models.data] == ["tiny"]

            chat = await client.chat.completions.create(**HELLO, seed=5, stop=["\n"])
            assert chat.choices[0].message.content == "Paris."
            assert chat.choices[0].finish_reason == "stop"
            # "[user]hi[assistant]" is 19 bytes; the EOS is counted though it has no text.
            assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (19, 7)
            assert chat.usage.total_tokens == 26

            stream = await client.chat.completions.create(
                **HELLO, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[0].choices[0].delta.role == "assistant"
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == "Paris."
            assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
            assert chunks[-1].choices == []
            assert chunks[-1].usage.completion_tokens == 7
            assert all(chunk.usage is None for chunk in chunks[:-1])
            assert len({chunk.id for chunk in chunks}) == 1

            text = await client.completions.create(model="tiny", prompt="hi", max_tokens=3)
            assert (text.choices[0].text, text.choices[0].finish_reason) == ("Par", "length")
            stream = await client.completions.create(model="tiny", prompt=[104, 105], stream=True)
            assert "".join([c.choices[0].text async for c in stream]) == "Paris."

            with pytest.raises(openai.BadRequestError, match="max_tokens"):
                await client.completions.create(model="tiny", prompt="hi", max_tokens=-1)
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="other", prompt="hi")
    assert_conserved(service)


@pytest.mark.parametrize("max_tokens", [1, 2, 4])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_stream_and_whole_answer_agree(http, cluster, max_tokens, path):
    """P-06, P-08: joined deltas, usage and finish are those of the answer in one piece."""
    cluster.script = speaks([*"é!".encode(), EOS_ID])
    body = {**HELLO, "prompt": "hi", "max_tokens": max_tokens}
    whole = (await http.post(path, json=body)).json()
    async with http.stream(
        "POST", path, json={**body, "stream": True, "stream_options": {"include_usage": True}}
    ) as response:
        events = await events_of(response)
    assert events.pop() == ("message", "[DONE]")
    last = events.pop()[1]
    choices = [event["choices"][0] for _, event in events]
    if path == "/v1/completions":
        text = "".join(choice["text"] for choice in choices)
        assert text == whole["choices"][0]["text"]
    else:
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["choices"][0]["message"]["content"]
    assert text == {1: "\ufffd", 2: "é", 4: "é!"}[max_tokens]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert reasons == [whole["choices"][0]["finish_reason"]]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert whole["usage"]["completion_tokens"] == max_tokens


@pytest.mark.parametrize("include_usage", [False, True])
async def test_timeline_comes_when_asked(http, cluster, include_usage):
    cluster.script = speaks([A, B])
    plain = (await http.post("/v1/completions", json={"prompt": "hi"})).json()
    assert "pdserve" not in plain
    body = {"prompt": "hi", "timeline": True}
    whole = (await http.post("/v1/completions", json=body)).json()
    assert set(whole["pdserve"]) == {"timeline"}
    assert whole["pdserve"]["timeline"]["prefill_worker"] == "p0"
    assert whole["pdserve"]["timeline"]["prefill"]["transfer_bytes"] == 64
    body |= {"stream": True, "stream_options": {"include_usage": include_usage}}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        *chunks, done = [data for _, data in await events_of(response)]
    assert done == "[DONE]"
    assert chunks[-1]["pdserve"]["timeline"]["decode_worker"] == "d0"
    assert not any("pdserve" in chunk for chunk in chunks[:-1])


async def test_request_id_is_ours_and_in_every_answer(http, cluster):
    cluster.script = speaks([A])
    response = await http.post(
        "/v1/completions", json={"prompt": "hi"}, headers={"x-request-id": "mine"}
    )
    request_id = response.headers["x-request-id"]
    assert request_id == cluster.route.wants[0].request_id
    assert response.json()["id"] == f"cmpl-{request_id}"


# ---- errors


async def test_an_error_before_the_first_event_has_its_status(http, cluster, service):
    cluster.script = lambda worker, leg: worker.say(error=EngineFault("a step failed"))
    for stream in (False, True):
        response = await http.post("/v1/completions", json={"prompt": "hi", "stream": stream})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_fault"
        assert "x-request-id" in response.headers
    cluster.route.error = QueueFull("full", retry_after_s=2.5)
    response = await http.post("/v1/completions", json={"prompt": "hi", "stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert_conserved(service)


async def test_an_error_after_the_first_byte_is_an_event_and_no_done(
    http, cluster, service, caplog
):
    def script(worker, leg):
        if worker.peer.worker_id == "p0":
            worker.say(A, ends=True)
        else:
            worker.say(error=HandoffFailed("ipv4:127.0.0.1:5 refused it", worker_id="d0"))

    cluster.script = script
    body = {"prompt": "hi", "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        events = await events_of(response)
    name, error = events[-1]
    assert (name, error["error"]["code"]) == ("error", "handoff_failed")
    assert "d0" not in json.dumps(error)
    assert "127.0.0.1" not in json.dumps(error)
    assert "127.0.0.1:5 refused it" in caplog.text
    assert ("message", "[DONE]") not in events
    await until(lambda: metric(service, "pdserve_requests_in_flight") == 0)
    assert_conserved(service)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "hi"',
        b'{"prompt": "hi",}',
        b'[{"prompt": "hi"}]',
        b'"text"',
        b"",
        b'{"prompt": "hi", "temperature": NaN}',
        b'{"prompt": "hi", "temperature": -Infinity}',
        b'{"prompt": "\xff"}',
        '{"prompt": "hi"}'.encode("utf-16"),
        b"[" * 15_000,
        b'{"a":' * 3000,
        b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_bodies_that_are_no_json_object(http, service, body, path):
    """P-10: one envelope, 400, and nothing of the inside in it."""
    response = await http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "/" not in error["message"]
    assert_conserved(service)


async def test_routes_methods_and_types_that_are_not_ours(http):
    """P-10: 404, 405 and 415 in the same envelope; a trailing slash is another route."""
    answers = [
        (await http.get("/v1/completions"), 405),
        (await http.get("/nowhere"), 404),
        (await http.post("/v1/completions/", json={"prompt": "hi"}), 404),
        (await http.post("/v1/completions", content=b"{}"), 415),
        (await http.post("/v1/completions", data={"prompt": "hi"}), 415),
        (await http.delete("/v1/models"), 405),
    ]
    for response, status in answers:
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert ("allow" in response.headers) == (status == 405)


async def test_large_bodies_are_cut_off_with_and_without_a_length(http, cluster):
    """P-10: refused by size, before anything reads them."""
    headers = {"content-type": "application/json"}
    large = b'{"prompt": "' + b"x" * 5_000_000 + b'"}'

    async def chunks():
        for start in range(0, len(large), 65536):
            yield large[start : start + 65536]

    for content in (large, chunks()):
        response = await http.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
    assert cluster.route.wants == []


async def test_a_body_that_never_ends_is_given_up(http, monkeypatch):
    """P-10: a chunked body without an end."""
    monkeypatch.setattr("router.http_body.READ_TIMEOUT_S", 0.05)
    url = http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b'transfer-encoding: chunked\r\n\r\nc\r\n{"prompt": "\r\n'
    )
    assert b" 400 " in await reader.readline()
    writer.close()


async def test_duplicate_keys_take_the_last(http, cluster):
    """P-10: documented: as JSON parsers do."""
    cluster.script = speaks([A, B, C])
    response = await http.post(
        "/v1/completions",
        content=b'{"prompt": "hi", "max_tokens": 1, "max_tokens": 2}',
        headers={"content-type": "application/json"},
    )
    assert response.json()["usage"]["completion_tokens"] == 2


# ---- clients that leave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
async def test_a_client_that_leaves_stops_the_work(http, cluster, service, stream, phase):
    """P-11: by closing its connection, in every phase, streaming or not."""
    if phase == "queue":
        cluster.route.default_pair = None
    url = http.base_url
    _, writer = await asyncio.open_connection(url.host, url.port)
    body = json.dumps({"prompt": "hi", "stream": stream}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        + f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    await cluster.route.wanted.wait()
    if phase != "queue":
        prefill, _ = await cluster.started("p0", "d0")
        if phase == "decode":
            prefill.say(A)
    writer.close()
    await until(lambda: metric(service, "pdserve_requests_in_flight") == 0)
    assert metric(service, f'pdserve_requests_aborted_total{{phase="{phase}"}}') == 1
    if phase == "queue":
        assert cluster.route.withdrawn
    else:
        workers = cluster.worker("p0"), cluster.worker("d0")
        await until(lambda: all(worker.aborts for worker in workers))
    assert_conserved(service)


async def test_a_client_that_leaves_while_its_prompt_is_tokenised(http, service, monkeypatch):
    """P-11: the first phase of all."""
    tokenising, going_on = threading.Event(), threading.Event()

    def encode(self, text):
        tokenising.set()
        going_on.wait(10)
        return (1,)

    monkeypatch.setattr("router.text.TextCodec.encode", encode)
    url = http.base_url
    _, writer = await asyncio.open_connection(url.host, url.port)
    body = b'{"prompt": "hi"}'
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + head.encode() + body)
    await until(tokenising.is_set)
    writer.close()
    name = 'pdserve_requests_aborted_total{phase="edge"}'
    await until(lambda: metric(service, name) == 1)
    going_on.set()
    assert_conserved(service)


async def test_a_full_edge_refuses_before_the_body_is_read(http, service):
    """S-10: the body never comes, the answer does."""
    service.max_open_calls = 0
    url = http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 9999\r\n\r\n"
    )
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert b" 503 " in answer
    assert b"retry-after: " in answer
    writer.close()
    assert_conserved(service)


async def test_a_stream_that_another_call_cancels_says_so(http, cluster, service):
    body = {"prompt": "hi", "stream": True}
    cluster.script = lambda worker, leg: worker.say(A) if worker.peer.worker_id == "p0" else None
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert await service.cancel(response.headers["x-request-id"])
        events = await events_of(response)
    assert events[-1][1]["error"]["code"] == "cancelled"
    assert_conserved(service)


# ---- readiness

READY = {"status": "ready", "missing": [], "reasons": []}


async def test_ready_says_which_role_is_missing(http, cluster):
    """CASES P-26: and why, without a worker's name."""
    response = await http.get("/health/ready")
    assert (response.status_code, response.json()["status"]) == (200, "ready")
    for view, missing in [
        (make_view(make_worker("p0", fakes.Role.PREFILL)), ["decode"]),
        (make_view(workers=()), ["prefill", "decode"]),
        (None, ["control plane"]),
    ]:
        cluster.route.view = view
        cluster.route.is_away_for_long = view is None  # else a first view may still come
        response = await http.get("/health/ready")
        assert (response.status_code, response.json()["missing"]) == (503, missing)
        assert [why.partition(":")[0] for why in response.json()["reasons"]] == missing
        refused = await http.post("/v1/completions", json={"prompt": "hi"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    cluster.route.view = make_view(make_worker("d0", fakes.Role.DECODE))
    cluster.route.is_away_for_long = False
    response = await http.get("/health/ready")
    assert (response.status_code, response.json()["missing"]) == (200, ["prefill"]), "it prefills"
    cluster.route.view = make_view(make_worker("m0", fakes.Role.MIXED))
    assert (await http.get("/health/ready")).status_code == 200
    assert (await http.get("/health/live")).json()["status"] == "live"


async def test_a_role_whose_engine_hangs_is_missing_and_waited_for(http, cluster):
    """CASES P-26: nobody new is sent here; who comes all the same waits for what becomes of it."""
    hung = dataclasses.replace(make_worker("d0", fakes.Role.DECODE), health=Health.STALLED)
    prefill = make_worker("p0", fakes.Role.PREFILL)
    cluster.route.view = make_view(prefill, hung)
    response = await http.get("/health/ready")
    assert (response.status_code, response.json()["missing"]) == (503, ["decode"])
    assert response.json()["reasons"] == ["decode: the engine makes no step"]
    cluster.script = speaks([A], FinishReason.STOP)
    assert (await http.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
    cluster.route.view = make_view(prefill, hung, make_worker("d1", fakes.Role.DECODE))
    assert (await http.get("/health/ready")).json() == READY


async def test_links_that_fail_are_named_and_only_the_last_one_is_missed(http, cluster):
    """CASES P-26: decode workers prefill by themselves, so requests are served all the same."""
    prefill = make_worker("p0", fakes.Role.PREFILL, broken_links=("d0.1", "d-long-dead.1"))
    decode = make_worker("d0", fakes.Role.DECODE)
    cluster.route.view = make_view(prefill, decode)
    response = await http.get("/health/ready")
    assert (response.status_code, response.json()["missing"]) == (200, ["link"])
    assert response.json()["reasons"] == ["link: 1 of 1 from prefill to decode workers fail"]
    cluster.route.view = make_view(prefill, decode, make_worker("p1", fakes.Role.PREFILL))
    response = await http.get("/health/ready")
    assert (response.status_code, response.json()["missing"]) == (200, [])
    assert response.json()["reasons"] == ["link: 1 of 2 from prefill to decode workers fail"]
    cluster.route.view = make_view()
    assert (await http.get("/health/ready")).json() == READY


async def test_a_picture_that_is_a_little_old_is_no_readiness(http, cluster):
    """CASES P-26: nobody new is sent here, in less than 10 s; who comes all the same is let in."""
    cluster.script = speaks([A], FinishReason.STOP)
    cluster.route.age_s = 7.0
    assert (await http.get("/health/ready")).json()["missing"] == ["control plane"]
    assert (await http.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
    cluster.route.age_s = 5.0
    assert (await http.get("/health/ready")).json() == READY


async def test_metrics_show_the_router_and_the_cluster(http, cluster):
    """P-29: what came in is what ended; workers and links as the control plane sees them."""
    cluster.script = speaks([A, B], FinishReason.STOP)
    counters = {"prefill_tokens_total": 5.0, "pdserve_generated_tokens": 2.0}
    decode = make_worker("d0", fakes.Role.DECODE, num_running=2, counters=counters)
    control = {"grants_local_fallback": 4.0}
    prefill = make_worker("p0", fakes.Role.PREFILL)
    cluster.route.view = make_view(prefill, decode, counters=control)
    await http.post("/v1/completions", json={"prompt": "hi"})
    text = (await http.get("/metrics")).text
    for line in (
        'pdserve_requests_received_total{router="r0"} 1.0',
        'pdserve_requests_success_total{reason="stop",router="r0"} 1.0',
        'pdserve_prompt_tokens_total{router="r0"} 2.0',
        'pdserve_generated_tokens_total{router="r0"} 2.0',
        'pdserve_requests_in_flight{router="r0"} 0.0',
        'pdserve_first_token_seconds_count{router="r0"} 1.0',
        'pdserve_first_token_seconds_bucket{le="+Inf",router="r0"} 1.0',
        'pdserve_worker_blocks{pool="prefill",role="prefill",state="free",worker="p0"} 8.0',
        'pdserve_worker_running{pool="decode",role="decode",worker="d0"} 2.0',
        'pdserve_worker_prefill_tokens_total{pool="decode",role="decode",worker="d0"} 5.0',
        'pdserve_worker_generated_tokens_total{pool="decode",role="decode",worker="d0"} 2.0',
        'pdserve_link_bytes_total{decode="d0",prefill="p0"} 300.0',
        "pdserve_control_grants_local_fallback_total 4.0",
        "pdserve_workers_refused 0.0",
    ):
        assert line in text, line
