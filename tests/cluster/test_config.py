"""The deploy file: what it accepts, what it refuses and how it says so."""

from pathlib import Path

import pytest

from cluster import config
from cluster.errors import ConfigError

TREE = {
    "pools": [
        {"name": "prefill", "role": "prefill", "cores": [0]},
        {"name": "decode", "role": "decode", "kv_tokens": 4096},
    ]
}

MIXED = {"name": "a", "role": "mixed"}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "deploy.yaml"
    path.write_text(text)
    return path


def test_round_trip_keeps_every_value():
    built = config.from_tree(TREE)
    assert config.from_tree(config.to_tree(built)) == built
    assert built.pool("decode").num_blocks == 256


@pytest.mark.parametrize(
    ("tree", "field", "hint"),
    [
        ({**TREE, "modle": {}}, "modle", "did you mean 'model'"),
        ({**TREE, "scheduling": {"policy": "fcsf"}}, "scheduling.policy", "did you mean 'fcfs'"),
        ({**TREE, "model": {"max_model_len": "2k"}}, "model.max_model_len", "expected int"),
        ({**TREE, "limits": {"default_deadline_s": True}}, "limits.default_deadline_s", "float"),
        ({**TREE, "router": {"replicas": 0}}, "router.replicas", "above 0"),
        ({"pools": [{"name": "a", "role": "prefil"}]}, "pools.0.role", "did you mean 'prefill'"),
        ({"pools": [{"name": "a", "role": "decode"}]}, "pools", "need a prefill and a decode"),
        ({"pools": [{"role": "mixed"}]}, "pools.0.name", "missing"),
        ({}, "pools", "missing"),
        ({"pools": [{**MIXED, "dtype": "fp61"}]}, "pools.0.dtype", "did you mean 'fp"),
        ({"pools": [{**MIXED, "dtype": "fp16"}]}, "pools.a.dtype", "device cuda"),
        ({"pools": [{**MIXED, "kv_tokens": 4097}]}, "pools.a.kv_tokens", "not a multiple"),
        ({"pools": [{**MIXED, "count": 2, "cores": [0]}]}, "pools.a.cores", "fewer than count"),
        ({**TREE, "endpoints": {"http_port": 8001}}, "endpoints", "differ"),
        ({**TREE, "endpoints": {"host": "0.0.0.0"}}, "endpoints.host", "use 127.0.0.1"),
        ({**TREE, "endpoints": {"host": "::"}}, "endpoints.host", "not a loopback"),
        ({**TREE, "endpoints": {"host": "192.0.2.1"}}, "endpoints.host", "not a loopback"),
        ({**TREE, "endpoints": {"host": "node7"}}, "endpoints.host", "not a loopback"),
    ],
)  # fmt: skip
def test_refuses_with_the_path_and_a_hint(tree, field, hint):
    with pytest.raises(ConfigError, match=hint) as caught:
        config.from_tree(tree)
    assert caught.value.field == field


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_loopback_is_accepted(host):
    assert config.from_tree({**TREE, "endpoints": {"host": host}}).endpoints.host == host


def test_load_applies_overrides_by_name_and_index(tmp_path):
    path = write(tmp_path, "pools: [{name: a, role: mixed}]")
    loaded = config.load(path, ["pools.a.count=3", "pools.0.kv_tokens=64", "router.replicas=2"])
    assert (loaded.pool("a").count, loaded.pool("a").kv_tokens) == (3, 64)
    assert loaded.router.replicas == 2


@pytest.mark.parametrize("override", ["nonsense", "pools.b.count=2", "model.pth=x", "router=1"])
def test_refuses_a_bad_override(tmp_path, override):
    path = write(tmp_path, "pools: [{name: a, role: mixed}]")
    with pytest.raises(ConfigError):
        config.load(path, [override])


@pytest.mark.parametrize("text", ["pools: [", "- a", ""])
def test_refuses_what_is_not_a_mapping(tmp_path, text):
    with pytest.raises(ConfigError):
        config.load(write(tmp_path, text))


def test_refuses_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        config.load(tmp_path / "none.yaml")


def test_a_key_file_is_named_wherever_routers_start():
    loaded = config.from_tree({**TREE, "auth": {"keys_file": "/keys", "keys_env": "KEYS"}})
    assert (loaded.auth.keys_file, loaded.auth.keys_env) == ("/keys", "KEYS")
    with pytest.raises(ConfigError, match=r"auth\.keys_file: must be an absolute path"):
        config.from_tree({**TREE, "auth": {"keys_file": "keys"}})
    with pytest.raises(ConfigError, match=r"auth\.key"):
        config.from_tree({**TREE, "auth": {"key": "sk-0123456789"}})


OFF = {"preemption": "off"}


@pytest.mark.parametrize(
    ("pool", "scheduling", "named"),
    [
        ({"batching": "static"}, {}, [r"pools.a.batching", "scheduling.preemption"]),
        ({"batching": "dynamic"}, {}, ["pools.a.batching", "scheduling.preemption"]),
        ({"batch_size": 4}, {}, ["pools.a.batch_size", "pools.a.batching"]),
        ({"batching": "static", "batch_size": 9}, OFF, ["batch_size", "pools.a.max_num_seqs"]),
        ({"batching": "dynamic", "batch_window_ms": 0}, OFF, ["pools.a.batch_window_ms"]),
        ({"chunk_tokens": 4096}, {}, ["pools.a.chunk_tokens", "pools.a.token_budget"]),
        ({"chunk_tokens": -1}, {}, ["pools.a.chunk_tokens"]),
        ({"token_budget": 4}, {}, ["pools.a.token_budget", "pools.a.max_num_seqs"]),
        ({}, {"default_tier": "gold"}, ["scheduling.default_tier", "low, normal, high"]),
        ({}, {"tiers": []}, ["scheduling.tiers"]),
        ({}, {"tiers": ["a", "a"], "default_tier": "a"}, ["scheduling.tiers"]),
        ({}, {"tiers": ["1"], "default_tier": "1"}, ["scheduling.tiers"]),
        ({}, {"policy": "sfj"}, ["scheduling.policy", "sjf"]),
        ({}, {"aging_s": 0.0}, ["scheduling.aging_s"]),
        ({}, {"max_preemptions": 0}, ["scheduling.max_preemptions"]),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(pool, scheduling, named):
    tree = {"pools": [{"name": "a", "role": "mixed", **pool}], "scheduling": scheduling}
    with pytest.raises(ConfigError) as caught:
        config.from_tree(tree)
    for name in named:
        assert name in caught.value.message
    assert caught.value.field


def test_batches_are_formed_where_nobody_is_preempted():
    tree = {
        "pools": [{"name": "a", "role": "mixed", "batching": "static", "batch_size": 4}],
        "scheduling": {**OFF, "policy": "priority", "tiers": ["b", "a"], "default_tier": "b"},
    }
    loaded = config.from_tree(tree)
    assert config.from_tree(config.to_tree(loaded)) == loaded
    assert loaded.pools[0].num_batch_slots == 4
