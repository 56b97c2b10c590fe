"""A worker that is killed in mid-stream: the client's stream goes on as if nothing had been."""

from __future__ import annotations

import json
import threading

import httpx
import pytest

from cluster.config import Role
from tests.e2e.plain_cluster import plain_cluster, wait_until
from tests.factories_model import VOCAB_SIZE

pytestmark = pytest.mark.faults

POOLS = {"prefill": (Role.PREFILL, 2), "decode": (Role.DECODE, 2)}
NUM_TOKENS = 160
KILL_AT = 24
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    "penalties": {
        "temperature": 1.0,
        "seed": 11,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {"17": 2.0},
        "logprobs": 2,
    },
}


@pytest.fixture(scope="module")
def cluster(tiny_llama, tmp_path_factory):
    with plain_cluster(tiny_llama, tmp_path_factory.mktemp("resume"), POOLS) as running:
        yield running


class Stream:
    """One streamed completion: what came of it, and where it ran."""

    def __init__(self, cluster, **sampling) -> None:
        self.cluster = cluster
        self.body = {
            "model": "tiny",
            "prompt": [11 + number % (VOCAB_SIZE - 20) for number in range(40)],
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "timeline": True,
            **sampling,
        }
        self.text = ""
        self.logprobs: list[float] = []
        self.last: dict = {}
        self.num_chunks = 0
        self.last_reason = ""
        self.has_ended = False

    def read(self) -> Stream:
        with httpx.stream(
            "POST", f"{self.cluster.http}/v1/completions", json=self.body, timeout=60
        ) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self._take(line.removeprefix("data: "))
        return self

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.has_ended = True
            return
        self.last = json.loads(data)
        assert "error" not in self.last, self.last
        for choice in self.last["choices"]:
            self.text += choice["text"]
            self.last_reason = choice["finish_reason"] or self.last_reason
            if choice.get("logprobs"):
                self.logprobs += choice["logprobs"]["token_logprobs"]
            self.num_chunks += 1


def busy_worker(cluster, pool: str) -> str:
    """The worker of a pool that runs a sequence."""
    found = [
        view.worker.worker_id
        for view in cluster.view().workers
        if view.worker.pool == pool and view.report.num_running
    ]
    assert len(found) == 1, found
    return found[0]


def sampling_of(cluster, how: str) -> dict:
    if how != "stop":
        return SAMPLING[how]
    # A text that is met late and across tokens, and nowhere before.
    text = Stream(cluster, temperature=0.0).read().text
    found = (
        text[start : start + 9]
        for start in range(len(text) // 2, len(text) - 9)
        if text.index(text[start : start + 9]) == start
    )
    return {"temperature": 0.0, "stop": [next(found)]}


@pytest.mark.parametrize("how", [*SAMPLING, "stop"])
@pytest.mark.timeout(180)
def test_a_decode_worker_that_is_killed_in_mid_stream_is_invisible(cluster, how):
    """P-20: the joined text equals the undisturbed one; another process gave the rest."""
    sampling = sampling_of(cluster, how)
    expected = Stream(cluster, **sampling).read()
    assert expected.last["pdserve"]["timeline"]["num_resumed"] == 0

    stream = Stream(cluster, **sampling)
    reading = threading.Thread(target=stream.read)
    reading.start()
    wait_until(lambda: stream.num_chunks >= KILL_AT, 30, "the stream does not come")
    victim = busy_worker(cluster, "decode")
    num_before, victim_pid = stream.num_chunks, cluster.kill(victim)
    reading.join(60)
    assert stream.has_ended

    # The fault happened: it was killed amid the stream, and another worker went on.
    assert num_before < expected.num_chunks
    timeline = stream.last["pdserve"]["timeline"]
    assert (timeline["num_attempts"], timeline["num_resumed"]) == (2, 1)
    assert timeline["decode_worker"] != victim
    assert cluster.workers[timeline["decode_worker"]].pid != victim_pid

    assert stream.text == expected.text
    for name in ("prompt_tokens", "completion_tokens"):  # what was cached may differ
        assert stream.last["usage"][name] == expected.last["usage"][name]
    assert stream.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    if "stop" in sampling:
        assert stream.last_reason == expected.last_reason == "stop"
    if "logprobs" in sampling:
        assert len(stream.logprobs) == NUM_TOKENS

    cluster.start_worker("decode", victim)
    cluster.wait_ready(victim)
    wait_until(lambda: len(cluster.view().workers) == 4, 20, "the new worker is not seen")
    cluster.wait_quiet()
    assert cluster.metrics().total("pdserve_requests_failed_total") == 0
