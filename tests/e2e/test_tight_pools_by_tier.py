"""Pools that are too small for what is asked, by requests of several tiers: all of it moves on."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.config import Policy, Preemption
from tests.e2e.plain_cluster import wait_until
from tests.e2e.process_cluster import fault, process_cluster
from tests.e2e.streams import Prompts
from tests.e2e.tight_pools import check_progress, is_pinned, pair, report_of, slow_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def by_tier(model, preemption: Preemption):
    """Nobody ages, and an import waits for blocks for two seconds."""
    config = pair(model, prefill_blocks=32, decode_blocks=57, max_num_seqs=8)
    limits = dataclasses.replace(config.limits, reserve_patience_s=2.0)
    scheduling = dataclasses.replace(
        config.scheduling, policy=Policy.PRIORITY, preemption=preemption, aging_s=60.0
    )
    return dataclasses.replace(config, limits=limits, scheduling=scheduling)


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
def test_high_requests_pass_low_ones_that_fill_both_pools_and_all_get_through(
    preemption, tiny_llama, tmp_path
):
    """CASES P-15, P-16: while low imports wait for blocks, and when they wait as exports.

    Low streams fill the decode pool, and low exports the prefill pool but for one prompt.
    """
    grow = Prompts(tiny_llama, 4, num_prompt=64, num_tokens=160)
    wait = Prompts(tiny_llama, 3, num_prompt=160, num_tokens=12, first=10)
    high = Prompts(tiny_llama, 2, num_prompt=160, num_tokens=6, first=20)
    with process_cluster(by_tier(tiny_llama, preemption), tiny_llama, tmp_path) as cluster:
        prefill, decode = cluster.faults("prefill-0"), cluster.faults("decode-0")
        low = {"deadline_s": 60, "priority": "low"}
        # STEP 1: Four decode on a few blocks. Two more get their grants, and are not begun yet.
        decode.set(slow_steps(0.05))
        growing = [grow.stream(cluster.grpc, number, **low) for number in range(4)]
        for stream in growing:
            stream.wait_tokens(4)
        prefill.set(fault("hold", "leg.start"))
        waiting = [wait.stream(cluster.grpc, number, **low) for number in range(2)]
        wait_until(lambda: cluster.view().num_granted == 6, 5, "there is no room for both")
        # STEP 2: The four have 52 of 57 blocks, and each of the two waits for ten.
        num_more = 130 - min(len(stream.tokens) for stream in growing)
        decode.set(slow_steps(0.3, nth=num_more))
        for stream in growing:
            stream.wait_tokens(130)
        prefill.clear()
        for stream in waiting:
            stream.wait_tokens(1)
        # STEP 3: A high one goes before them, to blocks of those that decode.
        highs = [high.stream(cluster.grpc, 0, priority="high")]
        highs[0].wait_end()
        # STEP 4: The two were refused, and wait as exports; one that is fresh waits behind them.
        wait_until(lambda: is_pinned(cluster), 10, "no export waits for the decode worker")
        waiting.append(wait.stream(cluster.grpc, 2, **low))
        wait_until(lambda: cluster.view().num_waiting == 3, 5, "they do not wait")
        highs.append(high.stream(cluster.grpc, 1, priority="high"))
        highs[1].wait_end()
        assert [stream.ended_at for stream in growing] == [0] * 4
        assert [len(stream.tokens) for stream in waiting] == [1, 1, 0]
        # STEP 5: All go on.
        decode.clear()
        served = [
            (prompts, number, stream)
            for prompts, streams in ((grow, growing), (wait, waiting), (high, highs))
            for number, stream in enumerate(streams)
        ]
        check_progress(served)
        cluster.wait_quiet()
        counters = report_of(cluster, "decode-0").counters
        assert counters["preemptions"] >= 2
        assert counters["offers_refused"] >= 2
        if preemption is Preemption.SWAP:
            assert counters["preemptions_swapped"] > 0
        assert report_of(cluster, "prefill-0").counters["exports_redirected"] >= 2
