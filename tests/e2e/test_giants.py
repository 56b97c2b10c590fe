"""Giant prompts through both halves, with steps of a known length: who waits, and for how long.

``tests/cluster/engine/test_giant_prompts.py`` counts the same in steps of one engine; here the
control plane lets them in, and their KV is handed over (CASES P-24).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import threading
import time

import pytest

from cluster.config import Policy, Role
from tests.e2e.plain_cluster import make_config, wait_until, with_pool
from tests.e2e.process_cluster import fault, process_cluster
from tests.e2e.streams import Prompts, Stream

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
CONTEXT, CHUNK = 512, 64
PREFILL_STEP_S, DECODE_STEP_S = 0.12, 0.04
"""So long that what else a step takes with the tiny model, and the machine's noise, is little."""
NUM_SHORT = 20
AGING_S = 1.0
PACE_S, MOMENT_S = 0.1, 0.2
PATIENCE_S = 60.0
"""Of the short ones that come while nobody is let in: their wait is expected to last on."""
MAX_SECOND_TOKEN_S = 1.0
"""After the first one, of whoever has its room on the decode worker: some steps there."""
SHORTS = {Policy.FCFS: {}, Policy.PRIORITY: {"priority": "high"}}
"""How the short ones ask, by policy."""


def step(seconds: float):
    return fault("delay", "engine.step", times=0, seconds=seconds)


def giant_config(model, policy: Policy, *, decode_blocks: int = 512):
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    config = make_config(model, pools, max_num_seqs=40, prefix_cache=False)
    config = with_pool(config, "prefill", chunk_tokens=CHUNK)
    config = with_pool(config, "decode", kv_tokens=16 * decode_blocks)
    scheduling = dataclasses.replace(config.scheduling, policy=policy, aging_s=AGING_S)
    limited = dataclasses.replace(config.model, max_model_len=CONTEXT)
    return dataclasses.replace(config, scheduling=scheduling, model=limited)


@dataclasses.dataclass(frozen=True)
class Asks:
    """Prompts of each kind, with what transformers says to them."""

    streams: Prompts
    giants: Prompts
    shorts: Prompts


@pytest.fixture(scope="module")
def asks(tiny_llama):
    return Asks(
        streams=Prompts(tiny_llama, 4, num_prompt=16, num_tokens=180),
        giants=Prompts(tiny_llama, 4, num_prompt=CONTEXT - 32, num_tokens=8),
        shorts=Prompts(tiny_llama, NUM_SHORT, num_prompt=12, num_tokens=4),
    )


def first_token_s(stream: Stream) -> float:
    return stream.times[0] - stream.started_at


def granted_at(stream: Stream) -> float:
    return stream.started_at + stream.timeline.queue_s


