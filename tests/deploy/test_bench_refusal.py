"""Refusals measured at the router's real doors, before a cluster that places nobody."""

import pytest

from cluster.errors import EngineFault
from deploy.bench import refusal
from deploy.bench.refusal import RefusalSize
from tests.deploy.bench_doors import make_site
from tests.factories_model import write_tiny_llama


@pytest.mark.slow
def test_whoever_finds_the_queue_full_is_timed_in_the_router_and_at_the_client(tmp_path):
    """P-25: of 40 calls 8 wait, and are hung up on; the next run finds the queue empty again."""
    size = RefusalSize(num_calls=40, max_waiting=8, num_steady=64, num_runs=2)

    rows = refusal.measure(make_site(write_tiny_llama(tmp_path)), size)

    assert [row.what[:4] for row in rows] == ["http"] * 5 + ["grpc"] * 5
    for door in (rows[:5], rows[5:]):
        steady_ms, slowest_steady_ms, in_router_ms, p99_s, slowest_s = (row.value for row in door)
        assert 0 < door[0].reference <= steady_ms <= slowest_steady_ms
        assert 0 < in_router_ms < slowest_s * 1e3, "the client's begins before and ends after"
        assert p99_s <= slowest_s
        assert [str(row.bar) for row in door if row.bar] == ["value <= 50", "value <= 2"]
        assert "of 128 refusals" in door[0].what
        num_refused = int(door[2].what.split(" of ")[1].split()[0])
        assert 2 * (40 - 2 * 8) <= num_refused <= 2 * (40 - 8)


def test_a_call_that_is_not_refused_is_a_fault():
    found = refusal._Refusals()
    with pytest.raises(EngineFault, match="3 by the router, 4 at the clients"):
        found.add(refusal._Run([0.1] * 3, [0.1]), in_router=[0.001] * 3)
    found.add(refusal._Run([0.1, 0.1], [0.1]), in_router=[0.001] * 3)
    with pytest.raises(EngineFault, match="http: 3 calls at least were to be refused, 2 were"):
        refusal._rows("http", found, RefusalSize(num_calls=5, max_waiting=1, num_runs=1))
