"""What a process finds out on its node, and how a deployment to a running Ray is prepared."""

import dataclasses
import socket

import pytest

from cluster import config as deploy_config
from cluster.errors import StartupError
from deploy import node, on_cluster, run_state
from deploy.fit import Node
from deploy.run_state import RunState
from deploy.serve_config import named

TREE = {
    "pools": [{"name": "a", "role": "mixed"}],
    "model": {"path": "trial"},
    "security": {"cluster_token_env": "TOKEN"},
}


def config_at(host, **tree):
    return deploy_config.from_tree({**TREE, **tree, "endpoints": {"host": host}})


def outer_address():
    """An address of this machine that is not loopback; None where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return probe.getsockname()[0]


def test_on_one_machine_all_is_on_its_loopback_address():
    config = config_at("127.0.0.2")
    assert node.own_address(config) == "127.0.0.2"
    assert node.worker_id(config, "decode", 3) == "decode-3"


def test_in_a_network_a_node_is_where_it_speaks_to_the_head_from():
    mine = outer_address()
    if mine is None:
        pytest.skip("this machine has no network")
    config = config_at("192.0.2.1")
    assert node.own_address(config) == mine
    worker_id = node.worker_id(config, "decode", 3)
    assert worker_id.startswith("decode-")
    assert worker_id.endswith("-3")
    assert mine not in worker_id


def test_each_node_makes_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "RunState", lambda port: RunState(port, root=tmp_path))
    folder = node.run_folder(config_at("127.0.0.1"), "")
    assert folder.is_relative_to(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert node.run_folder(config_at("127.0.0.1"), "") == folder
    assert node.run_folder(config_at("127.0.0.1"), "/launcher") == node.Path("/launcher")
    folder.chmod(0o755)
    with pytest.raises(StartupError, match="open to other users"):
        node.run_folder(config_at("127.0.0.1"), "")


def test_ray_is_asked_for_what_a_pool_names():
    # Not at the top: Serve warns of itself while it is imported, and warnings are errors here.
    build_app = pytest.importorskip("deploy.build_app")
    hardware = {
        "accelerator_type": "H100",
        "node_labels": {"rack": "7"},
        "gpus_per_worker": 0.5,
        "cpus_per_worker": 4,
    }
    mixed = {"name": "a", "role": "mixed"}
    plain, rich = deploy_config.from_tree(
        {"pools": [mixed, {**mixed, **hardware, "name": "b"}]}
    ).pools
    assert build_app._actor_options(plain) == {"num_cpus": 0.0, "num_gpus": 0.0}
    assert build_app._actor_options(rich) == {
        "num_cpus": 4.0,
        "num_gpus": 0.5,
        "accelerator_type": "H100",
        "label_selector": {"rack": "7"},
    }


def test_serve_misses_a_silent_worker_in_time_and_none_that_was_only_paused():
    """It gives up after so many checks in a row that nobody has answered, by its own constant."""
    constants = pytest.importorskip("ray.serve._private.constants")
    build_app = pytest.importorskip("deploy.build_app")
    config = deploy_config.from_tree({"pools": [{"name": "a", "role": "mixed"}]})
    arguments = {"config": deploy_config.to_tree(config), "model_path": "/m", "run_dir": ""}
    router = build_app.build(arguments)._bound_deployment
    parts = [router, *(app._bound_deployment for app in router.init_args[3:])]
    missed_s = {
        part.name: constants.REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD
        * part._deployment_config.health_check_timeout_s
        for part in parts
    }
    # The pool is whole again in 30 s, of which another one takes some to start.
    assert 10.0 < missed_s.pop("a") < 15.0
    # The control plane may be paused for 15 s.
    assert missed_s == {"control": 30.0, "router": 30.0}


@pytest.mark.parametrize(
    ("path", "name"),
    [("trial", "SmolLM2-135M-Instruct"), ("owner/name", "owner/name"), ("/models/mine/", "mine")],
)
def test_the_name_of_a_model_is_known_before_it_is_there(path, name):
    assert named(config_at("127.0.0.1", model={"path": path})).model.name == name


def test_a_folder_is_named_by_its_whole_path(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    built = named(config_at("127.0.0.1", model={"path": "m"})).model
    assert (built.path, built.name) == (str(tmp_path / "m"), "m")


HEAD_NODE = Node(
    name="h", address="192.0.2.1", resources={"CPU": 1.0, "node:__internal_head__": 1.0}
)
OTHER = dataclasses.replace(HEAD_NODE, name="o", address="192.0.2.2", resources={"CPU": 1.0})


def test_head_is_the_head_nodes_address():
    config, same = on_cluster._at_head(config_at("head"), [OTHER, HEAD_NODE])
    assert config.endpoints.host == "192.0.2.1"
    assert same == ["--set", "endpoints.host=192.0.2.1"]
    with pytest.raises(StartupError, match=r"--set endpoints\.host=ADDRESS"):
        named(config_at("head"))


def test_loopback_doors_are_refused_where_workers_could_be_elsewhere():
    local = config_at("127.0.0.1")
    assert on_cluster._at_head(local, [HEAD_NODE]) == (local, [])
    with pytest.raises(StartupError, match=r"127\.0\.0\.1 is this machine alone.* on o: use head"):
        on_cluster._at_head(local, [HEAD_NODE, OTHER])
    here = dataclasses.replace(OTHER, address="127.0.0.3")
    assert on_cluster._at_head(local, [HEAD_NODE, here]) == (local, [])


def test_nodes_that_come_late_are_waited_for(monkeypatch):
    """What is missing is told while it waits, and again when it gives up."""
    config = config_at("127.0.0.1", pools=[{**TREE["pools"][0], "cpus_per_worker": 2}])
    big = dataclasses.replace(OTHER, resources={"CPU": 2.0})
    answers = [[HEAD_NODE], [HEAD_NODE], [HEAD_NODE, big]]
    told = []
    monkeypatch.setattr(on_cluster, "ray_nodes", lambda: answers.pop(0))
    monkeypatch.setattr(on_cluster, "_POLL_S", 0.0)
    monkeypatch.setattr(on_cluster, "_say", told.append)
    on_cluster._wait_for_nodes(config, 60.0)
    assert len(told) == 1
    assert "pool a: 0 of 1 workers fit" in told[0]
    answers.append([HEAD_NODE])
    with pytest.raises(StartupError, match=r"^pool a: 0 of 1 workers fit"):
        on_cluster._wait_for_nodes(config, 0.0)


def test_the_run_folder_can_be_joined_again(tmp_path):
    state = run_state.RunState(8002, root=tmp_path)
    assert state.join() == state.join() == state.folder
    assert state.running() is None
