"""The plan: memory and tokens of KV by hand-made sums, and what it refuses."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster import config as deploy_config
from cluster.config import Device, Dtype, PoolConfig, Role
from cluster.errors import StartupError, UnsupportedModel
from deploy import control_actor, model_shape, plan
from deploy.fit import Node
from deploy.model_shape import count_parameters, read_shape, stated_layout
from tests.cluster.model.test_families import SERVED, write_model
from tests.factories_model import write_tiny_llama

KV_BYTES = 2 * 2 * 2 * 16 * 4
"""Of the tiny model's token: K and V, 2 layers, 2 heads of 16, fp32."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def pool(**options):
    options = {"dtype": Dtype.FP32, "max_num_seqs": 4, **options}
    return PoolConfig(name="a", role=Role.MIXED, **options)


def tree(tiny, **options):
    pools = [{"name": "a", "role": "mixed", "dtype": "fp32", **options}]
    return {"pools": pools, "model": {"path": str(tiny)}}


def test_parameters_are_counted_without_weights(tiny, tmp_path):
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    assert count_parameters(str(tmp_path)) == model.num_parameters()


def test_kv_is_what_a_worker_makes_of_it(tiny):
    """The same bytes of a token as the layout of a loaded model has."""
    from cluster.model.loader import load_model

    shape = read_shape(str(tiny))
    loaded = load_model(tiny, dtype=Dtype.FP32, device="cpu")
    assert shape.token_bytes(pool()) == loaded.layout(16).token_bytes == KV_BYTES
    assert shape.token_bytes(pool(kv_dtype=Dtype.BF16)) == KV_BYTES // 2
    assert shape.max_model_len == loaded.max_model_len


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "mixtral", "gpt2"])
def test_what_a_config_states_of_kv_is_what_a_worker_makes_of_it(family, tmp_path):
    from cluster.model.loader import load_model

    write_model(tmp_path, family, SERVED[family])
    stated = stated_layout(str(tmp_path))
    layout = load_model(tmp_path, dtype=Dtype.FP32, device="cpu").layout(16)
    assert stated["num_layers"] == layout.num_layers == 2
    assert stated.items() <= dataclasses.asdict(layout).items()
    assert ("num_kv_heads" in stated) is (family != "gpt2"), "its config has no such entry"


def test_nothing_is_stated_where_there_is_no_config(tmp_path, monkeypatch):
    """Nor is any fetched: a control plane waits for no network."""

    def fetch(hub_id):
        raise AssertionError(f"{hub_id} is fetched")

    monkeypatch.setattr(model_shape, "_fetch", fetch)
    assert stated_layout(str(tmp_path)) == {}
    assert stated_layout("/nowhere") == {}
    assert stated_layout("nobody/has-this-model") == {}


async def test_the_control_plane_is_told_the_models_shape(tiny, tmp_path, monkeypatch):
    servers = []

    class Server:
        def __init__(self, config, clock, *, settings):
            servers.append(settings)

        async def start(self, host, port):
            pass

    for name in ("log_to_file", "pin_process", "keep_what_start_made"):
        monkeypatch.setattr(control_actor, name, lambda *_: None)
    monkeypatch.setattr(control_actor, "ControlServer", Server)
    monkeypatch.delattr(control_actor.ControlReplica, "__del__")
    replica = object.__new__(control_actor.ControlReplica)
    await replica.__init__(tree(tiny), str(tiny), str(tmp_path))
    assert servers[0].model_layout == {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16}


def test_bytes_become_whole_blocks(tiny):
    shape = read_shape(str(tiny))
    assert shape.kv_tokens(pool(kv_bytes=100 * 16 * KV_BYTES + 5)) == 1600
    assert shape.kv_tokens(pool(kv_tokens=320)) == 320
    with pytest.raises(StartupError, match=r"pools\.a\.kv_bytes: 99 has no room for a block"):
        shape.kv_tokens(pool(kv_bytes=99))


def test_the_config_that_is_deployed_has_tokens(tiny):
    config = deploy_config.from_tree(tree(tiny, kv_bytes=64 * 16 * KV_BYTES))
    built = plan.with_kv_tokens(config)
    assert (built.pools[0].num_blocks, built.pools[0].kv_bytes) == (64, 0)
    assert deploy_config.from_tree(deploy_config.to_tree(built)) == built


def test_the_model_is_not_looked_for_where_tokens_are_given():
    config = deploy_config.from_tree(tree("/nowhere", kv_tokens=64))
    assert plan.with_kv_tokens(config) is config


