"""Calls to a Ray and a Serve that hang: who starts or ends a cluster is told within a minute."""

import contextlib
import socket
import sys
import threading

import pytest

from cluster import config as deploy_config
from cluster.errors import StartupError
from deploy import host_ray, on_cluster, ray_room
from deploy.bounded import are_all_answered, bounded
from deploy.fit import Node
from deploy.host_ray import RayHost
from deploy.run_state import RunState

CONFIG = deploy_config.from_tree({"pools": [{"name": "m", "role": "mixed"}]})
SHORT_S = 0.05
A_MINUTE_S = 60.0


@pytest.fixture(autouse=True)
def serve():
    """Imported here, since it warns of its own doings."""
    return pytest.importorskip("ray.serve")


@pytest.fixture
def hang():
    """A call of Ray's or Serve's that doesn't come back before the test's end."""
    is_over = threading.Event()

    def hang(*args, **options):
        is_over.wait()
        raise RuntimeError("the test is over")

    yield hang
    is_over.set()
    assert are_all_answered()


def test_what_is_answered_is_returned_or_raised():
    assert bounded("nobody", 10.0, lambda: 7) == 7
    for kind in (ValueError, TimeoutError):
        with pytest.raises(kind, match="theirs"):
            bounded("nobody", 10.0, lambda kind=kind: (_ for _ in ()).throw(kind("theirs")))


def test_who_does_not_answer_is_named(hang):
    with pytest.raises(StartupError, match=r"^Ray Serve has not answered for 0\.05 s$"):
        bounded("Ray Serve", SHORT_S, hang)


def test_all_bounds_of_a_start_are_within_a_minute():
    """Point 9: one that hangs is found at the first call, or once Serve is to take the app."""
    bounds = {name: getattr(host_ray, name) for name in dir(host_ray) if name.endswith("_S")}
    assert {"_JOIN_TIMEOUT_S", "_SERVE_TIMEOUT_S"} <= bounds.keys()
    leaving_s = on_cluster._GIVE_UP_S + ray_room.ANSWER_S
    for bound_s in (bounds["_JOIN_TIMEOUT_S"], bounds["_SERVE_TIMEOUT_S"], ray_room.ANSWER_S):
        assert bound_s + leaving_s < A_MINUTE_S


def test_a_ray_that_takes_connections_and_hangs_is_told(monkeypatch, hang):
    monkeypatch.setattr("ray.init", hang)
    monkeypatch.setattr(host_ray, "_JOIN_TIMEOUT_S", SHORT_S)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        # Ray itself would name this machine by another address.
        monkeypatch.setattr(
            "ray._private.services.canonicalize_bootstrap_address_or_die", lambda told: told
        )
        with pytest.raises(StartupError, match=f"^the Ray at {address} has not answered for"):
            host_ray.join_ray(address)


def test_a_ray_that_hangs_later_is_told_and_not_left(monkeypatch, hang):
    """Leaving with a call under way would end this process before anybody is told."""
    left = []
    monkeypatch.setattr("ray.nodes", hang)
    monkeypatch.setattr("ray.shutdown", lambda: left.append(True))
    monkeypatch.setattr(ray_room, "ANSWER_S", SHORT_S)
    with pytest.raises(StartupError, match=r"^Ray has not answered for"):
        ray_room.ray_nodes()
    host_ray.leave_ray()
    assert not left


def test_a_ray_that_does_not_let_go_keeps_nobody(monkeypatch, hang):
    asked = []
    monkeypatch.setattr("ray.shutdown", lambda: asked.append(True) or hang())
    monkeypatch.setattr(ray_room, "ANSWER_S", SHORT_S)
    host_ray.leave_ray()
    assert asked


def test_a_serve_that_hangs_as_it_starts_is_told(monkeypatch, hang, tmp_path):
    room = Node(name="n", address="127.0.0.1", resources={"CPU": 1.0})
    monkeypatch.setattr(ray_room, "ray_nodes", lambda: [room])
    monkeypatch.setattr("ray.serve.start", hang)
    monkeypatch.setattr(host_ray, "_SERVE_TIMEOUT_S", SHORT_S)
    state = RunState(8002, root=tmp_path)
    host = RayHost(CONFIG, model_path="trial", state=state, is_joined=True)
    with pytest.raises(StartupError, match=r"^Ray Serve has not answered for"):
        host.start()


@pytest.fixture
def joined(monkeypatch):
    monkeypatch.setattr(on_cluster, "_joined", lambda address: contextlib.nullcontext())
    monkeypatch.setattr(ray_room, "ANSWER_S", SHORT_S)


@pytest.mark.usefixtures("joined")
def test_a_serve_that_hangs_is_told_to_who_takes_the_app_away(monkeypatch, hang):
    monkeypatch.setattr("ray.serve.status", hang)
    with pytest.raises(StartupError, match=r"^Ray Serve has not answered for"):
        on_cluster.remove("auto")


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("looks", [3, None])
def test_an_app_is_waited_for_as_long_as_it_may_drain(monkeypatch, capsys, looks):
    """CASES P-27: Serve's own call gives up after a minute; None: it never goes."""
    now, left, deleted = [0.0], iter(range(looks or 1000)), []

    class FakeTime:
        monotonic = staticmethod(lambda: now[0])

        @staticmethod
        def sleep(seconds):
            now[0] += seconds

    monkeypatch.setattr(on_cluster, "time", FakeTime)
    monkeypatch.setattr(on_cluster, "_has_app", lambda: next(left, None) is not None)
    monkeypatch.setattr(on_cluster, "_deployed_drain_s", lambda: 90.0)
    monkeypatch.setattr("ray.serve.delete", lambda name, _blocking: deleted.append(_blocking))
    if looks is None:
        with pytest.raises(StartupError, match="still there after 120 s"):
            on_cluster.remove("auto")
        assert now[0] == 120.0
    else:
        assert on_cluster.remove("auto") == 0
        assert capsys.readouterr().out == "taken away\n"
    assert deleted == [False]


def test_a_ray_that_hangs_at_the_end_of_its_launcher_keeps_nobody(monkeypatch, hang, tmp_path):
    """Whatever is left of it is ended with all else that was started."""
    asked = []
    monkeypatch.setattr("ray.shutdown", lambda: asked.append(True) or hang())
    host = RayHost(CONFIG, model_path="trial", state=RunState(8002, root=tmp_path))
    host._is_started = True
    host.stop(SHORT_S)
    assert asked
    host.stop(SHORT_S)
    assert len(asked) == 1, "it was ended twice"


def test_a_call_that_hangs_keeps_the_others_from_leaving_but_not_itself(hang):
    assert bounded("Ray", A_MINUTE_S, are_all_answered)
    with pytest.raises(StartupError):
        bounded("Ray Serve", SHORT_S, hang)
    assert not bounded("Ray", A_MINUTE_S, are_all_answered)


def test_an_exit_of_the_call_is_told_at_once():
    with pytest.raises(SystemExit):
        bounded("Ray", A_MINUTE_S, sys.exit)
