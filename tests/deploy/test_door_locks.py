"""The doors of a host: routers of one cluster share them, two clusters do not meet."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster import config as deploy_config
from cluster.errors import StartupError
from deploy import door_locks
from deploy.door_locks import DoorLocks

OURS, THEIRS = "192.0.2.1:6379", "192.0.2.1:6380"


def listen(port: int = 0) -> socket.socket:
    """As a router does, which lets others listen there too."""
    door = socket.socket()
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    door.bind(("127.0.0.1", port))
    door.listen()
    return door


def make_config(**doors):
    pools = [{"name": "m", "role": "mixed"}]
    free = [listen() for _ in range(3)]
    ports = [door.getsockname()[1] for door in free]
    for door in free:
        door.close()
    names = ("http_port", "grpc_port", "control_port")
    endpoints = dict(zip(names, ports, strict=True)) | doors
    return deploy_config.from_tree({"pools": pools, "endpoints": endpoints})


@pytest.fixture
def make_locks(tmp_path):
    made = []

    def make(cluster=OURS):
        made.append(DoorLocks(tmp_path, cluster))
        return made[-1]

    yield make
    for locks in made:
        locks.release()


def test_routers_of_one_cluster_share_their_doors(make_locks):
    """The second comes when the first one listens, as with two replicas or in an update."""
    config = make_config()
    make_locks().take(config)
    with listen(config.endpoints.http_port), listen(config.endpoints.grpc_port):
        make_locks().take(config)


@pytest.mark.parametrize("shared", ["http_port", "grpc_port"])
def test_a_second_cluster_with_another_control_port_is_refused(make_locks, shared):
    """Point 9: the kernel would give each of them some of what comes."""
    ours = make_config()
    port = getattr(ours.endpoints, shared)
    theirs = make_config(**{shared: port})
    make_locks().take(ours)
    with pytest.raises(StartupError) as caught:
        make_locks(THEIRS).take(theirs)
    assert caught.value.message == (
        f"port {port} (endpoints.{shared}) is a door of another cluster, on the Ray at {OURS}: "
        f"end that one, or choose another port with --set endpoints.{shared}=PORT"
    )
    make_locks(THEIRS).take(make_config())


@pytest.mark.parametrize("shared", ["http_port", "grpc_port"])
def test_who_listens_without_a_lock_is_found(make_locks, shared, monkeypatch):
    monkeypatch.setattr(door_locks, "_PATIENCE_S", 0.1)
    with listen() as stranger:
        port = stranger.getsockname()[1]
        config = make_config(**{shared: port})
        for _ in range(2):
            with pytest.raises(StartupError, match=rf"port {port} \(endpoints\.{shared}\) is tak"):
                make_locks().take(config)
    make_locks().take(config)


def test_a_port_that_is_just_let_go_is_waited_for(make_locks):
    stranger = listen()
    config = make_config(http_port=stranger.getsockname()[1])
    letting_go = threading.Timer(0.2, stranger.close)
    letting_go.start()
    make_locks().take(config)
    letting_go.join()


def test_the_doors_of_a_cluster_that_is_gone_are_free(make_locks):
    config, first = make_config(), make_locks(THEIRS)
    first.take(config)
    first.release()
    first.release()
    make_locks().take(config)


def test_one_that_failed_holds_nothing(make_locks):
    """It was refused the second door, and gives the first one back."""
    ours, refused = make_config(), make_locks(THEIRS)
    make_locks().take(ours)
    theirs = make_config(grpc_port=ours.endpoints.grpc_port)
    with pytest.raises(StartupError):
        refused.take(theirs)
    make_locks("192.0.2.1:6381").take(make_config(http_port=theirs.endpoints.http_port))


def test_routers_that_start_at_once_agree_whose_doors_these_are(make_locks):
    for _ in range(5):
        config, all_locks = make_config(), {}
        for number in range(8):
            name = OURS if number % 2 else THEIRS
            all_locks[make_locks(name)] = name

        def taken(locks, config=config, names=all_locks):
            with contextlib.suppress(StartupError):
                locks.take(config)
                return names[locks]

        with ThreadPoolExecutor(8) as threads:
            winners = [name for name in threads.map(taken, all_locks) if name]
        assert winners in ([OURS] * 4, [THEIRS] * 4)


def test_a_router_that_is_killed_leaves_its_doors(make_locks, tmp_path):
    config = make_config()
    script = (
        "import json, sys; from pathlib import Path; from cluster import config\n"
        "from deploy.door_locks import DoorLocks\n"
        "locks = DoorLocks(Path(sys.argv[1]), sys.argv[2])\n"
        "locks.take(config.from_tree(json.loads(sys.argv[3])))\n"
        "print('taken', flush=True); sys.stdin.read()\n"
    )
    tree = json.dumps(deploy_config.to_tree(config))
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), THEIRS, tree],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(StartupError, match="a door of another cluster"):
            make_locks().take(config)
        other.kill()
        other.wait(10)
        make_locks().take(config)


def test_files_that_are_held_are_kept_young(tmp_path):
    """What sweeps /tmp of old files would let two clusters have one door."""
    locks = DoorLocks(tmp_path, OURS)
    locks.take(make_config())
    files = sorted(tmp_path.iterdir())
    for file in files:
        os.utime(file, (0, 0))
    locks.keep()
    assert len(files) == 2
    assert all(file.stat().st_mtime > 0 for file in files)
    locks.release()
