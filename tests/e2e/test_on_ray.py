"""What a user does with a cluster on Ray: OpenAI client, gRPC client, commands, bad input."""

import asyncio
import json
import os
import subprocess
import time

import grpc
import httpx
import openai
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster import errors
from cluster.control.status import get_cluster
from deploy.client import Client
from deploy.run_state import RunState
from tests.e2e import reference
from tests.e2e.plain_cluster import free_ports
from tests.e2e.ray_cluster import PDSERVE

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]
PROMPT_IDS = list(range(40, 90))


@pytest.fixture(scope="module")
def client(on_ray):
    with Client(on_ray.grpc) as client:
        yield client


@pytest.fixture(scope="module")
def openai_client(on_ray):
    with openai.OpenAI(base_url=f"{on_ray.http}/v1", api_key="none") as client:
        yield client


def wait_until(is_true, timeout_s: float, what: str) -> None:
    """Poll a condition of another process that has no event to wait for."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def view_of(cluster):
    return asyncio.run(get_cluster(cluster.control, timeout_s=5.0))


def is_quiet(cluster) -> bool:
    """CASES §0 Q: nothing runs, nothing waits, every block is free or cached."""
    view = view_of(cluster)
    return view.num_waiting == view.num_granted == 0 and all(
        w.report.num_running == w.report.num_waiting == w.report.num_transferring == 0
        and w.report.blocks.available == w.worker.num_blocks
        for w in view.workers
    )


def test_chat_streams_what_it_answers_at_once(openai_client):
    """The openai client, streaming and not, over two pools on Ray."""
    ask = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Tell me about the harbour"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = openai_client.chat.completions.create(**ask)
    assert whole.usage.completion_tokens <= 24
    assert whole.choices[0].finish_reason in {"stop", "length"}
    chunks = list(
        openai_client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    counts = [(u.prompt_tokens, u.completion_tokens) for u in (chunks[-1].usage, whole.usage)]
    assert counts[0] == counts[1], "but for what was cached"


def test_completions_equal_transformers(openai_client, on_ray, tiny_llama):
    """CASES P-13 on Ray, over HTTP and gRPC alike."""
    expected = reference.greedy(tiny_llama, [PROMPT_IDS], 16).tokens[0]
    answer = openai_client.completions.create(
        model="tiny",
        prompt=PROMPT_IDS,
        max_tokens=16,
        temperature=0,
        extra_body={"ignore_eos": True, "timeline": True},
    )
    timeline = answer.model_extra["pdserve"]["timeline"]
    assert timeline["prefill_worker"].startswith("prefill-")
    assert timeline["decode_worker"].startswith("decode-")
    assert timeline["prefill"]["transfer_bytes"] > 0
    with Client(on_ray.grpc) as client:
        pieces = list(
            client.generate(
                prompt_ids={"ids": PROMPT_IDS}, max_tokens=16, temperature=0.0, ignore_eos=True
            )
        )
    assert [token for piece in pieces for token in piece.token_ids] == expected
    assert "".join(piece.text for piece in pieces) == answer.choices[0].text


def test_seeded_requests_repeat(client):
    """CASES P-04: the seed belongs to the request, whichever workers it meets."""
    ask = {"prompt_ids": {"ids": PROMPT_IDS}, "max_tokens": 16, "temperature": 0.9}
    answers = {
        tuple(t for piece in client.generate(**ask, seed=7) for t in piece.token_ids)
        for _ in range(4)
    }
    assert len(answers) == 1
    others = {
        tuple(t for piece in client.generate(**ask) for t in piece.token_ids) for _ in range(3)
    }
    assert len(others) > 1


def test_first_token_only_needs_no_decode_worker(client):
    """CASES P-01: max_tokens 1 gives one token and places no decode leg."""
    *_, last = client.generate(
        prompt_ids={"ids": PROMPT_IDS}, max_tokens=1, temperature=0.0, timeline=True
    )
    assert (last.finish_reason, last.usage.completion_tokens) == ("length", 1)
    assert last.timeline.decode_worker == ""


def num_aborted_decodes(cluster) -> float:
    workers = (w for w in view_of(cluster).workers if w.worker.pool == "decode")
    return sum(w.report.counters["legs_aborted"] for w in workers)


@pytest.mark.parametrize("door", ["http", "grpc-cancel", "grpc-leave"])
def test_leaving_stops_the_work_on_both_workers(door, client, on_ray):
    """CASES P-11: a disconnect or a cancel in mid-stream gives everything back."""
    before = num_aborted_decodes(on_ray)
    if door == "http":
        body = {"model": "tiny", "prompt": PROMPT_IDS, "max_tokens": 900, "stream": True}
        with httpx.stream(
            "POST", f"{on_ray.http}/v1/completions", json=body | {"ignore_eos": True}, timeout=30
        ) as response:
            next(response.iter_lines())
    else:
        pieces = client.generate(prompt_ids={"ids": PROMPT_IDS}, max_tokens=900, ignore_eos=True)
        first = next(pieces)
        if door == "grpc-leave":
            pieces.close()
        else:
            assert client.cancel(first.request_id)
            with pytest.raises(errors.Cancelled):
                list(pieces)
            assert not client.cancel(first.request_id)
    wait_until(lambda: num_aborted_decodes(on_ray) > before, 5, "decode was not told")
    wait_until(lambda: is_quiet(on_ray), 5, "work goes on after the client left")


BAD_COMPLETIONS = [
    (b'{"model": "tiny", "prompt": "a", "max_tokens": -1}', 400, "max_tokens"),
    (b'{"model": "tiny", "prompt": [5], "max_tokens": 2000}', 400, "max_tokens"),
    (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400, None),
    (b'{"model": "tiny", "prompt": "a"', 400, None),
    (b'{"model": "other", "prompt": "a"}', 404, "model"),
]


@pytest.mark.parametrize(
    ("path", "content", "status", "param"),
    [
        *(("/v1/completions", *case) for case in BAD_COMPLETIONS),
        ("/v1/chat/completions", b'{"model": "tiny", "messages": "hi"}', 400, "messages"),
        ("/v1/nothing", b"{}", 404, None),
    ],
)
def test_bad_input_gets_an_openai_error(path, content, status, param, on_ray):
    """CASES P-10 at the HTTP door."""
    answer = httpx.post(
        f"{on_ray.http}{path}", content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param:
        assert error["param"] == param


def test_ready_live_models_metrics(on_ray):
    assert httpx.get(f"{on_ray.http}/health/live").status_code == 200
    assert httpx.get(f"{on_ray.http}/health/ready").status_code == 200
    models = httpx.get(f"{on_ray.http}/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert "pdserve_" in httpx.get(f"{on_ray.http}/metrics").text


@pytest.mark.parametrize(
    ("door", "service"),
    [("grpc", "pdserve.v1.Inference"), ("control", "pdserve.control.v1.Control")],
)
def test_health_and_reflection(door, service, on_ray):
    """Each door tells its own service, by name, and nothing of the other's."""
    with grpc.insecure_channel(getattr(on_ray, door)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", service):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (listed,) = reflection.ServerReflectionInfo(iter([ask]), timeout=5)
        names = {each.name for each in listed.list_services_response.service}
        assert {name for name in names if name.startswith("pdserve.")} == {service}
        assert names - {service} == {
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }


def test_status_and_generate_commands(on_ray):
    shown = on_ray.command("status", "--json")
    assert shown.returncode == 0, shown.stderr
    view = json.loads(shown.stdout)
    assert {w["worker"]["worker_id"] for w in view["workers"]} == {
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
    }
    assert "decode-1" in on_ray.command("status").stdout
    generated = on_ray.command("generate", "Tell me", "--max-tokens", "8")
    assert generated.returncode == 0, generated.stderr
    assert "transfer" in generated.stdout


def test_second_cluster_is_refused(on_ray):
    """A second cluster on ports of the first is refused at once, with who holds them."""
    same = on_ray.command("serve", "--once")
    assert (same.returncode, "running already" in same.stderr) == (1, True), same.stderr
    (other,) = free_ports(1)
    taken = on_ray.command("serve", "--once", "--set", f"endpoints.control_port={other}")
    assert (taken.returncode, str(on_ray.config.endpoints.http_port) in taken.stderr) == (1, True)


def test_workers_are_pinned_to_their_pools_cores(on_ray):
    """Each worker is a process of its own, and all its threads stay on the core of its place."""
    workers = [w.worker for w in view_of(on_ray).workers]
    assert len({worker.pid for worker in workers}) == 4
    for worker in workers:
        core = on_ray.config.pool(worker.pool).cores[int(worker.worker_id.rpartition("-")[2])]
        threads = psutil.Process(worker.pid).threads()
        assert len(threads) > 1
        assert {frozenset(os.sched_getaffinity(thread.id)) for thread in threads} == {
            frozenset({core})
        }, worker.worker_id


def test_all_that_is_no_worker_is_on_the_service_cores(on_ray):
    """Routers, control plane and Ray's own processes leave the workers' cores alone."""
    workers = {w.worker.pid for w in view_of(on_ray).workers}
    others = {p.pid for p in RunState(on_ray.config.endpoints.control_port).started()} - workers
    cores = set(on_ray.config.service_cores)
    assert len(others) > 5
    assert {pid for pid in others if os.sched_getaffinity(pid) != cores} == set()


def test_one_process_proves_itself_and_ends(tiny_llama):
    """The config without Ray: the proof shows its answer, its timeline and a handoff."""
    http, grpc_port, control = free_ports(3)
    command = [
        *PDSERVE, "serve", "--once",
        "--config", "deploy/configs/inline.yaml", "--model", str(tiny_llama),
        "--set", f"endpoints.http_port={http}",
        "--set", f"endpoints.grpc_port={grpc_port}",
        "--set", f"endpoints.control_port={control}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prefill-0 -> decode-0" in done.stdout
