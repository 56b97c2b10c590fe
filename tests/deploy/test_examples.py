"""Every deploy file that comes along: it loads, it can be planned, and it can be built."""

import json

import pytest
import yaml

from cluster import config as deploy_config
from cluster.config import Device, Host, Role
from deploy import plan
from deploy.fit import Node, fit
from deploy.serve_config import serve_config, text_of
from tests.e2e.plain_cluster import REPO

FILES = sorted((REPO / "deploy" / "configs").glob("*.yaml"))
ON_GPUS = [path for path in FILES if "cuda" in path.read_text()]
QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "dtype": "bfloat16",
}  # fmt: skip
MODELS = {
    "Qwen/Qwen3-1.7B": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-14B": {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
        "num_attention_heads": 40, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""What these models' config.json say, since nothing is fetched here."""
HARDWARE = {
    "h100-l40s": {"H100": 2, "L40S": 2},
    "h200-h100-mixed": {"H200": 2, "H100": 3},
    "single-gpu": {"L4": 1},
}


def load(path, tmp_path, *overrides):
    """Load a file with its model's config.json in a folder, and an address where it needs one."""
    config = deploy_config.load(path)
    changes = list(overrides)
    if config.model.path in MODELS:
        (tmp_path / "config.json").write_text(json.dumps(QWEN3 | MODELS[config.model.path]))
        changes.append(f"model.path={tmp_path}")
    if config.endpoints.host == deploy_config.HEAD:
        changes.append("endpoints.host=192.0.2.10")
    return deploy_config.load(path, changes)


def nodes_of(path):
    return [
        Node(
            name=kind, address=kind,
            resources={"CPU": 16.0, "GPU": float(count), f"accelerator_type:{kind}": 1.0},
        )
        for kind, count in HARDWARE[path.stem].items()
    ]  # fmt: skip


# There is no other way yet to have the load told each second.
@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_builds_the_config_that_serve_takes(path, tmp_path):
    """Serve's own schema takes it, and its arguments are a deploy config again."""
    schema = pytest.importorskip("ray.serve.schema")
    config = load(path, tmp_path)
    tree = yaml.safe_load(text_of(config))
    app = schema.ServeDeploySchema.model_validate(tree).applications[0]
    assert app.import_path == "deploy.build_app:build"
    again = deploy_config.from_tree(app.args["config"])
    assert [pool.name for pool in again.pools] == [pool.name for pool in config.pools]
    assert all(pool.kv_tokens >= again.model.max_model_len for pool in again.pools)
    assert not any(pool.kv_bytes for pool in again.pools)


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_it_fits_the_hardware_that_it_names(path, tmp_path, capsys):
    config = load(path, tmp_path)
    assert plan.show(config, nodes_of(path)) == 0
    text = capsys.readouterr().out
    for pool in config.pools:
        assert pool.name in text
    fewer = nodes_of(path)[1:]
    assert fit(config.pools, fewer).problems


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_a_whole_context_fits_each_worker_twice(path, tmp_path):
    config = plan.with_kv_tokens(load(path, tmp_path))
    for pool in config.pools:
        assert pool.kv_tokens >= 2 * config.model.max_model_len, pool.name


def test_the_examples_are_what_the_readme_promises():
    configs = {path.stem: deploy_config.load(path) for path in FILES}
    pools = {name: [(p.role, p.accelerator_type) for p in c.pools] for name, c in configs.items()}
    assert pools["h100-l40s"] == [(Role.PREFILL, "H100"), (Role.DECODE, "L40S")]
    assert {
        (Role.DECODE, "H200"), (Role.PREFILL, "H100"), (Role.MIXED, "H100"),
    } == set(pools["h200-h100-mixed"])  # fmt: skip
    assert pools["single-gpu"] == [(Role.MIXED, "")]
    assert all(p.device is Device.CPU for p in configs["trial"].pools)
    assert configs["inline"].host is Host.INLINE


def test_both_hosts_build_the_app_from_the_same_file(tmp_path):
    """The local launcher and `pdserve build` differ in where folders are, and in nothing else."""
    config = load(REPO / "deploy" / "configs" / "trial-2p2d.yaml", tmp_path)
    ours = serve_config(config, model_path="m", run_dir="r")
    theirs = yaml.safe_load(text_of(config))
    for tree in (ours, theirs):
        args = tree["applications"][0]["args"]
        args.pop("model_path"), args.pop("run_dir")
        args["config"]["model"].pop("name")
    assert ours == theirs
