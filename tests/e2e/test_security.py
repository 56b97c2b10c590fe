"""What strangers throw at a running cluster's ports, and what is refused, unread and untold."""

import contextlib
import dataclasses
import json
import logging
import os
import pickle  # noqa: TID251 (it is what is thrown)
import random
import socket
import threading
import time

import grpc
import httpx
import psutil
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster import errors
from cluster.config import AuthConfig, Role
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from deploy.client import Client
from tests.e2e.plain_cluster import make_config, running

KEY, EVIL = "sk-good-0123456789", "sk-evil-0123456789"
BEARER, EVIL_BEARER = ({"authorization": f"Bearer {key}"} for key in (KEY, EVIL))
METADATA = tuple(BEARER.items())
MAX_EVIL_CALLS = 16
ASK = {"prompt": [11, 48, 85, 22], "max_tokens": 6, "temperature": 0}
# Notes each class that a pickle names, in whatever process of Python that starts under it.
HOOK = """
import os, sys
def note(event, arguments):
    if event == "pickle.find_class":
        with open({path!r}, "a") as file:
            file.write(f"{{os.getpid()}} {{'.'.join(arguments)}}\\n")
sys.addaudithook(note)
"""


@pytest.fixture(scope="module")
def unpickled(tmp_path_factory):
    """The file in which the processes of the cluster note what they unpickle."""
    folder = tmp_path_factory.mktemp("hook")
    path = folder / "classes.txt"
    (folder / "sitecustomize.py").write_text(HOOK.format(path=str(path)))
    path.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield path


@pytest.fixture(scope="module")
def cluster(tiny_llama, unpickled, tmp_path_factory):
    """One pair, with keys; what it logs is in its folder."""
    folder = tmp_path_factory.mktemp("secured")
    keys = folder / "keys"
    keys.write_text(f"good={KEY}\nevil={EVIL}\n")
    config = make_config(tiny_llama, {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)})
    limits = dataclasses.replace(config.limits, max_streams_per_key=MAX_EVIL_CALLS)
    config = dataclasses.replace(config, auth=AuthConfig(keys_file=str(keys)), limits=limits)
    with running(config, tiny_llama, folder, is_forked=False) as cluster:  # for the hook
        yield cluster


def complete(cluster, **given) -> httpx.Response:
    url = f"{cluster.http}/v1/completions"
    return httpx.post(url, json={**ASK, **given}, headers=BEARER, timeout=30)


@pytest.fixture
def canary(cluster):
    """CASES §0 C: the text is what it was, from the same processes."""
    before = complete(cluster).json()["choices"][0]["text"]
    pids = {name: process.pid for name, process in cluster.workers.items()}
    yield
    assert complete(cluster).json()["choices"][0]["text"] == before
    assert {name: process.pid for name, process in cluster.workers.items()} == pids
    assert all(process.poll() is None for process in cluster.workers.values())


def listening_ports(cluster) -> set[int]:
    """Every TCP port that any process of the cluster listens on."""
    pids = {None: psutil.Process()} | {
        name: psutil.Process(process.pid) for name, process in cluster.workers.items()
    }
    found = {
        connection.laddr.port
        for process in pids.values()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    endpoints = cluster.config.endpoints
    assert {endpoints.http_port, endpoints.grpc_port, endpoints.control_port} <= found
    assert len(found) >= 3 + len(cluster.workers)
    return found


class Bomb:
    """Whoever unpickles it leaves a trace."""

    def __init__(self, path) -> None:
        self._path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self._path,))


def test_no_port_unpickles_anything(cluster, canary, unpickled, tmp_path):
    """CASES S-01: bare, with a length before it, as a body, as a gRPC message, on every port."""
    before = unpickled.read_text()
    trace = tmp_path / "trace"
    for protocol in (2, 4, 5):
        bomb = pickle.dumps(Bomb(trace), protocol=protocol)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(bomb)
        shells = (b"", len(bomb).to_bytes(4, "big"), len(bomb).to_bytes(8, "little"), head)
        for port in listening_ports(cluster):
            for shell in shells:
                throw(port, shell + bomb)
    names = [f"/{s}/{m}" for s, ms in METHODS.items() for m in ms]
    for port in listening_ports(cluster):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for name in names:
                with contextlib.suppress(grpc.RpcError):
                    call = channel.unary_stream(name)(bomb, timeout=0.2, metadata=METADATA)
                    next(iter(call), None)
    assert not trace.exists()
    assert unpickled.read_text() == before
    pickle.loads(pickle.dumps(Bomb(trace)))  # noqa: S301 (the bomb itself works)
    assert trace.exists()


