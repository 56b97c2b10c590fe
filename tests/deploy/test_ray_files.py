"""The cluster files for `ray up`: valid to Ray, and they agree with the rest of this repository."""

import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from cluster import config as deploy_config
from tests.e2e.plain_cluster import REPO

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


def test_the_cloud_has_nodes_for_the_deploy_file_that_it_names():
    """Each pool's hardware is a node type, and enough of it is started for all workers."""
    text = (FOLDER / "aws.yaml").read_text()
    (name,) = set(re.findall(r"deploy/configs/[\w-]+\.yaml", text))
    config = deploy_config.load(REPO / name)
    types = read(FOLDER / "aws.yaml")["available_node_types"]
    for pool in config.pools:
        kind = f"accelerator_type:{pool.accelerator_type}"
        gpus = sum(
            node["min_workers"] * node["resources"]["GPU"]
            for node in types.values()
            if kind in node["resources"]
        )
        assert gpus >= pool.count * pool.gpus_per_worker, pool.name
    assert (
        sum(n.get("min_workers", 0) for n in types.values())
        <= read(FOLDER / "aws.yaml")["max_workers"]
    )
