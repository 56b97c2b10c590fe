"""Bytes of a handoff that was given up come late, when its blocks belong to somebody else."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.config import Role
from tests.e2e.plain_cluster import make_config, wait_until, with_pool
from tests.e2e.pool_books import wait_proven
from tests.e2e.process_cluster import fault, process_cluster
from tests.e2e.streams import Prompts

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
NUM_PROMPT, NUM_TOKENS, NUM_BLOCKS, NUM_REPEATS = 160, 8, 16, 50


def counter(cluster, worker_id: str, name: str) -> float:
    return next(
        w.report.counters[name] for w in cluster.view().workers if w.worker.worker_id == worker_id
    )


@pytest.fixture(scope="module")
def told(tiny_llama, tmp_path_factory):
    """The story with a digest and without, on two clusters at once: it is mostly waiting."""
    prompts = Prompts(tiny_llama, 2 * NUM_REPEATS, num_prompt=NUM_PROMPT, num_tokens=NUM_TOKENS)
    with ThreadPoolExecutor(2) as threads:
        yield {
            digest: threads.submit(tell, tiny_llama, tmp_path_factory.mktemp(name), prompts, digest)
            for digest, name in ((True, "digest"), (False, "plain"))
        }


@pytest.mark.parametrize("digest", [True, False], ids=["digest", "no-digest"])
def test_late_bytes_never_reach_the_next_owner(digest, told):
    """CASES P-21: A is aborted in mid-transfer, B gets its blocks, A's bytes come late: B = ref.

    Both pools hold 16 blocks and each request needs 11, so that B must get blocks of A's at the
    decode worker while A's bytes are still on their way. At the prefill worker it gets some while
    others are still being read; had it those too, the wrong bytes would leave under A's name, and
    nobody here could see it: tests/lifecycle/test_fences.py tells that side.
    """
    told[digest].result()


def tell(model, folder, prompts: Prompts, digest: bool) -> None:
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    config = make_config(model, pools, kv_tokens=16 * NUM_BLOCKS)
    config = with_pool(config, "prefill", chunk_tokens=32)
    limits = dataclasses.replace(config.limits, kv_digest=digest)
    config = dataclasses.replace(config, limits=limits)
    with process_cluster(config, model, folder) as cluster:
        prefill = cluster.faults("prefill-0")
        for number in range(0, 2 * NUM_REPEATS, 2):
            # STEP 1: A stands still before its bytes.
            prefill.set(fault("hold", "data.send"))
            a = prompts.stream(cluster.grpc, number)
            prefill.wait_fired()
            # STEP 2: A is aborted, and B has the decode worker's blocks.
            a.leave()
            a.wait_end()
            b = prompts.stream(cluster.grpc, number + 1)
            wait_until(lambda: prefill.passed("signal.credit") == 2, 10, "B got no blocks")
            # STEP 3: A's bytes arrive, then B's.
            assert prefill.clear() == [1]
            b.wait_end()
            prompts.check(number + 1, b)
        cluster.wait_quiet()
        wait_until(
            lambda: counter(cluster, "decode-0", "segments_dropped") >= 0.9 * NUM_REPEATS,
            5,
            "the bytes did not come late",
        )
        wait_proven(cluster, lambda: prompts.stream(cluster.grpc, 0).wait_end())
