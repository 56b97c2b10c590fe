"""Overhead and isolation against doors whose durations are known."""

import pytest

from cluster.errors import PdserveError
from deploy.bench import isolation, overhead
from deploy.bench.isolation import IsolationSize, Window, gaps
from tests.deploy.bench_doors import COMPUTE_S, FakeDoors, make_site, open_doors

STREAMING = IsolationSize(
    num_streams=3,
    num_rounds=2,
    warm_up_tokens=3,
    quiet_s=0.2,
    load_s=0.3,
    stream_max_tokens=100_000,
)


def test_overhead_is_what_the_client_waits_beyond_the_prefill_worker(tmp_path):
    size = overhead.OverheadSize(num_requests=3)

    with open_doors(FakeDoors()) as doors:
        over_grpc, over_http = overhead.measure(make_site(tmp_path), doors, size)

    assert "over gRPC" in over_grpc.what
    assert "over HTTP" in over_http.what
    for row in (over_grpc, over_http):
        assert row.reference == pytest.approx(COMPUTE_S * 1e3)
        # The door waits queue_s + compute_s before its first token, so the rest is the way.
        assert 0 < row.value < 100
        assert str(row.bar) == "value <= 10"


@pytest.mark.slow
def test_isolation_pools_the_gaps_of_all_streams_and_cancels_them(tmp_path):
    with open_doors(FakeDoors(gap_s=0.005, stall_s=0.05)) as doors:
        (row,) = isolation.measure_colocated(make_site(tmp_path), doors, STREAMING)
        (barred,) = isolation.measure_pools(make_site(tmp_path), doors, STREAMING)

    assert 4 < row.reference < 40
    assert row.value > 45
    assert row.ratio > 1.5
    assert row.bar is None
    assert barred.holds is False
    assert doors.prompts.count(64) == 2 * 3 * STREAMING.num_rounds * STREAMING.num_streams
    assert doors.prompts.count(512) >= 6


@pytest.mark.parametrize(
    "measure",
    [overhead.measure, isolation.measure_pools],
    ids=lambda m: m.__module__,
)
def test_a_cluster_that_refuses_is_an_error_and_no_number(tmp_path, measure):
    with open_doors(FakeDoors(fails=True)) as doors, pytest.raises(PdserveError, match="no decode"):
        measure(make_site(tmp_path), doors)


def test_a_stream_that_ends_early_is_an_error(tmp_path):
    size = IsolationSize(num_streams=2, warm_up_tokens=2, stream_max_tokens=10, quiet_s=5.0)

    with (
        open_doors(FakeDoors(gap_s=0.01)) as doors,
        pytest.raises(PdserveError, match="a stream ended before its run did"),
    ):
        isolation.measure_pools(make_site(tmp_path), doors, size)


def test_a_gap_counts_where_it_began():
    arrivals = [[0.0, 1.0, 2.0, 5.0], [0.5, 1.5]]

    assert gaps(arrivals, Window(1.0, 3.0)) == [1.0, 3.0]
    assert gaps(arrivals, Window(0.0, 1.0)) == [1.0, 1.0]
    assert gaps(arrivals, Window(5.0, 9.0)) == []
