"""A worker that is told to end while nobody fetches its KV: it stays for a lease, and no longer."""

from __future__ import annotations

import dataclasses
import time

import pytest

from cluster.config import Role
from tests.e2e.leaving import report_of
from tests.e2e.plain_cluster import make_config, wait_until
from tests.e2e.process_cluster import fault, process_cluster
from tests.e2e.streams import Prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
NUM_PROMPT, NUM_TOKENS, NUM_STREAMS = 96, 32, 4
LEASE_S, DRAIN_S = 3.0, 60.0
"""Of an export; and for a worker to leave, which is not what it leaves by here."""


@pytest.fixture(scope="module")
def prompts(tiny_llama):
    return Prompts(tiny_llama, NUM_STREAMS, num_prompt=NUM_PROMPT, num_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def cluster(tiny_llama, tmp_path_factory):
    """Two prefill workers, and the only one that could take their KV."""
    config = make_config(tiny_llama, {"prefill": (Role.PREFILL, 2), "decode": (Role.DECODE, 1)})
    limits = dataclasses.replace(config.limits, export_lease_s=LEASE_S, drain_s=DRAIN_S)
    config = dataclasses.replace(config, limits=limits)
    with process_cluster(config, tiny_llama, tmp_path_factory.mktemp("lease")) as running:
        yield running


def test_a_prefill_worker_whose_kv_nobody_fetches_leaves_as_the_lease_ends(cluster, prompts):
    """CASES P-27: one P that holds un-fetched KV: the lease ends. Its prompts are computed again
    elsewhere once somebody can take them, and no request fails."""
    cluster.faults("decode-0").set(fault("hold", "signal.offer", times=0))
    streams = [prompts.stream(cluster.grpc, n, deadline_s=60) for n in range(NUM_STREAMS)]
    for stream in streams:
        stream.wait_tokens(1)
    cluster.faults("decode-0").wait_fired()
    cluster.terminate("prefill-0")
    wait_until(lambda: report_of(cluster, "prefill-0").is_draining, 5, "it does not say so")
    holding = report_of(cluster, "prefill-0")
    assert holding.num_transferring > 0
    assert holding.num_running == holding.num_waiting == 0, "it would be idle but for its exports"
    cluster.kill("decode-0")  # from now on nobody can take them
    lost_at = time.monotonic()
    assert cluster.wait_exit("prefill-0", DRAIN_S / 2) == 0
    assert time.monotonic() - lost_at >= LEASE_S, "it left with KV under a lease"
    log = cluster.log("prefill-0")
    assert "its waiting export ends cause=lease" in log, log[-3000:]
    cluster.restart("decode-0")
    for number, stream in enumerate(streams):
        stream.wait_end(60)
        prompts.check(number, stream)
    cluster.wait_quiet()
