"""The benchmarks that kill, on a small cluster of the tiny model whose dead are replaced."""

import pytest

from cluster.config import Role
from deploy.bench import fault_table, restarts
from deploy.bench.load import Ask
from tests.deploy.bench_doors import make_site
from tests.e2e.plain_cluster import make_config
from tests.e2e.process_cluster import process_cluster, supervised

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
ASK = Ask(num_prompt_tokens=32, max_tokens=16)
TABLE = fault_table.FaultTableSize(
    num_clients=4, num_calls=20, num_before=8, settle_s=1.0, after_s=0.5, pause_s=4.0, ask=ASK
)
RESTARTS = restarts.RestartsSize(
    num_restarts=6, num_warm=2, num_normal=10, ask=ASK
)  # fmt: skip


def cluster_of(count: int, model, folder):
    pools = {"prefill": (Role.PREFILL, count), "decode": (Role.DECODE, count)}
    return process_cluster(make_config(model, pools), model, folder)


def play(cluster, scenarios):
    site = make_site(cluster.model)
    return [
        row
        for scenario in scenarios
        for row in fault_table.measure(site, cluster, scenario=scenario, size=TABLE)
    ]


def check(rows) -> None:
    assert [f"{row.what}: {row.value:.2f} {row.unit}" for row in rows if row.holds is False] == []


def test_with_a_spare_of_each_nobody_notices(tiny_llama, tmp_path):
    """CASES P-19, P-20: kill -9 of any process but the router's: no call fails or is wrong."""
    with cluster_of(2, tiny_llama, tmp_path) as cluster, supervised(cluster):
        rows = play(cluster, fault_table.SPARE)
    # Of so few calls the median says nothing on a busy machine.
    check(row for row in rows if row.unit != "ms")
    assert sum("failed of" in row.what for row in rows) == 4


def test_without_a_spare_what_fails_has_a_reason(tiny_llama, tmp_path):
    """CASES P-19, P-20: with one of each, only what nobody could serve fails, and says so."""
    with cluster_of(1, tiny_llama, tmp_path) as cluster, supervised(cluster, after_s=3.0):
        rows = play(cluster, fault_table.SINGLE)
    check(rows)
    assert sum("could be served" in row.what for row in rows) == 2


def test_restarts_leave_nothing_in_the_survivors(tiny_llama, tmp_path):
    """CASES P-23: every restart is another incarnation at the same address, under load."""
    with cluster_of(1, tiny_llama, tmp_path) as cluster, supervised(cluster):
        site = make_site(tmp_path)
        rows = [
            row
            for role in (Role.PREFILL, Role.DECODE)
            for row in restarts.measure(site, cluster, role=role, size=RESTARTS)
        ]
    # So few looks have no trend: the last link and its buffer are there at one, gone at another.
    check(row for row in rows if row.unit in ("s", "calls"))
    assert len(rows) == 14
