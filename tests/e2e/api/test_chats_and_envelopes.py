"""Messages of all shapes, bodies that are none, and calls that last too long."""

import contextlib
import json
import socket
import threading
import time

import grpc
import httpx
import pytest

from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from tests.e2e.api.ask import WAYS
from tests.e2e.plain_cluster import REPO
from tests.router.doors import JSON

CALLS = [{"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"at": 7}'}}]
USER = {"role": "user", "content": "when?"}
LEGAL = {
    "one turn": [USER],
    "a system turn first": [{"role": "system", "content": "be brief"}, USER],
    "a developer": [{"role": "developer", "content": "be brief"}, USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("wh", "en?")]}],
    "a tool's turn": [
        USER, {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "c1", "content": "at high water"}, USER,
    ],
    "an empty turn": [{"role": "assistant", "content": ""}, USER],
    "a system turn in the middle": [USER, {"role": "system", "content": "be brief"}, USER],
}  # fmt: skip
ILLEGAL = (
    (None, "messages"), ([], "messages"), ("hi", "messages"), ([5], "messages[0]"),
    ([USER, {"role": "user", "content": None}], "messages[1].content"),
    ([{"role": "wizard", "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
     "messages[0].content[0].type"),
    ([{"role": "user", "content": "x" * (900 << 10)}], "messages[0].content"),
)  # fmt: skip


def test_legal_chats_are_served_and_nothing_is_dropped(caller):
    """CASES P-09: each turn moves the count, parts are their joined text, each way alike."""
    counts = {}
    for name, messages in LEGAL.items():
        answers = caller.ask_all({"messages": messages, "max_tokens": 2, "temperature": 0})
        assert len({tuple(answer.texts) for answer in answers.values()}) == 1, name
        (counts[name],) = {answer.usage[0] for answer in answers.values()}
    assert counts["parts"] == counts["one turn"]
    assert counts["a developer"] == counts["a system turn first"]
    assert counts["one turn"] < counts["an empty turn"] < counts["a system turn first"]
    assert counts["a system turn first"] < counts["a system turn in the middle"]
    assert counts["a tool's turn"] > counts["a system turn in the middle"]


def test_illegal_chats_are_named(caller):
    """CASES P-09: a 400 with the turn, and what isn't built is refused, never ignored."""
    for messages, field in ILLEGAL:
        verdict = caller.http_verdict({"messages": messages, "max_tokens": 1})
        assert (verdict.status, verdict.param) == (400, field), field
    for name, value in (("response_format", {"type": "json_object"}), ("tool_choice", "required")):
        verdict = caller.http_verdict({"messages": [USER], name: value})
        assert (verdict.status, verdict.param) == (400, name)


GOOD = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
BODIES = {
    "cut off": (GOOD[:-1], 400), "a trailing comma": (b'{"prompt": "hi",}', 400),
    "an array": (b"[1]", 400), "NaN": (b'{"prompt": "hi", "temperature": NaN}', 400),
    "half a pair": (b'{"prompt": "\\ud800"}', 400), "0xFF": (b'{"prompt": "\xff"}', 400),
    "UTF-16": (GOOD.decode().encode("utf-16"), 400), "deep": (b'{"a":' * 100_000, 400),
    "empty": (b"", 400), "a model that isn't": (b'{"prompt": "hi", "model": "gpt"}', 404),
    "twice the key": (b'{"prompt": 5, "prompt": "hi", "max_tokens": 1}', 200),
    "unknown fields": (b'{"prompt": "hi", "max_tokens": 1, "no_such": {"a": [1]}}', 200),
    "no model": (GOOD, 200), "too large": (b'{"prompt": "' + b"x" * (50 << 20) + b'"}', 413),
}  # fmt: skip
HEADS = {
    "a head of 1 MB": (b"x: " + b"y" * (1 << 20) + b"\r\n", 431),
    "another type": (b"content-type: text/plain\r\ncontent-length: 2\r\n", 415),
}


@contextlib.contextmanager
def watched_health(base):
    """Collects how long /health/live takes, as often as it can, in a thread of its own."""
    waits, is_over = [], threading.Event()

    def watch():
        with httpx.Client(base_url=base) as client:
            while not is_over.wait(0.005):
                began = time.monotonic()
                assert client.get("/health/live").status_code == 200
                waits.append(time.monotonic() - began)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield waits
    finally:
        is_over.set()
        thread.join()


def read_status(connection) -> tuple[int, dict]:
    """Read one answer from a socket."""
    with connection.makefile("rb") as lines:
        status = int(lines.readline().split()[1])
        head = dict(line.lower().split(b": ", 1) for line in iter(lines.readline, b"\r\n"))
        return status, json.loads(lines.read(int(head[b"content-length"])))


def test_whatever_comes_in_has_one_envelope_and_health_goes_on(caller):
    """CASES P-10: statuses, one shape of error, nothing of the inside; /health p99 < 200 ms."""
    endpoints = caller.cluster.config.endpoints
    address = (endpoints.host, endpoints.http_port)
    paths = ("/v1/completions", "/v1/chat/completions", "/tokenize")
    with watched_health(caller.cluster.http) as waits, httpx.Client(timeout=30) as http:
        for path in paths:
            for name, (body, status) in BODIES.items():
                if path != paths[0] and status in (200, 404):
                    continue  # its fields are another path's
                answer = http.post(caller.cluster.http + path, content=body, headers=JSON)
                assert answer.status_code == status, (path, name)
                if status != 200:
                    check_error(answer.json(), status)
        for method, path, status in (
            ("GET", "/v1/completions", 405), ("POST", "/v1/completions/", 404),
            ("DELETE", "/v1/models", 405), ("GET", "/nowhere", 404),
        ):  # fmt: skip
            answer = http.request(method, caller.cluster.http + path)
            assert answer.status_code == status, path
            check_error(answer.json(), status)
        for name, (head, status) in HEADS.items():
            with socket.create_connection(address, 30) as connection:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + head)
                with contextlib.suppress(ConnectionError):
                    connection.sendall(b"\r\n{}")
                found, body = read_status(connection)
                assert found == status, name
                check_error(body, status)
        wait_for_many(waits)
    assert sorted(waits)[len(waits) * 99 // 100] < 0.2


def wait_for_many(waits) -> None:
    """A percentile needs some."""
    until = time.monotonic() + 10
    while len(waits) < 100:
        assert time.monotonic() < until
        time.sleep(0.01)


def check_error(body, status) -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    text = json.dumps(body)
    assert not any(word in text for word in ("Traceback", ".py", "127.0.0.1", str(REPO))), text
    assert (body["error"]["type"] == "server_error") is (status >= 500)


def test_a_body_that_never_ends_holds_nobody_up(caller):
    """CASES P-10: chunk after chunk, above the cap: refused; the others are served meanwhile."""
    endpoints = caller.cluster.config.endpoints
    with socket.create_connection((endpoints.host, endpoints.http_port), 30) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                connection.sendall(chunk)
        assert caller.ask("HTTP", {"prompt": "hi", "max_tokens": 1}).usage[1] == 1
        status, body = read_status(connection)
        assert status == 413
        check_error(body, status)


@pytest.mark.parametrize("by", ["deadline", "timeout_s"])
def test_a_call_that_takes_too_long_ends_with_its_work(by, caller):
    """CASES P-28: DEADLINE_EXCEEDED, 504 over HTTP; blocks and slots are given back (Q)."""
    # Long enough in any case: three choices that fill the context. More would have to wait for
    # slots, and be refused where that is expected to take longer than the deadline.
    ask = pb.GenerateRequest(prompt="hi", n=3, ignore_eos=True)
    options = {"timeout": 0.2} if by == "deadline" else {}
    if by == "timeout_s":
        ask.timeout_s = 0.2
    with grpc.insecure_channel(caller.cluster.grpc) as channel:
        stub = pb_grpc.InferenceStub(channel)
        for method in (stub.GenerateOnce, stub.Generate):
            with pytest.raises(grpc.RpcError) as ended:
                list(method(ask, **options)) if method is stub.Generate else method(ask, **options)
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            caller.cluster.wait_quiet(2)
    given = {"prompt": "hi", "n": 3, "ignore_eos": True, "timeout_s": 0.2}
    assert caller.http_verdict(given).status == 504
    caller.cluster.wait_quiet(2)


def test_messages_of_any_size_have_a_clear_answer(caller):
    """CASES P-28: 5 MB in is refused; an answer above gRPC's 4 MB default is the client's limit."""
    with grpc.insecure_channel(caller.cluster.grpc) as channel:
        stub = pb_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.GenerateOnce(pb.GenerateRequest(prompt="x" * 5_000_000))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    ask = {
        "messages": [USER], "logprobs": True, "top_logprobs": 20, "n": 16, "ignore_eos": True,
        "seed": 1,
    }  # fmt: skip
    whole, streamed = caller.ask(WAYS[2], ask), caller.ask(WAYS[3], ask)
    assert whole.texts == streamed.texts
    assert all(len(score.top) == 20 for choice in whole.choices for score in choice.logprobs)


@pytest.mark.slow
def test_pings_at_the_documented_rate_are_no_offence(disaggregated):
    """CASES P-28: every 5 s, with and without a call; no GOAWAY."""
    options = (
        ("grpc.keepalive_time_ms", 5000), ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0), ("grpc.use_local_subchannel_pool", 1),
    )  # fmt: skip
    with grpc.insecure_channel(disaggregated.cluster.grpc, options) as channel:
        states = []
        grpc.channel_ready_future(channel).result(5)
        channel.subscribe(states.append)
        threading.Event().wait(21)
        answer = pb_grpc.InferenceStub(channel).GenerateOnce(
            pb.GenerateRequest(prompt="hi", max_tokens=1), timeout=5
        )
        assert answer.usage.completion_tokens == 1
        assert set(states) <= {grpc.ChannelConnectivity.READY}
