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
        ({"pools": [{**MIXED, "cores": [-1]}]}, "pools.a.cores", "count from 0, got -1"),
        ({"pools": [{**MIXED, "cores": [0]}], "service_cores": [-1]}, "service_cores", "got -1"),
        ({"pools": [{**MIXED, "name": "router"}]}, "pools.router", "name the pool otherwise"),
        ({"pools": [{**MIXED, "name": "control"}]}, "pools.control", "name the pool otherwise"),
        ({**TREE, "endpoints": {"http_port": 8001}}, "endpoints", "differ"),
        ({**TREE, "endpoints": {"host": "0.0.0.0"}}, "endpoints.host", "use 127.0.0.1"),
        ({**TREE, "endpoints": {"host": "::"}}, "endpoints.host", "no address of one interface"),
        ({**TREE, "endpoints": {"host": "192.0.2.1"}}, "endpoints.host", "cluster_token_file"),
        ({**TREE, "endpoints": {"host": "node7"}}, "endpoints.host", "not an IP address"),
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


@pytest.mark.parametrize(
    ("text", "field", "lines"),
    [
        ("pools: [{name: a, role: mixed}]\nhost: ray\npools: []\n", "pools", (3, 1)),
        ("pools:\n- name: a\n  role: mixed\n  count: 2\n  count: 1\n", "count", (5, 4)),
        ("pools: [{name: a, role: mixed, 'count': 2, count: 2}]", "count", (1, 1)),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_its_lines(tmp_path, text, field, lines):
    """The last one would win, and what the first one says would be lost."""
    with pytest.raises(ConfigError) as caught:
        config.load(write(tmp_path, text))
    second, first = lines
    assert caught.value.message == (
        f"line {second}: {field} stands here again, first in line {first}"
    )
    assert caught.value.field == field


def test_a_key_that_stands_twice_in_an_override_is_refused(tmp_path):
    path = write(tmp_path, "pools: [{name: a, role: mixed}]")
    with pytest.raises(ConfigError, match=r"--set .*replicas stands here again"):
        config.load(path, ["router={replicas: 2, replicas: 1}"])


def test_what_is_merged_into_a_section_may_be_said_otherwise_there(tmp_path):
    text = """
pools:
- &one {name: a, role: mixed, count: 1}
- {<<: *one, name: b, count: 2}
"""
    loaded = config.load(write(tmp_path, text))
    assert [(pool.name, pool.count) for pool in loaded.pools] == [("a", 1), ("b", 2)]


@pytest.mark.parametrize(
    "key",
    ["limits.drain_s", "scaling.quiet_s", "pools.a.gpus_per_worker", "pools.a.cost_per_hour"],
)
@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1" + 400 * "0"])
def test_a_number_is_finite(tmp_path, key, value):
    """Neither bound of a rule refuses what is no number."""
    path = write(tmp_path, "pools: [{name: a, role: mixed}]")
    with pytest.raises(ConfigError, match="expected a finite number") as caught:
        config.load(path, [f"{key}={value}"])
    assert caught.value.field == key.replace("pools.a", "pools.0")


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


def _pools(*transports):
    roles = ("prefill", "decode")
    return [
        {"name": role, "role": role} | ({"transport": kind} if kind else {})
        for role, kind in zip(roles, transports, strict=True)
    ]


def test_a_pool_may_have_a_transport_of_its_own():
    loaded = config.from_tree({"transport": "auto", "pools": _pools("torch_dist", None)})
    kinds = [loaded.transport_of(pool).value for pool in loaded.pools]
    assert kinds == ["torch_dist", "auto"]
    assert config.from_tree(config.to_tree(loaded)) == loaded


@pytest.mark.parametrize(
    ("cluster", "prefill", "decode", "named"),
    [
        ("auto", "shm", "torch_dist", "shm and torch_dist"),
        ("torch_dist", None, "shm", "shm and torch_dist"),
        ("auto", "loopback", None, "auto and loopback"),
        ("auto", "nccl", None, "transport"),
    ],
)
def test_pools_that_could_not_link_are_refused(cluster, prefill, decode, named):
    with pytest.raises(ConfigError, match=named) as caught:
        config.from_tree({"transport": cluster, "pools": _pools(prefill, decode)})
    assert "transport" in caught.value.message


OFF = {"preemption": "off"}
SWAP = {"preemption": "swap"}


@pytest.mark.parametrize(
    ("pool", "scheduling", "named"),
    [
        ({"batching": "static"}, {}, [r"pools.a.batching", "scheduling.preemption"]),
        ({"batching": "dynamic"}, {}, ["pools.a.batching", "scheduling.preemption"]),
        ({"batch_size": 4}, {}, ["pools.a.batch_size", "pools.a.batching"]),
        ({"batching": "static", "batch_size": 9}, OFF, ["batch_size", "pools.a.max_num_seqs"]),
        ({"batching": "dynamic", "batch_window_ms": 0}, OFF, ["pools.a.batch_window_ms"]),
        ({"batch_window_ms": 5}, {}, ["pools.a.batch_window_ms", "pools.a.batching", "continuous"]),
        ({"batching": "static", "batch_window_ms": 5}, OFF, ["batch_window_ms", "static"]),
        ({"batching": "static", "batch_size": -1}, OFF, ["pools.a.batch_size"]),
        ({"chunk_tokens": 4096}, {}, ["pools.a.chunk_tokens", "pools.a.token_budget"]),
        ({"chunk_tokens": -1}, {}, ["pools.a.chunk_tokens"]),
        ({"token_budget": 4}, {}, ["pools.a.token_budget", "pools.a.max_num_seqs"]),
        ({}, {"default_tier": "gold"}, ["scheduling.default_tier", "low, normal, high"]),
        ({}, {"tiers": []}, ["scheduling.tiers"]),
        ({}, {"tiers": ["a", "a"], "default_tier": "a"}, ["scheduling.tiers"]),
        ({}, {"tiers": ["1"], "default_tier": "1"}, ["scheduling.tiers"]),
        ({}, {"tiers": ["a b"], "default_tier": "a b"}, ["scheduling.tiers", "'a b'"]),
        ({}, {"tiers": ["a" * 99], "default_tier": "a" * 99}, ["scheduling.tiers"]),
        ({}, {"tiers": [f"t{i}" for i in range(17)]}, ["scheduling.tiers", "1 to 16"]),
        ({}, {"tiers": ["a", "b"]}, ["scheduling.default_tier", "normal", "a, b"]),
        ({}, {"policy": "sfj"}, ["scheduling.policy", "sjf"]),
        ({}, {"aging_s": 0.0}, ["scheduling.aging_s"]),
        ({}, {"max_preemptions": 0}, ["scheduling.max_preemptions"]),
        ({}, {"max_queue_tokens": 0}, ["scheduling.max_queue_tokens"]),
        ({}, {"max_queue_requests": 0}, ["scheduling.max_queue_requests"]),
        ({}, {"run_ahead_tokens": 0}, ["scheduling.run_ahead_tokens"]),
        ({"max_num_seqs": 0}, {}, ["pools.a.max_num_seqs"]),
        ({"token_budget": 0}, {}, ["pools.a.token_budget"]),
        ({}, {"tenant_queue_share": 1.5}, ["scheduling.tenant_queue_share"]),
        ({}, {"tenant_queue_share": 0.0}, ["scheduling.tenant_queue_share"]),
        ({}, {"local_prefill": "atuo"}, ["scheduling.local_prefill", "auto"]),
        ({}, {"local_prefill_tokens": 0}, ["scheduling.local_prefill_tokens"]),
        ({"prefix_cache": False, "prefix_shared": True}, {}, ["prefix_shared", "prefix_cache"]),
        ({"swap_tokens": 64}, {}, ["pools.a.swap_tokens", "scheduling.preemption", "recompute"]),
        ({"swap_tokens": 64}, OFF, ["pools.a.swap_tokens", "scheduling.preemption"]),
        ({"swap_tokens": -16}, SWAP, ["pools.a.swap_tokens"]),
        ({"swap_tokens": 40}, SWAP, ["pools.a.swap_tokens", "pools.a.block_size"]),
        ({"batching": "static"}, SWAP, ["pools.a.batching", "scheduling.preemption", "swap"]),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(pool, scheduling, named):
    tree = {"pools": [{"name": "a", "role": "mixed", **pool}], "scheduling": scheduling}
    with pytest.raises(ConfigError) as caught:
        config.from_tree(tree)
    for name in named:
        assert name in caught.value.message
    assert caught.value.field


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
@pytest.mark.parametrize("preemption", ["off", "recompute", "swap"])
@pytest.mark.parametrize("batching", ["static", "dynamic", "continuous"])
def test_batches_are_formed_by_any_role_and_only_where_nobody_is_preempted(
    batching, preemption, role
):
    """The pool that is at fault is named, whichever half it has."""
    others = [{"name": each, "role": each} for each in ("prefill", "decode") if each != role]
    tree = {
        "pools": [{"name": "a", "role": role, "batching": batching}, *others],
        "scheduling": {"preemption": preemption},
    }
    if batching == "continuous" or preemption == "off":
        assert config.from_tree(tree).scheduling.preemption.value == preemption
        return
    with pytest.raises(ConfigError) as caught:
        config.from_tree(tree)
    assert caught.value.field == "pools.a.batching"
    for name in ("scheduling.preemption", batching, preemption):
        assert name in caught.value.message


@pytest.mark.parametrize(("swap_tokens", "num_slots"), [(0, 64), (160, 10)])
def test_the_swap_buffer_is_as_large_as_the_pool_unless_it_is_told(swap_tokens, num_slots):
    pool = {"name": "a", "role": "mixed", "kv_tokens": 1024, "swap_tokens": swap_tokens}
    loaded = config.from_tree({"pools": [pool], "scheduling": SWAP})
    assert loaded.pools[0].num_swap_slots == num_slots


def test_prompts_are_computed_in_chunks_unless_a_pool_says_otherwise():
    pools = [{"name": "a", "role": "mixed"}, {"name": "b", "role": "mixed", "chunk_tokens": 0}]
    loaded = config.from_tree({"pools": pools})
    assert [pool.chunk_tokens for pool in loaded.pools] == [512, 0]


def test_batches_are_formed_where_nobody_is_preempted():
    tree = {
        "pools": [{"name": "a", "role": "mixed", "batching": "static", "batch_size": 4}],
        "scheduling": {**OFF, "policy": "priority", "tiers": ["b", "a"], "default_tier": "b"},
    }
    loaded = config.from_tree(tree)
    assert config.from_tree(config.to_tree(loaded)) == loaded
    assert loaded.pools[0].num_batch_slots == 4


SHARED = {"endpoints": {"host": "192.0.2.1"}, "security": {"cluster_token_env": "TOKEN"}}


def test_a_wider_address_takes_a_cluster_token():
    """S-16: named, of one interface, and never together with faults on purpose."""
    assert config.from_tree({**TREE, **SHARED}).endpoints.host == "192.0.2.1"
    for host in ("0.0.0.0", "::", "224.0.0.1"):
        with pytest.raises(ConfigError, match="no address of one interface"):
            config.from_tree({**TREE, **SHARED, "endpoints": {"host": host}})
    with pytest.raises(ConfigError, match=r"faults\.enabled"):
        config.from_tree({**TREE, **SHARED, "faults": {"enabled": True}})


@pytest.mark.parametrize(
    "security",
    [
        {"cluster_token_file": "token"},
        {"cluster_token_file": "/token", "cluster_token_env": "TOKEN"},
        {"cluster_token": "0123456789abcdef"},
    ],
)
def test_a_cluster_token_is_named_once_and_never_told(security):
    with pytest.raises(ConfigError, match=r"security\.cluster_token"):
        config.from_tree({**TREE, "security": security})


CUDA = {"device": "cuda", "gpus_per_worker": 1}


def test_a_pool_names_its_hardware():
    labels = {"zone": "a", "rack": "7"}
    pool = {**MIXED, **CUDA, "accelerator_type": "H100", "node_labels": labels, "cost_per_hour": 3}
    loaded = config.from_tree({"pools": [pool]})
    assert config.from_tree(config.to_tree(loaded)) == loaded
    assert dict(loaded.pools[0].node_labels) == labels
    assert hash(loaded.pools[0]) == hash(config.from_tree({"pools": [pool]}).pools[0])


@pytest.mark.parametrize(
    ("pool", "field"),
    [
        ({"device": "cuda"}, "gpus_per_worker"),
        ({**CUDA, "gpus_per_worker": 2}, "gpus_per_worker"),
        ({**CUDA, "gpus_per_worker": -1}, "gpus_per_worker"),
        ({"cost_per_hour": -1}, "cost_per_hour"),
        ({"cpus_per_worker": -1}, "cpus_per_worker"),
        ({"kv_bytes": 1 << 30, "kv_tokens": 4096}, "kv_bytes"),
    ],
)
def test_hardware_that_cannot_be_is_refused(pool, field):
    with pytest.raises(ConfigError) as caught:
        config.from_tree({"pools": [{**MIXED, **pool}]})
    assert caught.value.field == f"pools.a.{field}"


@pytest.mark.parametrize("labels", [["a"], {"a": 1}, {1: "a"}])
def test_labels_are_names_and_texts(labels):
    with pytest.raises(ConfigError, match=r"pools\.0\.node_labels"):
        config.from_tree({"pools": [{**MIXED, "node_labels": labels}]})


def test_two_halves_on_parts_of_one_gpu_share_memory():
    half = {**CUDA, "gpus_per_worker": 0.5}
    pools = [{"name": "p", "role": "prefill", **half}, {"name": "d", "role": "decode", **half}]
    with pytest.raises(ConfigError, match="NCCL cannot connect two workers on one GPU"):
        config.from_tree({"pools": pools})
    assert config.from_tree({"pools": pools, "transport": "auto"}).pools[0].gpus_per_worker == 0.5
