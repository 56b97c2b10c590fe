"""Pools that are too small for what is asked: all of it moves on, and nothing is kept."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import threading
import time

import psutil
import pytest

from cluster.config import Preemption
from tests.e2e.plain_cluster import wait_until
from tests.e2e.process_cluster import fault, process_cluster
from tests.e2e.streams import Prompts, Stream
from tests.e2e.tight_pools import check_progress, is_pinned, pair, report_of, slow_steps

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
STORM, NUM_STORM_TOKENS = 100, 600
ROUNDS = 5
LONGEST_S = 3.0
NUM_IDLE = 4
NUM_PROBE_TOKENS = 120
"""So many that a probe takes long enough for twice as long to say something."""
BUSY = 1.25
"""Rounds of the same storm may differ by this, on a machine that runs its hundred threads too."""
WINDOW = 3
NUM_MORE = 20
"""So many descriptors and threads a process may have more than before a hundred more have left."""
LEASE_S = 100.0


def test_an_abort_storm_leaves_an_idle_cluster(tiny_llama, tmp_path):
    """CASES P-12: five rounds of 100 prompts, each left at a random moment; at once one probe.

    The pools hold a dozen of them, so that those that were left would fill them many times over.
    Nothing waits for a timer: the leases are longer than the whole test.
    """
    draw = random.Random(12)
    num_prompt = 400
    storm = [[draw.randrange(5, 500) for _ in range(num_prompt)] for _ in range(STORM)]
    leaves = [draw.uniform(0, LONGEST_S) for _ in storm]
    probes = Prompts(
        tiny_llama, ROUNDS + NUM_IDLE, num_prompt=num_prompt, num_tokens=NUM_PROBE_TOKENS
    )
    config = pair(tiny_llama, prefill_blocks=320, decode_blocks=320, max_num_seqs=16)
    limits = dataclasses.replace(config.limits, export_lease_s=LEASE_S)
    config = dataclasses.replace(config, limits=limits)
    with process_cluster(config, tiny_llama, tmp_path, num_routers=2) as cluster:
        # The first one finds no link and cold code.
        idle_s = max([_probe(cluster, probes, number) for number in range(NUM_IDLE)][1:])
        took: list[float] = []
        kept = _num_kept(cluster)
        for number in range(NUM_IDLE, NUM_IDLE + ROUNDS):
            began_at = time.monotonic()
            _storm(cluster, storm, leaves)
            stormed_at, before = time.monotonic(), _num_computed(cluster)
            _probe(cluster, probes, number)
            assert time.monotonic() - stormed_at <= 2 * idle_s, "it waited for what was left"
            took.append(time.monotonic() - began_at)
            cluster.wait_quiet(5)
            num_more = _num_computed(cluster) - before - num_prompt - NUM_PROBE_TOKENS
            assert num_more < num_prompt + NUM_STORM_TOKENS, "one that was left was computed on"
            was_kept, kept = kept, _num_kept(cluster)
            grown = {name: num - was_kept[name] for name, num in kept.items()}
            assert number == NUM_IDLE or max(grown.values()) < NUM_MORE, f"it keeps more: {grown}"
        medians = [statistics.median(took[i : i + WINDOW]) for i in range(len(took) - WINDOW + 1)]
        for median, later in itertools.pairwise(medians):
            assert later <= BUSY * median, f"each round leaves something: {took}"
        assert sum(took) < LEASE_S, "a lease may have run out"
        aborted = sum(
            cluster.metrics(router).total("pdserve_requests_aborted_total")
            for router in cluster.routers
        )
        assert aborted >= ROUNDS * STORM * 0.5, "they were through before they left"


def _storm(cluster, storm: list[list[int]], leaves: list[float]) -> None:
    addresses = [doors.grpc for doors in cluster.routers.values()]
    streams = [
        Stream(addresses[i % 2], prompt, NUM_STORM_TOKENS, deadline_s=60)
        for i, prompt in enumerate(storm)
    ]
    leaving = [
        threading.Timer(at_s, stream.leave) for at_s, stream in zip(leaves, streams, strict=True)
    ]
    for stream, timer in zip(streams, leaving, strict=True):
        stream.start()
        timer.start()
    for stream, timer in zip(streams, leaving, strict=True):
        timer.join()
        stream.wait_end()


def _num_computed(cluster) -> float:
    """Tokens of prompts and outputs, on all workers."""
    counters = [worker.report.counters for worker in cluster.view().workers]
    return sum(each["prefilled_tokens"] + each["generated_tokens"] for each in counters)


def _num_kept(cluster) -> dict[str, int]:
    """Descriptors and threads, by process."""
    processes = {name: psutil.Process(cluster.pid(name)) for name in cluster.processes}
    return {name: each.num_fds() + each.num_threads() for name, each in processes.items()}


def _probe(cluster, probes: Prompts, number: int) -> float:
    stream = probes.stream(cluster.grpc, number)
    stream.wait_end()
    probes.check(number, stream)
    return stream.seconds


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
def test_a_full_decode_pool_lets_everybody_through(preemption, tiny_llama, tmp_path):
    """CASES P-16: one has 60 % and grows, one is half transferred, one waits for half of the pool.

    Nobody holds decode memory for a prompt that is only queued; and those who decode give way to
    one another.
    """
    grows = Prompts(tiny_llama, 1, num_prompt=512, num_tokens=300)
    moves = Prompts(tiny_llama, 2, num_prompt=288, num_tokens=200)
    waits = Prompts(tiny_llama, 3, num_prompt=480, num_tokens=60)
    config = pair(tiny_llama, prefill_blocks=320, decode_blocks=60, max_num_seqs=8)
    scheduling = dataclasses.replace(config.scheduling, preemption=preemption)
    config = dataclasses.replace(config, scheduling=scheduling)
    with process_cluster(config, tiny_llama, tmp_path) as cluster:
        decode = cluster.faults("decode-0")
        # STEP 1: A has 36 of 60 blocks, and goes on slowly.
        decode.set(slow_steps(0.02))
        a = grows.stream(cluster.grpc, 0, deadline_s=60)
        a.wait_tokens(64)
        # STEP 2: B's transfer stands still, in the 18 blocks that are reserved for it.
        decode.set(slow_steps(0.02), fault("hold", "data.received"))
        b = moves.stream(cluster.grpc, 1, deadline_s=60)
        decode.wait_fired(1)
        wait_until(
            lambda: report_of(cluster, "decode-0").blocks.importing == 18, 5, "it has no blocks"
        )
        # STEP 3: C waits, and has nothing.
        c = waits.stream(cluster.grpc, 2, deadline_s=60)
        wait_until(lambda: cluster.view().num_waiting == 1, 5, "C does not wait")
        assert report_of(cluster, "decode-0").blocks.importing == 18, "B's alone"
        assert (a.ended_at, b.ended_at) == (0, 0)
        # STEP 4: B goes on.
        decode.set(slow_steps(0.02))
        check_progress([(grows, 0, a), (moves, 1, b), (waits, 2, c)])
        cluster.wait_quiet()
        counters = report_of(cluster, "decode-0").counters
        assert counters["preemptions"] > 0, "there was room for both"
        if preemption is Preemption.SWAP:
            assert counters["preemptions_swapped"] > 0


def test_a_prefill_pool_full_of_exports_lets_everybody_through(tiny_llama, tmp_path):
    """CASES P-16: the mirror: finished prompts fill the prefill pool, for a full decode worker.

    They were granted while it had room, and computed when it had not: it refuses them, they wait
    under their leases, and nobody else has room to prefill.
    """
    grow = Prompts(tiny_llama, 4, num_prompt=64, num_tokens=160)
    wait = Prompts(tiny_llama, 7, num_prompt=160, num_tokens=60)
    config = pair(tiny_llama, prefill_blocks=24, decode_blocks=60, max_num_seqs=8)
    limits = dataclasses.replace(config.limits, reserve_patience_s=0.3)
    config = dataclasses.replace(config, limits=limits)
    with process_cluster(config, tiny_llama, tmp_path) as cluster:
        prefill, decode = cluster.faults("prefill-0"), cluster.faults("decode-0")
        # STEP 1: Four decode on a few blocks. Two more get their grants, and are not begun yet.
        decode.set(slow_steps(0.05))
        growing = [grow.stream(cluster.grpc, number, deadline_s=60) for number in range(4)]
        for stream in growing:
            stream.wait_tokens(4)
        prefill.set(fault("hold", "leg.start"))
        pinned = [wait.stream(cluster.grpc, number, deadline_s=60) for number in (4, 5)]
        wait_until(lambda: cluster.view().num_granted == 6, 5, "there is no room for both")
        # STEP 2: The four have 52 of 60 blocks, and each of the two needs ten.
        decode.clear()
        for stream in growing:
            stream.wait_tokens(130)
        decode.set(slow_steps(0.1))
        prefill.clear()
        late = wait.stream(cluster.grpc, 6, deadline_s=60)
        wait_until(lambda: is_pinned(cluster), 10, "no export waits for the decode worker")
        assert late.tokens == []
        # STEP 3: The four end in time, and all go on.
        served = [(grow, number, stream) for number, stream in enumerate(growing)]
        waited = [(wait, number, each) for number, each in enumerate((*pinned, late), start=4)]
        check_progress(served + waited)
        cluster.wait_quiet()
        assert report_of(cluster, "decode-0").counters["offers_refused"] >= 2
        assert report_of(cluster, "prefill-0").counters["exports_redirected"] >= 2
        assert cluster.metrics().total("pdserve_attempts_redirected_total") >= 2
