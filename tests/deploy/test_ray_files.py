"""The cluster files for `ray up`: valid to Ray, and they agree with the rest of this repository."""

import re
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
import yaml

from cluster import config as deploy_config
from tests.e2e.plain_cluster import REPO
from tests.e2e.ray_nodes import ENVIRONMENT

FOLDER = REPO / "deploy" / "ray"
FILES = sorted(FOLDER.glob("*.yaml"))
CONFIGS = REPO / "deploy" / "configs"


def read(path: Path):
    return yaml.safe_load(path.read_text())


def commands_of(tree) -> list[str]:
    return [line for key, lines in tree.items() if key.endswith("_commands") for line in lines]


def prepared(tree):
    """As `ray up` makes it of the file, by Ray's own code, without a cloud."""
    util = pytest.importorskip("ray.autoscaler._private.util")
    whole = util.prepare_config(tree)
    util.validate_config(whole)
    return whole


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ray_takes_it(path):
    whole = prepared(read(path))
    assert whole["cluster_name"] == "pdserve"
    assert whole["head_node_type"] in whole["available_node_types"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ray_refuses_a_misspelt_key(path):
    """The check is one: Ray's own validation sees what is wrong."""
    with pytest.raises(jsonschema.ValidationError):
        prepared(read(path) | {"setup_comands": []})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ray_asks_for_its_token_and_has_no_dashboard(path):
    """S-04: whoever reaches Ray's ports has to show a token."""
    tree = read(path)
    starts = [c for c in commands_of(tree) if "ray start" in c]
    assert len(starts) == 2
    for command in starts:
        assert "export RAY_AUTH_MODE=token" in command
        assert "--dashboard-host" not in command
        assert "--head" not in command or "--include-dashboard=False" in command
    assert any(remote.endswith("/.ray/auth_token") for remote in tree["file_mounts"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_head_has_what_serve_shall_go_by(path):
    """Serve's controller reads it there: whoever fails its checks is ended, not asked to drain."""
    (start,) = [c for c in commands_of(read(path)) if "ray start --head" in c]
    serve = "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"
    assert f"{serve}={ENVIRONMENT[serve]}" in start.split("ray start --head")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_set_up_installs_this_project_by_its_constraints(path):
    tree = read(path)
    (remote,) = [name for name, local in tree["file_mounts"].items() if local == "."]
    name = Path(remote).name
    pins = REPO / "constraints.txt"
    installs = [c for c in tree["setup_commands"] if "pip install" in c]
    assert installs[-1].endswith(f"~/{name}")
    assert all(f"-c ~/{name}/{pins.name}" in command for command in installs)
    assert pins.is_file()
    assert {".git", ".venv"} <= set(tree["rsync_exclude"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_cluster_token_is_where_deploy_files_look(path):
    (command,) = [c for c in read(path)["setup_commands"] if "sudo install" in c]
    named = {
        config.security.cluster_token_file
        for config in map(deploy_config.load, sorted(CONFIGS.glob("*.yaml")))
        if config.security.has_token
    }
    assert named == {command.split()[-1]}


GPU_FILES = [
    path
    for path in sorted(CONFIGS.glob("*.yaml"))
    if any(pool.accelerator_type for pool in deploy_config.load(path).pools)
]


def kinds_of(count_of, path):
    """GPUs that the workers of a deploy file need, by kind: of all its pools together."""
    needed = Counter()
    for pool in deploy_config.load(path).pools:
        needed[f"accelerator_type:{pool.accelerator_type}"] += count_of(pool) * pool.gpus_per_worker
    return needed


def gpus_of(nodes, count):
    """GPUs that a cloud has by kind, with so many nodes of each type."""
    return Counter(
        {
            kind: nodes[name][count] * nodes[name]["resources"]["GPU"]
            for name in nodes
            for kind in nodes[name]["resources"]
            if kind.startswith("accelerator_type:")
        }
    )


def test_the_cloud_has_nodes_for_the_deploy_file_that_it_names():
    """Enough of each kind are started for the workers that are there from the start."""
    text = (FOLDER / "aws.yaml").read_text()
    (name,) = set(re.findall(r"deploy/configs/[\w-]+\.yaml", text))
    tree = read(FOLDER / "aws.yaml")
    types = tree["available_node_types"]
    assert kinds_of(lambda pool: pool.min_count, REPO / name) <= gpus_of(types, "min_workers")
    assert sum(node.get("min_workers", 0) for node in types.values()) <= tree["max_workers"]


@pytest.mark.parametrize("path", GPU_FILES, ids=lambda path: path.stem)
def test_the_cloud_can_have_nodes_for_all_workers_of_every_deploy_file(path):
    """Of the same kind may be several pools; scaled ones are at their most."""
    tree = read(FOLDER / "aws.yaml")
    types = tree["available_node_types"]
    assert kinds_of(lambda pool: pool.max_count, path) <= gpus_of(types, "max_workers")
    assert sum(node.get("max_workers", 0) for node in types.values()) <= tree["max_workers"]


def test_the_cloud_file_says_how_many_nodes_a_deploy_file_needs_from_the_start():
    """Nobody asks for them but ``min_workers``, and ``pdserve deploy`` waits in vain."""
    text = (FOLDER / "aws.yaml").read_text()
    types = read(FOLDER / "aws.yaml")["available_node_types"]
    for path in GPU_FILES:
        (said,) = re.findall(
            rf"((?:\w+ \d+(?:, | and )?)+) for {path.name}", text.replace("\n# ", " ")
        )
        nodes = {
            name: {**types[name], "min_workers": int(count)}
            for name, count in re.findall(r"(\w+) (\d+)", said)
        }
        needed = kinds_of(lambda pool: pool.min_count, path)
        assert +needed <= gpus_of(nodes, "min_workers")
        assert all(int(node["max_workers"]) >= node["min_workers"] for node in nodes.values())
