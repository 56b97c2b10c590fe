"""Refusals measured at the router's real HTTP door, before a cluster that places nobody."""

import pytest

from cluster.errors import EngineFault
from deploy.bench import refusal
from deploy.bench.refusal import RefusalSize
from tests.deploy.bench_doors import make_site
from tests.factories_model import write_tiny_llama


@pytest.mark.slow
def test_whoever_finds_the_queue_full_is_timed_in_the_router_and_at_the_client(tmp_path):
    """P-25: of 40 calls 8 wait, and are hung up on; the next run finds the queue empty again."""
    size = RefusalSize(num_calls=40, max_waiting=8, num_runs=2)

    rows = refusal.measure(make_site(write_tiny_llama(tmp_path)), size)

    p99_ms, slowest_ms, _, slowest_s = (row.value for row in rows)
    assert 0 < rows[0].reference <= p99_ms <= slowest_ms
    assert slowest_ms / 1e3 < slowest_s
    assert [str(row.bar) for row in rows] == ["None", "value <= 50", "None", "value <= 2"]
    num_refused = int(rows[0].what.split(" of ")[1].split()[0])
    assert 2 * (40 - 2 * 8) <= num_refused <= 2 * (40 - 8)


def test_a_call_that_is_not_refused_is_a_fault():
    found = refusal._Refusals(in_router=[0.001] * 3, at_client=[0.1] * 4)
    with pytest.raises(EngineFault, match="3 calls at least were to be refused: 3 by"):
        refusal._rows(found, RefusalSize(num_calls=5, max_waiting=1, num_runs=1))
