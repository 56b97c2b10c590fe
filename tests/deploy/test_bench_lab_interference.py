"""The rows of ``lab-interference``: which numbers they take, and what has to hold."""

import pytest

from cluster.errors import EngineFault
from deploy.bench import lab_interference
from deploy.lab import ready
from deploy.lab.configurations import Base
from deploy.lab.measures import Measured
from deploy.lab.results import Outcome

CONFIGURATIONS = ready.comparison("interference").configurations(Base(cores=(0, 1)))


def run(quiet_s, p99_s, ttft_s, failed=0) -> Measured:
    total = {
        "failed": failed, "undisturbed_p50_s": quiet_s, "beside_p99_s": p99_s,
        "beside_max_s": 2 * p99_s, "beside_ratio": p99_s / quiet_s,
    }  # fmt: skip
    return Measured(total=total, groups={"prompt (2048 in, 2 out)": {"ttft_p50_s": ttft_s}})


def outcomes(**runs) -> list[Outcome]:
    return [Outcome(configuration=each, runs=tuple(runs[each.name])) for each in CONFIGURATIONS]


WORSE = [run(0.05, 2.0, 2.0)] * 3
BAD = [run(0.05, 0.5, 2.5)] * 3
GOOD = [run(0.1, p99_s, 3.0) for p99_s in (0.12, 0.13, 0.9)]


def test_the_bars_are_held_by_the_median_run():
    rows = lab_interference.rows_of(outcomes(unchunked=WORSE, chunked=BAD, disaggregated=GOOD))

    first = rows[0]
    assert (first.value, first.reference, first.ratio) == pytest.approx((130, 100, 1.3))
    assert [row.holds for row in rows if row.bar] == [True, True, True]
    lost = [row for row in rows if "first token" in row.what]
    assert [row.ratio > 1 for row in lost] == [True, True], "also where it loses"
    assert sum("max" in row.what for row in rows) == 3


def test_an_order_the_other_way_round_holds_no_bar():
    rows = lab_interference.rows_of(outcomes(unchunked=BAD, chunked=WORSE, disaggregated=WORSE))

    assert [row.holds for row in rows if row.bar] == [False, False, False]


def test_a_failed_request_or_cluster_ends_the_bench():
    failed = [run(0.05, 0.5, 2.5, failed=1)] * 3
    with pytest.raises(EngineFault, match="chunked: 3 requests failed"):
        lab_interference.rows_of(outcomes(unchunked=WORSE, chunked=failed, disaggregated=GOOD))
    gone = [Outcome(configuration=CONFIGURATIONS[0], failure="not measured: no port")]
    with pytest.raises(EngineFault, match="unchunked: not measured: no port"):
        lab_interference.rows_of(gone)
