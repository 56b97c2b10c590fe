"""Pools of a fixed size, and those that grow and shrink: what a deploy file may say of them."""

import pytest

from cluster import config as deploy_config
from cluster.config import ScalingConfig
from cluster.errors import ConfigError


def load(*pools, **sections):
    named = [
        {"name": f"{role[0]}{index}", "role": role, **options}
        for index, (role, options) in enumerate(pools)
    ]
    return deploy_config.from_tree({"pools": named, **sections})


PREFILL, DECODE = ("prefill", {}), ("decode", {})


def test_a_pool_has_a_count_or_a_min_and_a_max():
    config = load(("prefill", {"count": 3}), ("decode", {"min": 2, "max": 5}))
    fixed, scaled = config.pools
    assert (fixed.is_scaled, fixed.min_count, fixed.max_count) == (False, 3, 3)
    assert (scaled.is_scaled, scaled.min_count, scaled.max_count) == (True, 2, 5)
    assert load(PREFILL, ("decode", {"max": 5})).pools[1].min_count == 1
    assert deploy_config.from_tree(deploy_config.to_tree(config)) == config


@pytest.mark.parametrize(
    ("options", "field", "why"),
    [
        ({"min": 2}, "pools.d1.min", "needs pools.d1.max"),
        ({"min": 3, "max": 2}, "pools.d1.min", "3 is not between 0 and pools.d1.max, 2"),
        ({"min": -1, "max": 2}, "pools.d1.min", "not between 0"),
        ({"max": -1}, "pools.d1.max", "must not be below 0"),
        ({"count": 2, "max": 3}, "pools.d1.count", "use min and max, or count"),
        ({"maximum": 3}, "pools.1.maximum", "did you mean 'max'"),
        ({"prefill_tokens_per_s": -1.0}, "pools.d1.prefill_tokens_per_s", "below 0"),
        ({"max": 3, "cores": [0, 1]}, "pools.d1.cores", "fewer than max x cores_per_worker"),
    ],
)
def test_what_contradicts_itself_is_refused_with_its_key(options, field, why):
    with pytest.raises(ConfigError, match=why) as error:
        load(PREFILL, ("decode", options))
    assert error.value.field == field


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"ttft_target_s": 0.0}, "scaling.ttft_target_s"),
        ({"tpot_target_s": -0.1}, "scaling.tpot_target_s"),
        ({"quiet_s": 0}, "scaling.quiet_s"),
        ({"start_s": 0}, "scaling.start_s"),
        ({"quite_s": 5}, "scaling.quite_s"),
    ],
)
def test_targets_are_checked(scaling, field):
    with pytest.raises(ConfigError) as error:
        load(PREFILL, DECODE, scaling=scaling)
    assert error.value.field == field
    assert load(PREFILL, DECODE).scaling == ScalingConfig()


def test_one_process_runs_a_fixed_number_of_workers():
    with pytest.raises(ConfigError, match="host inline runs a fixed number") as error:
        load(PREFILL, ("decode", {"max": 2}), host="inline")
    assert error.value.field == "pools.d1.max"


def test_a_pool_may_be_empty_only_where_another_one_serves_its_role():
    """A request that finds no worker of a role is refused, so the queue could wake nobody."""
    none = {"min": 0, "max": 2}
    with pytest.raises(ConfigError, match="no other pool keeps a decode worker") as error:
        load(PREFILL, ("decode", none))
    assert error.value.field == "pools.d1.min"
    with pytest.raises(ConfigError, match="no other pool keeps a prefill worker"):
        load(("prefill", none), ("decode", none), ("mixed", none))
    load(PREFILL, ("decode", none), DECODE)
    load(("prefill", none), ("decode", none), ("mixed", {}))


def test_a_pool_that_may_be_empty_is_not_the_only_one_with_room_for_a_request():
    big, small = {"min": 0, "max": 2, "kv_tokens": 4096}, ("decode", {"kv_tokens": 1024})
    with pytest.raises(ConfigError, match="the kv_tokens for a request of 2048") as error:
        load(PREFILL, ("decode", big), small)
    assert error.value.field == "pools.d1.min"
    load(PREFILL, ("decode", big), small, model={"max_model_len": 1024})
