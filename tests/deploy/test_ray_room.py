"""What others use of a Ray that several apps share, from what Ray and Serve say."""

import pytest

from cluster.errors import StartupError
from deploy import ray_room
from deploy.ray_room import own_use, ray_nodes, used_by_others

ASKS = {"num_cpus": 1.0, "num_gpus": 0.5}


def app(*node_ids, options=ASKS):
    """Serve's details of an app with one deployment; a replica by the node that it is on."""
    replicas = [{"node_id": node_id, "state": "RUNNING"} for node_id in node_ids]
    config = {"ray_actor_options": options}
    return {"deployments": {"decode": {"deployment_config": config, "replicas": replicas}}}


def test_the_apps_own_replicas_are_told_by_node():
    held = own_use(app("a", "a", "b"))
    assert held["a"] == {"CPU": 2.0, "GPU": 1.0}
    assert held["b"] == {"CPU": 1.0, "GPU": 0.5}
    assert held["c"] == {}


@pytest.mark.parametrize("options", [None, {}, {"num_cpus": None, "num_gpus": 0}])
def test_whoever_asks_for_nothing_holds_nothing(options):
    assert not any(own_use(app("a", options=options))["a"].values())
    assert own_use({}) == {}


def test_who_waits_for_a_node_holds_nothing():
    assert own_use(app(None)) == {}


def test_what_is_neither_free_nor_ours_is_used_by_others():
    total = {"CPU": 8.0, "GPU": 2.0, "memory": 1e9}
    ours = {"CPU": 2.0, "GPU": 1.0}
    assert used_by_others(total, {"CPU": 5.0, "GPU": 1.0}, ours) == {"CPU": 1.0, "GPU": 0.0}
    # Ray leaves out what nothing is left of.
    assert used_by_others(total, {}, ours) == {"CPU": 6.0, "GPU": 1.0}
    # What we gave back is told of by one of them before the other.
    assert used_by_others(total, total, ours) == {"CPU": 0.0, "GPU": 0.0}
    assert used_by_others({"CPU": 8.0}, {}, {}) == {"CPU": 8.0}


def test_a_node_that_has_only_just_come_is_not_in_use():
    assert used_by_others({"CPU": 8.0}, None, {}) == {}


def test_a_serve_that_is_gone_is_told_in_a_line():
    exceptions = pytest.importorskip("ray.exceptions")

    def ask():
        raise exceptions.RayActorError

    with pytest.raises(StartupError, match=r"^Ray Serve cannot be asked: The actor "):
        ray_room.ask_serve(ask)


def test_the_nodes_are_told_with_what_others_use(monkeypatch):
    """A redeploy of an app that fills its nodes finds them free."""
    pytest.importorskip("ray.serve")
    alive = [
        {"NodeID": name * 8, "NodeManagerAddress": "127.0.0.1", "Resources": {"CPU": 2.0},
         "Labels": {"rack": name}, "Alive": name != "c"}
        for name in "abc"
    ]  # fmt: skip
    monkeypatch.setattr("ray.nodes", lambda: alive)
    free = {"a" * 8: {}, "b" * 8: {"CPU": 1.0}}
    monkeypatch.setattr("ray._private.state.available_resources_per_node", lambda: free)
    details = {"applications": {"pdserve": app("a" * 8, "a" * 8)}}
    monkeypatch.setattr(ray_room, "ask_serve", lambda question: details)
    ours, others = ray_nodes()
    assert (ours.name, ours.used) == ("127.0.0.1 (aaaaaa)", {"CPU": 0.0})
    assert (others.name, others.used) == ("127.0.0.1 (bbbbbb)", {"CPU": 1.0})
    assert others.labels == {"rack": "b"}
