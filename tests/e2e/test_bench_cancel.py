"""The benchmark that leaves its streams, on a small cluster of the tiny model."""

import pytest

from cluster.config import Role
from deploy.bench import cancel
from deploy.bench.cancel import CancelSize, _Round
from tests.deploy.bench_doors import make_site
from tests.e2e.plain_cluster import plain_cluster

SIZE = CancelSize(
    num_streams=8, num_rounds=2, spread_s=0.5, num_prompt_tokens=64, max_tokens=900
)  # fmt: skip


@pytest.mark.slow
def test_nobody_is_late_and_nobody_lost(tiny_llama, tmp_path):
    """CASES P-11: at random moments, over HTTP and gRPC; every one is counted."""
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    with plain_cluster(tiny_llama, tmp_path, pools) as cluster:
        rows = cancel.measure(make_site(tmp_path), cluster, SIZE)
        cluster.wait_quiet()
    assert [row.what for row in rows if not row.holds] == []
    assert all(8 <= row.reference <= 16 for row in rows[1::2])


def test_late_is_who_holds_what_nobody_is_left_to_hold():
    seen = _Round(3, left=[1.0, 2.0, 4.0], held=[(0.5, 3), (1.1, 3), (1.2, 2), (3.0, 1), (4.7, 1)])
    assert seen.latest_s == pytest.approx(0.7)
    assert _Round(1, left=[1.0], held=[(0.5, 1), (1.1, 0)]).latest_s == 0.0
