"""Pools that are too small for what is asked: all of it moves on, and nothing is kept."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import time

import pytest

from cluster.config import Preemption, Role
from tests.e2e.plain_cluster import make_config, wait_until, with_pool
from tests.e2e.process_cluster import fault, process_cluster
from tests.e2e.streams import Prompts, Stream

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
STORM = 100
ROUNDS = 5
LONGEST_S = 3.0
IDLE_SLACK_S = 0.3
"""Two cores run the test's hundred threads too."""


def pair(model, *, prefill_blocks: int, decode_blocks: int, **options):
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    config = make_config(model, pools, **options)
    config = with_pool(config, "prefill", kv_tokens=16 * prefill_blocks, chunk_tokens=64)
    return with_pool(config, "decode", kv_tokens=16 * decode_blocks)


def test_an_abort_storm_leaves_an_idle_cluster(tiny_llama, tmp_path):
    """CASES P-12: five rounds of 100 prompts, each left at a random moment; then one probe.

    The pools hold a dozen of them, so that those that were left would fill them many times over.
    """
    draw = random.Random(12)
    num_prompt = 400
    storm = [[draw.randrange(5, 500) for _ in range(num_prompt)] for _ in range(STORM)]
    probes = Prompts(tiny_llama, ROUNDS + 3, num_prompt=num_prompt, num_tokens=16)
    config = pair(tiny_llama, prefill_blocks=320, decode_blocks=320, max_num_seqs=16)
    with process_cluster(config, tiny_llama, tmp_path, num_routers=2) as cluster:
        idle_s = max(_probe(cluster, probes, number) for number in range(3))
        took: list[float] = []
        for number in range(ROUNDS):
            _storm(cluster, storm, draw)
            ended_at = time.monotonic()
            cluster.wait_quiet(5)
            took.append(time.monotonic() - ended_at)
            assert _probe(cluster, probes, number + 3) <= 2 * idle_s + IDLE_SLACK_S
        assert max(took) < 5, took
        assert max(took[-2:]) <= 2 * max(took[:2]) + 1, f"each round leaves something: {took}"
        aborted = sum(
            cluster.metrics(router).total("pdserve_requests_aborted_total")
            for router in cluster.routers
        )
        assert aborted >= ROUNDS * STORM * 0.5, "they were through before they left"


def _storm(cluster, storm: list[list[int]], draw: random.Random) -> None:
    addresses = [doors.grpc for doors in cluster.routers.values()]
    streams = [
        Stream(addresses[i % 2], prompt, 600, deadline_s=60) for i, prompt in enumerate(storm)
    ]
    leaving = [threading.Timer(draw.uniform(0, LONGEST_S), stream.leave) for stream in streams]
    for stream, timer in zip(streams, leaving, strict=True):
        stream.start()
        timer.start()
    for stream, timer in zip(streams, leaving, strict=True):
        timer.join()
        stream.wait_end()


def _probe(cluster, probes: Prompts, number: int) -> float:
    stream = probes.stream(cluster.grpc, number)
    stream.wait_end()
    probes.check(number, stream)
    return stream.seconds


def check_progress(prompts: Prompts, streams: list[Stream], patience_s: float = 5.0) -> None:
    """Some token within any five seconds while there is work, and everything ends right."""
    for number, stream in enumerate(streams):
        stream.wait_end(60)
        prompts.check(number, stream)
    instants = sorted(t for stream in streams for t in stream.times)
    gaps = [b - a for a, b in itertools.pairwise(instants)]
    assert max(gaps) < patience_s


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
def test_a_full_decode_pool_lets_everybody_through(preemption, tiny_llama, tmp_path):
    """CASES P-16: one grows, one is half transferred, others wait for half of the pool.

    Nobody holds decode memory for a prompt that is only queued, and whoever is refused waits at
    the prefill worker: both are seen to happen.
    """
    prompts = Prompts(tiny_llama, 6, num_prompt=320, num_tokens=200)
    config = pair(tiny_llama, prefill_blocks=320, decode_blocks=60, max_num_seqs=8)
    scheduling = dataclasses.replace(config.scheduling, preemption=preemption)
    config = dataclasses.replace(config, scheduling=scheduling)
    with process_cluster(config, tiny_llama, tmp_path) as cluster:
        streams = [prompts.stream(cluster.grpc, n, deadline_s=60) for n in range(6)]
        check_progress(prompts, streams)
        cluster.wait_quiet()
        decode = next(w for w in cluster.view().workers if w.worker.worker_id == "decode-0")
        redirected = cluster.metrics().total("pdserve_attempts_redirected_total")
        assert decode.report.counters["preemptions"] + redirected > 0, "there was room"
        if preemption is Preemption.SWAP:
            assert decode.report.counters["preemptions_swapped"] > 0


def test_a_prefill_pool_full_of_exports_lets_everybody_through(tiny_llama, tmp_path):
    """CASES P-16: the mirror: finished prompts wait for a decode worker that is full."""
    prompts = Prompts(tiny_llama, 6, num_prompt=320, num_tokens=60)
    config = pair(tiny_llama, prefill_blocks=48, decode_blocks=48, max_num_seqs=8)
    with process_cluster(config, tiny_llama, tmp_path) as cluster:
        # STEP 1: the decode worker stands still, so that exports pile up.
        decode = cluster.faults("decode-0")
        decode.set(fault("hold", "engine.step"))
        streams = [prompts.stream(cluster.grpc, n, deadline_s=60) for n in range(6)]
        decode.wait_fired()
        wait_until(
            lambda: sum(len(s.tokens) for s in streams) >= 2, 10, "no second prompt was prefilled"
        )
        # STEP 2: it goes on.
        decode.clear()
        check_progress(prompts, streams)
        cluster.wait_quiet()
