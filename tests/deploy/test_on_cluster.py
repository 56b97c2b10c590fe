"""``pdserve deploy`` until it serves, or until it is given up; nothing of Ray runs."""

import contextlib
import threading

import pytest

from cluster import config as deploy_config
from cluster.errors import StartupError
from deploy import on_cluster, ray_room
from deploy.fit import Node
from deploy.run_state import RunState

PAIR = [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"}]
TREE = {"pools": PAIR, "model": {"path": "trial", "name": "m"}, "endpoints": {"control_port": 8123}}
WAITS = "pool decode: 0 of 1 workers registered"
HEAD = Node(name="n", address="127.0.0.1", resources={"node:__internal_head__": 1.0}, labels={})


class FakeHost:
    """Serve has started the app, and says why workers end."""

    def __init__(self, *args, **options):
        pass

    def start(self):
        pass

    def failure(self):
        return None

    def start_failure(self):
        return None

    def obstacles(self):
        return "; decode: 1 replicas wait for {GPU: 1}"

    def unfinished(self):
        return ""


def fake_time(now: list[float]) -> type:
    class FakeTime:
        monotonic = staticmethod(lambda: now[0])

        @staticmethod
        def sleep(seconds):
            now[0] += seconds

    return FakeTime


@pytest.fixture
def deploy(tmp_path, monkeypatch):
    """Deploy the pair; ``works`` are what its processes have done at each look, one a second."""
    now = [0.0]

    class FakeLoading:
        def works(self, at):
            return deploy.works(at)

    def deploy(works=lambda at: {}, *, had_app=False):
        deploy.works = works
        monkeypatch.setattr(on_cluster, "_has_app", lambda: had_app)
        monkeypatch.setattr(on_cluster, "_deployed_drain_s", lambda: deploy.drain_s)
        patience = on_cluster.Patience(ready_s=1800.0)
        with pytest.raises(StartupError) as caught:
            on_cluster.deploy(deploy_config.from_tree(TREE), "auto", patience)
        return caught.value.message, now[0]

    deploy.given_up = []
    deploy.drain_s = 0.0
    for name, fake in {
        "time": fake_time(now),
        "ClusterLoading": FakeLoading,
        "RayHost": FakeHost,
        "_joined": lambda address: contextlib.nullcontext(),
        "_wait_for_nodes": lambda config, wait_s: None,
        "ray_nodes": lambda: [HEAD],
        "named": lambda config: config,
        "check_ports": lambda config: None,
        "missing": lambda config: WAITS,
        "RunState": lambda port: RunState(port, root=tmp_path),
        "_take_away": lambda: deploy.given_up.append(True),
    }.items():
        monkeypatch.setattr(on_cluster, name, fake)
    return deploy


def test_what_stands_still_ends_with_its_pool_and_what_serve_says(deploy):
    message, at = deploy()
    why = "; decode: 1 replicas wait for {GPU: 1}"
    assert message == f"not ready, and nothing has moved for 20 s: {WAITS}{why}"
    assert at <= 45.0
    assert deploy.given_up


def test_a_ray_that_tells_nothing_more_ends_it(deploy, monkeypatch):
    """Point 9: its calls have no timeout, and it hangs once the app is handed over."""
    monkeypatch.setattr(on_cluster, "_SILENT_S", 0.05)
    is_over = threading.Event()
    message, at = deploy(lambda at: dict.fromkeys("d", is_over.wait(30)))
    is_over.set()
    assert message == "Ray has not answered for 0.05 s"
    assert at <= 45.0
    assert deploy.given_up


def test_whoever_loads_has_as_long_as_it_takes(deploy):
    message, at = deploy(lambda at: {"d": at})
    assert message.startswith("not ready after 1800 s: ")
    assert at >= 1800.0


def test_a_worker_that_does_not_come_up_ends_it_at_once(deploy, monkeypatch):
    failure = StartupError("decode failed to start: no memory")
    monkeypatch.setattr(FakeHost, "start_failure", lambda self: failure)
    assert deploy() == (failure.message, 0.0)
    assert deploy.given_up


def test_what_was_to_replace_an_app_is_left_to_be_replaced(deploy):
    deploy(had_app=True)
    assert not deploy.given_up


@pytest.mark.parametrize(("drain_s", "stuck_s"), [(10.0, 31.0), (90.0, 91.0)])
def test_predecessors_may_drain_as_long_as_they_may(deploy, monkeypatch, drain_s, stuck_s):
    """All who are wanted are there; Serve waits for the end of those that were to be replaced.

    CASES P-27: an update from this time to drain to one of 30 s.
    """
    deploy.drain_s = drain_s
    monkeypatch.setattr(on_cluster, "missing", lambda config: "")
    monkeypatch.setattr(FakeHost, "unfinished", lambda self: "decode: 1 replica is stopping")
    message, at = deploy(had_app=True)
    assert message.startswith(f"not ready, and nothing has moved for {stuck_s:.0f} s: decode")
    assert stuck_s - 1.0 < at < stuck_s + 30.0


def test_a_first_deployment_waits_for_no_predecessors(deploy, monkeypatch):
    """Point 9: whatever there is time to drain, nobody drains: a standstill is told within 60 s."""
    deploy.drain_s = 90.0
    monkeypatch.setattr(on_cluster, "missing", lambda config: "")
    monkeypatch.setattr(FakeHost, "unfinished", lambda self: "decode: 1 replica is starting")
    message, at = deploy()
    assert message.startswith("not ready, and nothing has moved for 20 s: decode")
    assert at < 60.0


def test_an_app_that_serve_has_built_gets_on_though_nobody_answers_yet(deploy, monkeypatch):
    """A slow machine builds it in 15 s, and starts the control plane in as many."""
    parts = iter(["not told yet"] * 15 + ["{'control': 'UPDATING'}"] * 10_000)
    monkeypatch.setattr(on_cluster, "missing", lambda config: "the control plane does not answer")
    monkeypatch.setattr(FakeHost, "unfinished", lambda self: next(parts))
    message, at = deploy()
    assert message.startswith("not ready, and nothing has moved for 20 s")
    assert at > on_cluster.STUCK_S + 15 * on_cluster._POLL_S / 2


def taken(config):
    raise StartupError("port 8000 is taken")


def test_doors_that_somebody_has_are_told_before_anything_is_deployed(deploy, monkeypatch):
    """Point 9: a second Ray of this host, with a control port of its own, would share them."""
    monkeypatch.setattr(on_cluster, "check_ports", taken)
    monkeypatch.setattr(FakeHost, "start", pytest.fail)
    assert deploy() == ("port 8000 is taken", 0.0)
    assert not deploy.given_up


def test_an_update_comes_to_doors_that_are_its_own(deploy, monkeypatch):
    monkeypatch.setattr(on_cluster, "check_ports", taken)
    message, _ = deploy(had_app=True)
    assert message.startswith("not ready")


@pytest.fixture
def wait_for_nodes(monkeypatch):
    """Wait for room for one worker that takes a CPU; ``used`` is what others use at each look."""
    now = [0.0]

    monkeypatch.setattr(on_cluster, "time", fake_time(now))
    pools = [{"name": "m", "role": "mixed", "cpus_per_worker": 1}]

    def wait(used, wait_s=0.0, num_cpus=1.0):
        def nodes():
            return [Node(name="n", address="n", resources={"CPU": num_cpus}, used=used(now[0]))]

        monkeypatch.setattr(on_cluster, "ray_nodes", nodes)
        on_cluster._wait_for_nodes(deploy_config.from_tree({"pools": pools}), wait_s)
        return now[0]

    wait.now = now
    return wait


def test_what_others_have_given_back_is_waited_for(wait_for_nodes):
    """Ray tells it a moment later."""
    assert wait_for_nodes(lambda at: {"CPU": 1.0} if at < 3.0 else {}) == 3.0


def test_what_others_keep_is_told_with_who_has_no_room(wait_for_nodes):
    with pytest.raises(StartupError, match=r"^pool m: 0 of 1 workers fit.* other apps use 1 CPU"):
        wait_for_nodes(lambda at: {"CPU": 1.0})
    assert wait_for_nodes.now[0] == on_cluster._GIVEN_BACK_S


def test_what_no_node_has_is_told_at_once(wait_for_nodes):
    with pytest.raises(StartupError, match=r"^pool m: 0 of 1 workers fit"):
        wait_for_nodes(lambda at: {}, num_cpus=0.0)
    assert wait_for_nodes.now[0] == 0.0
    with pytest.raises(StartupError):
        wait_for_nodes(lambda at: {}, wait_s=900.0, num_cpus=0.0)
    assert wait_for_nodes.now[0] == 900.0


def test_what_no_gpu_holds_is_told_before_ray_is_looked_for(deploy, monkeypatch):
    """Point 1: else each worker would run out of memory in the midst of loading."""

    def too_big(config):
        raise StartupError("pool decode: a worker takes 90 GB")

    monkeypatch.setattr(on_cluster, "check_gpus", too_big)
    monkeypatch.setattr(on_cluster, "_joined", pytest.fail)
    assert deploy() == ("pool decode: a worker takes 90 GB", 0.0)


def test_a_serve_that_does_not_answer_keeps_nobody_from_the_reason(deploy, monkeypatch):
    """Its calls wait for ever where its controller hangs."""
    hangs = threading.Event()
    monkeypatch.setattr(on_cluster, "_GIVE_UP_S", 0.01)
    monkeypatch.setattr(on_cluster, "_take_away", hangs.wait)
    message, _ = deploy()
    assert message.startswith("not ready")
    hangs.set()


@pytest.mark.parametrize(
    "app", [{}, {"deployed_app_config": None}, {"deployed_app_config": {"args": {"x": 1}}}]
)
def test_what_no_deploy_file_of_ours_put_there_drains_for_no_time(monkeypatch, app):
    """It went meanwhile, or was started by other means."""
    pytest.importorskip("ray.serve")
    applications = {"pdserve": app} if app else {}
    monkeypatch.setattr(ray_room, "ask_serve", lambda question: {"applications": applications})
    assert on_cluster._deployed_drain_s() == 0.0
