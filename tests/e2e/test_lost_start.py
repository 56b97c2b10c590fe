"""The start of a decode leg that is lost on its way: made good long before the export's lease."""

import itertools

import pytest

from cluster.config import Role
from tests.e2e.plain_cluster import make_config
from tests.e2e.process_cluster import fault, process_cluster
from tests.e2e.streams import Prompts

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60)]
LEASE_S = 10.0
SOON_S = 6.0
"""It is missed after 2 s; the rest is for a busy machine."""


def test_the_only_decode_worker_is_asked_again_and_nothing_is_computed_again(tiny_llama, tmp_path):
    """CASES P-20: it lives, says the end of the leg that it never had, and takes the next one."""
    config = make_config(tiny_llama, {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)})
    assert config.limits.export_lease_s == LEASE_S
    prompts = Prompts(tiny_llama, 1, num_prompt=40, num_tokens=16)
    with process_cluster(config, tiny_llama, tmp_path) as cluster:
        decode = cluster.faults("decode-0")
        decode.set(fault("drop", "leg.start"))
        stream = prompts.stream(cluster.grpc, 0)
        stream.wait_end()
        assert decode.fired() == [1]
        prompts.check(0, stream)
        told = stream.timeline
        assert (told.num_attempts, told.num_resumed, told.num_redirected) == (1, 0, 1)
        gap_s = max(b - a for a, b in itertools.pairwise(stream.times))
        assert 1.0 < gap_s < SOON_S, "the first token comes at once, the others are what waits"
        decode.clear()
        cluster.wait_quiet()
        assert "aborted, and not here" in cluster.log("decode-0")
        reports = {w.worker.worker_id: w.report.counters for w in cluster.view().workers}
        assert reports["prefill-0"]["prefilled_tokens"] == 40
        assert reports["decode-0"]["prefilled_tokens"] == 0
        assert all(counters["kv_check_failures"] == 0 for counters in reports.values())