METHODS = {
    "pdserve.v1.Inference": (
        "Generate", "GenerateOnce", "Cancel", "Tokenize", "Detokenize", "ListModels", "GetCluster",
        "WatchCluster",
    ),
    "pdserve.control.v1.Control": ("Route", "Report", "GetCluster", "WatchCluster"),
    "pdserve.worker.v1.Worker": ("Attach", "Link"),
    "grpc.reflection.v1alpha.ServerReflection": ("ServerReflectionInfo",),
    "grpc.health.v1.Health": ("Check",),
}  # fmt: skip


def throw(port: int, data: bytes) -> None:
    """Send bytes and close; what becomes of the connection is the port's business."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as thrown:
        thrown.sendall(data)
        thrown.shutdown(socket.SHUT_WR)
        thrown.settimeout(0.05)
        thrown.recv(4096)


def test_nothing_but_health_opens_without_a_key(cluster, canary):
    """CASES S-05: each route of the document, each method that reflection tells."""
    with httpx.Client(base_url=cluster.http) as http:
        document = http.get("/openapi.json", headers=BEARER).json()
        assert len(document["paths"]) >= 8
        for path in [*document["paths"], "/openapi.json", "/nowhere"]:
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
                status = http.request(method, path).status_code
                is_open = path.startswith("/health/")
                assert (status in (200, 405)) if is_open else status == 401, (method, path)
    with grpc.insecure_channel(cluster.grpc) as channel:
        for service in reflected(channel):
            for method in METHODS[service]:
                call = channel.unary_stream(f"/{service}/{method}")(b"", timeout=5)
                with contextlib.suppress(grpc.RpcError):
                    next(iter(call), None)
                is_open = service == "grpc.health.v1.Health"
                code = grpc.StatusCode.OK if is_open else grpc.StatusCode.UNAUTHENTICATED
                assert call.code() is code, (service, method)


def reflected(channel) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    (answer,) = stub.ServerReflectionInfo(asked, metadata=METADATA, timeout=5)
    names = [service.name for service in answer.list_services_response.service]
    assert "pdserve.v1.Inference" in names
    return names


def test_no_log_and_no_answer_holds_a_key(cluster, canary, caplog):
    """CASES S-06: good calls, bad calls and bad keys, over both doors; router at DEBUG."""
    caplog.set_level(logging.DEBUG)
    wrong = "sk-wrong-0123456789"
    texts = [complete(cluster).text, complete(cluster, max_tokens=-1).text]
    for path in ("/v1/models", "/nowhere", "/metrics", "/v1/cluster"):
        for headers in (BEARER, {"authorization": f"Bearer {wrong}"}):
            texts.append(httpx.get(f"{cluster.http}{path}", headers=headers).text)
    with Client(cluster.grpc, api_key=KEY) as client:
        assert list(client.generate(prompt="hi", max_tokens=2))
    with Client(cluster.grpc, api_key=wrong) as client, pytest.raises(errors.Unauthenticated) as no:
        client.models()
    ours = ("router", "cluster", "uvicorn", "fastapi")
    logged = [r.getMessage() for r in caplog.records if r.name.startswith(ours)]
    logs = [path.read_text() for path in cluster.folder.glob("*.log")]
    assert any("handoff=" in text for text in logs), "nothing was logged"
    for text in (*texts, *logged, *logs, str(no.value)):
        assert KEY not in text
        assert wrong not in text


def test_the_fault_seam_is_shut(cluster, canary):
    """CASES S-07: without its flag there is nothing to call, on no port."""
    for port in listening_ports(cluster):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/pdserve.faults.v1.Faults/Set")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=1, metadata=METADATA)
            assert refused.value.code() in {
                grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            }, port  # fmt: skip


def test_no_address_of_a_client_is_dialled(cluster, canary):
    """CASES S-08, S-15: internal fields and tensors are refused; nobody connects to a stranger."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        where = f"http://127.0.0.1:{port}/"
        refused = {
            "kv_transfer_params": {"remote_host": "127.0.0.1", "remote_port": port},
            "bootstrap_host": "127.0.0.1", "remote_host": "127.0.0.1", "remote_port": port,
            "target_worker": f"127.0.0.1:{port}", "output_ids": [1, 2], "handoff_id": "x",
            "prompt_embeds": "gASVAAAA", "disagg_prefill_resp": {"host": where},
        }  # fmt: skip
        for name, value in refused.items():
            answer = complete(cluster, **{name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        ignored = {"callback_url": where, "metadata": {"url": where}, "user": f"127.0.0.1:{port}"}
        assert complete(cluster, **ignored).status_code == 200
        image = [{"type": "image_url", "image_url": {"url": where}}]
        answer = httpx.post(
            f"{cluster.http}/v1/chat/completions", headers={**BEARER, "x-forwarded-host": where},
            json={"messages": [{"role": "user", "content": image}]},
        )  # fmt: skip
        assert answer.status_code == 400
        with grpc.insecure_channel(cluster.grpc) as channel:
            # A field that the message doesn't have: number 99, with an address in it.
            strange = b"\x9a\x06" + bytes([len(where)]) + where.encode()
            message = pb.GenerateRequest(prompt="hi", max_tokens=1).SerializeToString() + strange
            call = channel.unary_stream("/pdserve.v1.Inference/Generate")
            assert list(call(message, metadata=METADATA, timeout=30))
        listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listener.accept()


def cached(cluster, prompt: list[int], headers) -> tuple[int, float]:
    """Ask for one token after a prompt; how much of it was cached, and how long it took."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    began = time.monotonic()
    answer = httpx.post(f"{cluster.http}/v1/completions", json=body, headers=headers, timeout=30)
    took = time.monotonic() - began
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], took


def test_nobody_is_told_what_another_tenant_has_cached(cluster, canary):
    """CASES S-12, P-18: the first tenant finds its own prompt, the other one nothing of it."""
    prompt = list(range(20, 84))
    assert [cached(cluster, prompt, BEARER)[0] > 0 for _ in range(2)] == [False, True]
    assert [cached(cluster, prompt, EVIL_BEARER)[0] > 0 for _ in range(2)] == [False, True]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_times_do_not_tell_what_another_tenant_has_cached(cluster, canary):
    """CASES S-12: over 500 pairs, a prompt that was guessed takes as long as one that was not."""
    draw = random.Random(12)
    guessed, random_ones = [], []
    for number in range(500):
        secret, other = ([draw.randrange(10, 90) for _ in range(96)] for _ in range(2))
        assert cached(cluster, secret, BEARER)[0] == 0
        pair = [(guessed, secret), (random_ones, other)]
        for times, prompt in pair if number % 2 else reversed(pair):
            num_cached, took = cached(cluster, prompt, EVIL_BEARER)
            assert num_cached == 0
            times.append(took)
    assert cached(cluster, secret, BEARER)[0] > 0  # there was something to find
    slower = sum((a > b) + 0.5 * (a == b) for a in guessed for b in random_ones)
    # Its standard deviation is 0.018 where there is no difference.
    assert slower / 500**2 == pytest.approx(0.5, abs=0.06)


def crowd(cluster, num: int, *, half_open: bool) -> list[socket.socket]:
    """Sockets that ask for a stream and read nothing of it, or that say half of a head.

    They have an address of their own, with its own share of connections.
    """
    body = json.dumps({**ASK, "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %s\r\n" % EVIL.encode()
    )
    whole = head + b"content-length: %d\r\n\r\n" % len(body) + body
    endpoints = cluster.config.endpoints
    sockets = []
    for _ in range(num):
        each = socket.socket()
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        each.bind(("127.0.0.2", 0))
        each.connect((endpoints.host, endpoints.http_port))
        with contextlib.suppress(ConnectionError):  # refused: it has its share
            each.sendall(head if half_open else whole)
        sockets.append(each)
    return sockets


@pytest.mark.slow
@pytest.mark.parametrize("num", [300])
def test_a_crowd_that_never_reads_holds_nobody_up(num, cluster, canary):
    """CASES S-14: streams of one key that nobody reads, over HTTP and gRPC, and half-open heads."""
    started = time.monotonic()
    alone = complete(cluster, max_tokens=40).elapsed.total_seconds()
    before = psutil.Process().memory_info().rss
    silent = crowd(cluster, num, half_open=False) + crowd(cluster, num, half_open=True)
    evil = tuple(EVIL_BEARER.items())
    channel = grpc.insecure_channel(cluster.grpc)
    stub = pb_grpc.InferenceStub(channel)
    ask = pb.GenerateRequest(prompt="hi", max_tokens=400, ignore_eos=True)
    calls = [stub.Generate(ask, metadata=evil) for _ in range(num)]  # read by nobody
    try:
        waits = []
        for _ in range(10):
            answer = complete(cluster, max_tokens=40)
            assert answer.status_code == 200, answer.text
            waits.append(answer.elapsed.total_seconds())
        assert sorted(waits)[5] < 10 * alone + 1.0
        assert psutil.Process().memory_info().rss - before < 200 << 20
    finally:
        for each in silent:
            each.close()
        for call in calls:
            call.cancel()
        channel.close()
    assert time.monotonic() - started < 60
    until_quiet(cluster)


def until_quiet(cluster, timeout_s: float = 20) -> None:
    until = time.monotonic() + timeout_s
    while any(w.report.held_grants for w in cluster.view().workers):
        assert time.monotonic() < until, "work goes on"
        threading.Event().wait(0.05)
