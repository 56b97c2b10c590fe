"""The policy over a recorded trace: bursts and pauses of a coding service, 21 minutes of it."""

import itertools
from pathlib import Path

import pytest

from cluster.config import Role
from tests.cluster.policy.scaled_cluster import ScaledCluster, make_config, make_pool, seconds_of

TRACE = Path(__file__).with_name("azure_code_excerpt.csv")
QUIET_S = 120.0


def replay(quiet_s=QUIET_S, **bounds):
    pools = (
        make_pool("fast", Role.PREFILL, cost_per_hour=3.0, **bounds),
        make_pool("slow", Role.PREFILL, cost_per_hour=2.0, **bounds),
        make_pool("d", cost_per_hour=1.0, **bounds),
    )
    cluster = ScaledCluster(make_config(*pools, quiet_s=quiet_s, ttft_target_s=2.0))
    for second in seconds_of(TRACE):
        cluster.second(*second)
    return cluster


@pytest.fixture(scope="module")
def replayed():
    return replay()


def test_it_does_not_flap(replayed):
    """No worker leaves within ``quiet_s`` of one that came, and the pools turn no more often than
    the load does: it has five bursts. Without that patience they turn several times as often."""
    for name in replayed.targets:
        came = [at for at, pool, change in replayed.history if pool == name and change > 0]
        went = [at for at, pool, change in replayed.history if pool == name and change < 0]
        assert all(at - up > QUIET_S for at in went for up in came if up <= at), name
        assert len(turns(replayed, name)) <= 2 * 5, name
    assert len(turns(replayed, "fast")) > 1
    assert len(turns(replay(quiet_s=5.0), "fast")) > 2 * len(turns(replayed, "fast"))


def test_it_costs_less_than_all_workers_and_waits_less_than_the_fewest(replayed):
    most, fewest = replay(min=6), replay(max=1)
    assert replayed.worker_s < 0.5 * most.worker_s
    assert mean(replayed.waits) < 0.25 * mean(fewest.waits)


def test_the_cheaper_capacity_is_what_it_takes(replayed):
    """A fast worker costs 3 for 8000 tokens a second, a slow one 2 for 4000."""
    targets, came = dict.fromkeys(replayed.targets, 1), []
    for _, name, change in replayed.history:
        targets[name] += change
        if name == "slow" and change > 0:
            came.append(targets["fast"])
    assert came
    assert set(came) == {6}, "not before all the fast ones were asked for"


def test_after_the_trace_it_is_back_at_the_floor():
    cluster = replay()
    assert max(cluster.targets.values()) > 1
    for _ in range(int(3 * QUIET_S)):
        cluster.second()
    assert set(cluster.targets.values()) == {1}


def turns(cluster, name):
    """The changes of a pool in another direction than the one before."""
    changes = [change for _, pool, change in cluster.history if pool == name]
    return [b for a, b in itertools.pairwise(changes) if a * b < 0]


def mean(values):
    return sum(values) / len(values)
