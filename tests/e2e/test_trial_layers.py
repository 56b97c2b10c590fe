"""The trial model's KV leaves by layers while its prompt is computed, and what arrives is exact.

The tiny model's KV is too little for that: see ``cluster/engine/stored.py``.
"""

from __future__ import annotations

import pytest

from cluster.config import Role
from deploy.model_source import resolve_model
from tests.e2e.plain_cluster import make_config, wait_until, with_pool
from tests.e2e.process_cluster import fault, process_cluster
from tests.e2e.streams import Prompts

pytestmark = [pytest.mark.smollm, pytest.mark.timeout(300)]
POOLS = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
NUM_PROMPTS, NUM_PROMPT, NUM_TOKENS = 4, 250, 24
CHUNK = 512
"""A prompt is one step: what leaves before its end is of layers, for no block is whole."""
BLOCK_SIZE = 16
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def model():
    return resolve_model("trial").folder


@pytest.fixture(scope="module")
def prompts(model):
    return Prompts(model, NUM_PROMPTS, num_prompt=NUM_PROMPT, num_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    config = make_config(model, POOLS, kv_tokens=2048, prefix_cache=False)
    config = with_pool(config, "prefill", chunk_tokens=CHUNK)
    with process_cluster(config, model, tmp_path_factory.mktemp("layers")) as cluster:
        yield cluster


def serve(cluster, prompts: Prompts, number: int) -> None:
    stream = prompts.stream(cluster.grpc, number, deadline_s=DEADLINE_S)
    stream.wait_end(DEADLINE_S)
    prompts.check(number, stream)


def test_what_left_by_layers_is_what_transformers_computes(cluster, prompts):
    """CASES P-13: greedy tokens, by the near-tie rule; each prompt in more than one segment."""
    decode = cluster.faults("decode-0")
    for number in range(NUM_PROMPTS):
        decode.set()
        serve(cluster, prompts, number)
        assert decode.passed("signal.offer") == 1
        assert decode.passed("signal.manifest") > 1, "it came in one piece"
    cluster.wait_quiet()
    (link,) = cluster.view().links
    block_bytes = BLOCK_SIZE * 30 * 2 * 3 * 64 * 4  # layers, K and V, kv heads, head dim, fp32
    assert link.num_bytes == NUM_PROMPTS * -(-NUM_PROMPT // BLOCK_SIZE) * block_bytes
    workers = {w.worker.worker_id: w.report.counters for w in cluster.view().workers}
    assert workers["decode-0"]["prefilled_tokens"] == 0


@pytest.mark.parametrize("held", ["data.send", "data.received"])
def test_an_abort_between_layers_leaves_the_next_request_exact(held, cluster, prompts):
    """CASES P-11, P-21: the first layers are there, the rest comes late or never."""
    cluster.wait_quiet()
    holder = cluster.faults("prefill-0" if held == "data.send" else "decode-0")
    holder.set(fault("hold", held, nth=2))
    decode = cluster.faults("decode-0")
    if holder is not decode:
        decode.set()
    # STEP 1: Some layers have arrived, and the next ones stand still.
    left = prompts.stream(cluster.grpc, 0, deadline_s=DEADLINE_S)
    holder.wait_fired(timeout_s=60)
    assert decode.passed("signal.manifest") >= 1
    assert decode.passed("data.received") >= 1
    # STEP 2: The client leaves, and another one asks for as much.
    left.leave()
    left.wait_end()
    after = prompts.stream(cluster.grpc, 1, deadline_s=DEADLINE_S)
    wait_until(lambda: decode.passed("signal.offer") == 2, 60, "it is not offered")
    holder.clear()
    after.wait_end(DEADLINE_S)
    prompts.check(1, after)
    cluster.wait_quiet()
    serve(cluster, prompts, 0)
    cluster.wait_quiet()