def gaps(streams: list[Stream], since: float, until: float) -> list[float]:
    """Times between tokens that came in that time, sorted."""
    instants = [[t for t in stream.times if since <= t < until] for stream in streams]
    return sorted(b - a for times in instants for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("policy", SHORTS)
def test_short_prompts_and_streams_hardly_notice_giants(policy, tiny_llama, asks, tmp_path):
    """CASES P-24: four giants, then 20 short prompts, while four streams decode."""
    with process_cluster(giant_config(tiny_llama, policy), tiny_llama, tmp_path) as cluster:
        cluster.faults("prefill-0").set(step(PREFILL_STEP_S))
        cluster.faults("decode-0").set(step(DECODE_STEP_S))
        # STEP 1: What it is like without giants.
        alone = asks.shorts.stream(cluster.grpc, 0)
        alone.wait_end()
        streams = [asks.streams.stream(cluster.grpc, number) for number in range(4)]
        for stream in streams:
            stream.wait_tokens(40)
        # STEP 2: The first giant is being computed when the short ones come.
        giants_at = time.monotonic()
        giants = []
        for number in range(4):
            giants.append(asks.giants.stream(cluster.grpc, number))
            there = len(streams) + len(giants)
            wait_until(lambda there=there: num_there(cluster) >= there, 10, "it does not come")
        wait_until(lambda: prefilled(cluster) >= CHUNK + 5 * 16, 10, "no giant is begun")
        shorts = [
            asks.shorts.stream(cluster.grpc, number, **SHORTS[policy])
            for number in range(NUM_SHORT)
        ]
        for number, stream in enumerate(shorts):
            stream.wait_end()
            asks.shorts.check(number, stream)
        shorts_over_at = time.monotonic()
        for number, stream in enumerate(giants):
            stream.wait_end()
            asks.giants.check(number, stream)
        giants_over_at = time.monotonic()
        waits = sorted(first_token_s(stream) for stream in shorts)
        most_s = first_token_s(alone) + 3 * PREFILL_STEP_S
        assert waits[NUM_SHORT * 95 // 100 - 1] <= most_s, waits
        assert shorts_over_at < giants[-1].times[0], "the giants were through before"
        firsts = [stream.times[0] for stream in giants]
        assert firsts == sorted(firsts), "they came in this order"
        # STEP 3: The streams went on as before.
        undisturbed = gaps(streams, 0, giants_at)
        disturbed = gaps(streams, giants_at, giants_over_at)
        assert len(disturbed) > 100
        p99 = disturbed[len(disturbed) * 99 // 100]
        assert p99 <= 2 * statistics.median(undisturbed), disturbed[-10:]
        for number, stream in enumerate(streams):
            stream.wait_end()
            asks.streams.check(number, stream)
        cluster.wait_quiet()


def num_there(cluster) -> int:
    """Requests that have come to the control plane, and have not ended."""
    view = cluster.view()
    return view.num_granted + view.num_waiting


def prefilled(cluster) -> float:
    return next(
        w.report.counters["prefilled_tokens"]
        for w in cluster.view().workers
        if w.worker.worker_id == "prefill-0"
    )


@pytest.mark.parametrize("policy", SHORTS)
def test_a_giant_that_the_decode_worker_has_no_room_for_is_passed_for_a_while(
    policy, tiny_llama, asks, tmp_path
):
    """CASES P-24: by short ones, for as long as the aging bound says; then it is next."""
    holder_asks = Prompts(tiny_llama, 1, num_prompt=128, num_tokens=120)
    config = giant_config(tiny_llama, policy, decode_blocks=40)
    with process_cluster(config, tiny_llama, tmp_path) as cluster:
        # STEP 1: One has so much that the giant, who needs 31 of 40 blocks, must wait.
        cluster.faults("decode-0").set(step(DECODE_STEP_S))
        holder = holder_asks.stream(cluster.grpc, 0)
        holder.wait_tokens(2)
        giant = asks.giants.stream(cluster.grpc, 0)
        wait_until(lambda: cluster.view().num_waiting == 1, 5, "it has room")
        waits_at = time.monotonic()
        # STEP 2: Short ones come all the time, until it decodes: its first token says only that
        # the prefill worker is through with it.
        shorts: list[Stream] = []
        while len(giant.tokens) < 2:
            assert time.monotonic() < giant.started_at + 20, "it starves"
            number = len(shorts) % NUM_SHORT
            options = {**SHORTS[policy], "deadline_s": PATIENCE_S}
            shorts.append(asks.shorts.stream(cluster.grpc, number, **options))
            threading.Event().wait(PACE_S)
        for each in (holder, giant, *shorts):
            each.wait_end()
        holder_asks.check(0, holder)
        asks.giants.check(0, giant)
        for number, stream in enumerate(shorts):
            asks.shorts.check(number % NUM_SHORT, stream)
        # STEP 3: Those were let in before it that came within the bound, and nobody else.
        # They have their places at once; the others when the holder ends, together with the giant.
        passed = [each for each in shorts if granted_at(each) < holder.ended_at - MOMENT_S]
        assert passed, "they were held up by what had no room"
        latest = max(stream.started_at for stream in passed)
        assert latest <= waits_at + AGING_S
        assert len(passed) < len(shorts), "it was served before the bound"
        assert giant.times[0] > holder.ended_at
        # STEP 4: Nor do they pass it on the decode worker.
        assert giant.times[1] - giant.times[0] <= MAX_SECOND_TOKEN_S, giant.times
        cluster.wait_quiet()
