"""A decode worker that is lost or stands still: what was computed for it is not computed again.

And a router that stands still: it blames nobody for what its absence cost.
"""

from __future__ import annotations

import dataclasses
import threading
import time

import httpx
import pytest

from cluster.config import Role
from tests.e2e.plain_cluster import make_config, wait_until
from tests.e2e.process_cluster import fault, process_cluster
from tests.e2e.streams import Prompts

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
NUM_PROMPT, NUM_TOKENS = 96, 64
LEASE_S = 1.0
DECODES = ("decode-0", "decode-1")
SLOW_STEPS = fault("delay", "engine.step", times=0, seconds=0.02)


@pytest.fixture(scope="module")
def prompts(tiny_llama):
    return Prompts(tiny_llama, 4, num_prompt=NUM_PROMPT, num_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def cluster(tiny_llama, tmp_path_factory):
    config = make_config(tiny_llama, {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 2)})
    limits = dataclasses.replace(config.limits, export_lease_s=LEASE_S)
    config = dataclasses.replace(config, limits=limits)
    with process_cluster(config, tiny_llama, tmp_path_factory.mktemp("redirect")) as running:
        yield running


class Completion(threading.Thread):
    """One greedy completion; its answer tells where it ran."""

    def __init__(self, cluster, prompt: list[int]) -> None:
        super().__init__(daemon=True)
        self._url = f"{cluster.http}/v1/completions"
        self._body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "temperature": 0.0,
            "timeline": True,
        }
        self.answer: dict = {}
        self.start()

    def run(self) -> None:
        self.answer = httpx.post(self._url, json=self._body, timeout=30).json()

    def wait_end(self) -> dict:
        """Return the timeline of one that ended well."""
        self.join(30)
        assert "error" not in self.answer, self.answer
        assert self.answer["usage"]["completion_tokens"] == NUM_TOKENS
        return self.answer["pdserve"]["timeline"]

    @property
    def text(self) -> str:
        return self.answer["choices"][0]["text"]


def counters(cluster) -> dict[str, dict[str, float]]:
    return {w.worker.worker_id: dict(w.report.counters) for w in cluster.view().workers}


def holder_of(cluster, timeout_s: float = 10.0) -> str:
    """Return the decode worker at which the fault happened, and clear it at the other one."""
    until = time.monotonic() + timeout_s
    while not (held := [name for name in DECODES if cluster.faults(name).fired()[0]]):
        assert time.monotonic() < until, "the fault did not happen"
        time.sleep(0.01)
    for name in DECODES:
        if name not in held:
            cluster.faults(name).clear()
    return held[0]


def check_redirected(cluster, timeline: dict, before: dict[str, dict[str, float]]) -> None:
    """One attempt, two handoffs, one prefill."""
    told = {name: timeline[name] for name in ("num_attempts", "num_resumed", "num_redirected")}
    assert told == {"num_attempts": 1, "num_resumed": 0, "num_redirected": 1}
    after = counters(cluster)

    def grown(worker_id: str, name: str) -> float:
        return after[worker_id][name] - before[worker_id][name]

    assert grown("prefill-0", "prefilled_tokens") == NUM_PROMPT
    assert grown("prefill-0", "exports_redirected") == 1
    assert grown("prefill-0", "transfers_ok") == 1
    taker = timeline["decode_worker"]
    assert grown(taker, "imports_ok") == 1
    assert grown(taker, "prefilled_tokens") == 0


def test_an_export_outlives_the_decode_worker_that_dies_before_its_commit(cluster, prompts):
    """CASES P-20: it has the bytes and says nothing; the other one gets them, computed once."""
    before = counters(cluster)
    for name in DECODES:
        cluster.faults(name).set(fault("hold", "data.received"))
    completion = Completion(cluster, prompts.prompts[0])
    victim = holder_of(cluster)
    cluster.kill(victim)
    timeline = completion.wait_end()
    assert timeline["decode_worker"] in set(DECODES) - {victim}
    cluster.wait_quiet()
    check_redirected(cluster, timeline, before)
    cluster.restart(victim)
    cluster.wait_whole()
    cluster.wait_quiet()
    again = Completion(cluster, prompts.prompts[0])
    assert again.wait_end()["num_redirected"] == 0
    assert again.text == completion.text


def test_an_export_whose_offer_was_lost_is_offered_again(cluster, prompts):
    """Nobody died: the offer got no answer within the lease, and whoever takes it next may be the
    same worker."""
    before = counters(cluster)
    for name in DECODES:
        cluster.faults(name).set(fault("drop", "signal.offer"))
    completion = Completion(cluster, prompts.prompts[1])
    holder_of(cluster)
    timeline = completion.wait_end()
    cluster.clear_faults()
    cluster.wait_quiet()
    check_redirected(cluster, timeline, before)
    again = Completion(cluster, prompts.prompts[1])
    assert again.wait_end()["num_redirected"] == 0
    assert again.text == completion.text


def test_a_decode_worker_that_stands_still_in_mid_stream_is_replaced(cluster, prompts):
    """CASES P-20: SIGSTOP for as long as the stream takes, then SIGCONT: not a token is lost, and
    the worker is back without a restart, with nothing of the old leg."""
    pids = {name: cluster.pid(name) for name in cluster.processes}
    for name in DECODES:
        cluster.faults(name).set(SLOW_STEPS)
    stream = prompts.stream(cluster.grpc, 2)
    stream.wait_tokens(8)
    victim = next(
        w.worker.worker_id
        for w in cluster.view().workers
        if w.worker.pool == "decode" and w.report.num_running
    )
    num_before = len(stream.tokens)
    with cluster.stopped(victim):
        stream.wait_end()
    prompts.check(2, stream)
    assert num_before < NUM_TOKENS
    assert 1.0 < stream.longest_gap_s < 7.0, "it did not stand still, or was missed for too long"
    assert cluster.metrics().total("pdserve_requests_resumed_total") == 1
    cluster.wait_whole()
    assert {name: cluster.pid(name) for name in cluster.processes} == pids
    cluster.clear_faults()
    cluster.wait_quiet()
    for _ in DECODES:
        late = prompts.stream(cluster.grpc, 3)
        late.wait_end()
        prompts.check(3, late)
    cluster.wait_quiet()


def test_a_router_that_was_away_during_a_handoff_blames_no_worker(tiny_llama, tmp_path, prompts):
    """Both workers have given it up meanwhile; a request ends with the second worker that dies."""
    config = make_config(tiny_llama, {"prefill": (Role.PREFILL, 2), "decode": (Role.DECODE, 2)})
    with process_cluster(config, tiny_llama, tmp_path) as cluster:
        for name in DECODES:
            cluster.faults(name).set(fault("hold", "data.received"))
        stream = prompts.stream(cluster.grpc, 0, deadline_s=30)
        stream.wait_tokens(1)
        holder_of(cluster)
        with cluster.stopped("router-0"):
            wait_until(
                lambda: not any(w.report.held_grants for w in cluster.view().workers),
                15,
                "the workers wait for it",
            )
        for name in DECODES:
            cluster.faults(name).clear()
        stream.wait_end(30)
        prompts.check(0, stream)
        assert cluster.metrics().total("pdserve_requests_resumed_total") == 1
        cluster.wait_quiet()