@pytest.mark.parametrize(("swap_tokens", "gigabytes"), [(0, "1.1"), (1 << 20, "0.5")])
def test_what_is_swapped_out_takes_memory_too(tiny, capsys, swap_tokens, gigabytes):
    """As much as all of the KV where nothing else is said."""
    plan.show(deploy_config.from_tree(tree(tiny, kv_tokens=1 << 21)))
    assert "CPU memory" not in capsys.readouterr().out
    pool = tree(tiny, kv_tokens=1 << 21, swap_tokens=swap_tokens)
    swapping = {**pool, "scheduling": {"preemption": "swap"}}
    plan.show(deploy_config.from_tree(swapping))
    told = f"pool a: each worker takes {gigabytes} GB of CPU memory besides"
    assert told in capsys.readouterr().out


def test_a_plan_says_what_runs_where(tiny, capsys):
    config = deploy_config.from_tree(tree(tiny, count=3, kv_tokens=4096, cost_per_hour=0.5))
    node = Node(name="here", address="here", resources={"CPU": 1.0})
    assert plan.show(config, [node]) == 0
    text = capsys.readouterr().out
    assert "any node" in text
    rows = [line.split() for line in text.splitlines()]
    (row,) = [row for row in rows if row[:2] == ["a", "mixed"]]
    assert row[-3:] == ["4096", "12288", "1.5"]
    assert "24 sequences decode at once over 12288 tokens of KV; cost 1.5 an hour" in text
    assert text.rstrip().endswith("3")


def test_a_scaled_pool_is_shown_from_its_fewest_to_its_most(tiny, capsys):
    options = {"min": 1, "max": 3, "kv_tokens": 4096, "cost_per_hour": 0.5, "cpus_per_worker": 1}
    node = Node(name="here", address="here", resources={"CPU": 2.0})
    assert plan.show(deploy_config.from_tree(tree(tiny, **options)), [node]) == 0
    text = capsys.readouterr().out
    assert "1 to 3" in text
    assert "8 to 24 sequences decode at once over 4096 to 12288 tokens of KV" in text
    assert "cost 0.5 to 1.5 an hour" in text
    assert "at its most: pool a: 2 of 3 workers fit" in text


def test_a_worker_too_big_for_its_gpu_is_refused_after_the_plan(tiny, capsys):
    big = {"device": "cuda", "gpus_per_worker": 1, "accelerator_type": "L4", "kv_bytes": 24 * 10**9}
    with pytest.raises(StartupError, match=r"pool a: a worker takes 24\.\d GB, and may take 22\.1"):
        plan.show(deploy_config.from_tree(tree(tiny, **big)))
    assert "L4" in capsys.readouterr().out
    half = {**big, "gpus_per_worker": 0.5, "kv_bytes": 12 * 10**9}
    with pytest.raises(StartupError, match=r"may take 11\.0 GB of its 0\.5 L4"):
        plan.show(deploy_config.from_tree(tree(tiny, **half)))


def test_a_worker_too_big_for_its_gpu_is_refused_before_it_is_deployed(tiny):
    """Point 1: without a Ray, and in the words of the plan."""
    gpu = {"device": "cuda", "gpus_per_worker": 1, "accelerator_type": "L4"}
    with pytest.raises(StartupError, match=r"^pool a: a worker takes 24\.\d GB, and may take"):
        plan.check_gpus(deploy_config.from_tree(tree(tiny, **gpu, kv_bytes=24 * 10**9)))
    plan.check_gpus(deploy_config.from_tree(tree(tiny, **gpu, kv_bytes=10 * 10**9)))


def test_a_model_is_not_looked_for_where_no_gpus_memory_is_known():
    unknown = {"device": "cuda", "gpus_per_worker": 1, "accelerator_type": "NEXT-YEARS"}
    for options in ({}, unknown):
        plan.check_gpus(deploy_config.from_tree(tree("/nowhere", **options)))


def test_what_nodes_lack_is_refused_after_the_plan(tiny, capsys):
    node = Node(name="here", address="here", resources={"CPU": 1.0})
    with pytest.raises(StartupError, match="no node has the labels rack=7"):
        plan.show(deploy_config.from_tree(tree(tiny, node_labels={"rack": "7"})), [node])
    assert capsys.readouterr().out


def test_offline_the_error_says_what_to_give(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StartupError, match=r"config\.json can't be fetched .*model\.path=FOLDER"):
        read_shape("nobody/has-this-model")


@pytest.mark.parametrize("path", ["./none", "/none", "no-owner"])
def test_what_is_no_model_is_refused(path):
    with pytest.raises(StartupError, match=r"model\.path"):
        read_shape(path)


def test_a_config_of_no_known_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        count_parameters(str(tmp_path))


def test_the_trial_model_is_named_where_it_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    with pytest.raises(StartupError, match="`make run` fetches it"):
        read_shape("trial")


def test_auto_is_two_bytes_on_a_gpu(tiny):
    on_gpu = pool(dtype=Dtype.AUTO, device=Device.CUDA, gpus_per_worker=1.0)
    assert read_shape(str(tiny)).token_bytes(on_gpu) == KV_BYTES // 2
