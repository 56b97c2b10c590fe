"""The deploy file's words reach the scheduler of a worker."""

from __future__ import annotations

import pytest

from cluster import config as deploy_config
from cluster.config import Batching, Policy
from cluster.engine.rules import Rules

DYNAMIC = {"batching": "dynamic", "batch_size": 3, "batch_window_ms": 20}
POOLS = [
    {"name": "prefill", "role": "prefill", **DYNAMIC},
    {"name": "decode", "role": "decode", "batching": "static"},
]


def rules(pool: int, **scheduling) -> Rules:
    """Return those of a pool of a deploy file."""
    config = deploy_config.from_tree({"pools": POOLS, "scheduling": scheduling})
    return Rules.of(config.scheduling, config.pools[pool])


@pytest.mark.parametrize("policy", Policy)
def test_order(policy):
    given = rules(0, policy=policy.value, aging_s=7.5, fair_tenants=True, preemption="off")
    assert (given.ordering.policy, given.ordering.aging_s) == (policy, 7.5)
    assert given.ordering.is_fair
    assert given.ordering.num_tiers == 3
    assert not rules(0, preemption="off").ordering.is_fair


def test_tiers():
    given = rules(
        0, tiers=["batch", "chat"], default_tier="batch", policy="priority", preemption="off"
    )
    assert given.tiers.names == ("batch", "chat")
    assert [given.tier(name) for name in ("", "batch", "chat")] == [0, 0, 1]
    assert rules(0, preemption="off").tier("high") == 0, "fcfs has no tiers"


def test_batching_is_of_the_pool():
    first, second = rules(0, preemption="off"), rules(1, preemption="off")
    assert (first.batching, first.batch_size, first.batch_window_s) == (Batching.DYNAMIC, 3, 0.02)
    assert (second.batching, second.batch_size) == (Batching.STATIC, 0)


@pytest.mark.parametrize(
    ("preemption", "preempts"), [("off", False), ("recompute", True), ("swap", True)]
)
def test_preemption(preemption, preempts):
    config = deploy_config.from_tree({
        "pools": [{"name": "both", "role": "mixed"}],
        "scheduling": {"preemption": preemption, "max_preemptions": 7},
    })  # fmt: skip
    given = Rules.of(config.scheduling, config.pools[0])
    assert (given.preempts, given.max_preemptions) == (preempts, 7)
