"""The run folder: what a launcher killed in mid-flight leaves, and how it is cleared."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from cluster.errors import StartupError
from deploy import processes
from deploy.processes import ProcessRef
from deploy.run_state import RUN_ID_VARIABLE, RunState

PORT = 8002

LAUNCHER = """
import os, signal, subprocess, sys
from pathlib import Path
from deploy.run_state import RunState

state = RunState(int(sys.argv[2]), root=Path(sys.argv[1]))
state.begin({"http": 8000})
grandchild = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " \\
    "print('up', flush=True); time.sleep(600)"
child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]]," \\
    "stdout=subprocess.PIPE, text=True, start_new_session=True); p.stdout.readline();" \\
    "print(p.pid, flush=True); time.sleep(600)"
p = subprocess.Popen([sys.executable, "-c", child, grandchild], stdout=subprocess.PIPE, text=True)
second = p.stdout.readline().strip()
unmarked = subprocess.Popen(
    ["sleep", "600"], env={k: v for k, v in os.environ.items() if k != "PDSERVE_RUN_ID"}
)
state.record(unmarked.pid, "unmarked")
if sys.argv[3] == "tidy":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        print(p.pid, second, unmarked.pid, flush=True)
        sys.stdin.read()
    finally:
        print(len(state.clear(5)), flush=True)
else:
    print(p.pid, second, unmarked.pid, flush=True)
    sys.stdin.read()
"""


@dataclass
class Tree:
    launcher: subprocess.Popen
    pids: list[int]


@pytest.fixture
def start(tmp_path):
    trees = []

    def start(port=PORT, how="careless"):
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(tmp_path), str(port), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        tree = Tree(launcher, [int(pid) for pid in launcher.stdout.readline().split()])
        trees.append(tree)
        return tree

    yield start
    for tree in trees:
        tree.launcher.kill()
        tree.launcher.wait()
        tree.launcher.stdin.close()
        tree.launcher.stdout.close()
        for pid in tree.pids:
            if processes.look_up(pid) is not None:
                os.kill(pid, signal.SIGKILL)


def kill(tree):
    tree.launcher.send_signal(signal.SIGKILL)
    tree.launcher.wait()


def alive(pids):
    return [pid for pid in pids if processes.look_up(pid) is not None]


@pytest.fixture
def state(tmp_path):
    return RunState(PORT, root=tmp_path)


@pytest.fixture
def begin(monkeypatch, state):
    """Begin a run of this very process, and forget its marker afterwards."""
    for name in (RUN_ID_VARIABLE, "SPT_NOENV"):
        monkeypatch.setenv(name, "")
    return lambda: state.begin({"http": 8000, "control": PORT})


def test_finds_and_clears_all_that_a_killed_launcher_left(start, state):
    tree = start()
    kill(tree)
    assert state.running() is None
    assert [p.pid for p in state.leftovers()] == sorted(tree.pids)
    ended = state.clear(4)
    assert sorted(p.pid for p in ended) == sorted(tree.pids)
    assert alive(tree.pids) == []
    assert not state.folder.exists()
    assert state.leftovers() == []


def test_needs_no_folder_to_find_them(start, state, tmp_path):
    tree = start()
    kill(tree)
    (state.folder / "run.json").unlink()
    marked = tree.pids[:2]
    assert [p.pid for p in state.leftovers()] == sorted(marked)
    state.clear(4)
    assert alive(marked) == []


def test_a_living_launcher_has_no_leftovers_and_its_place_is_refused(start, state):
    tree = start()
    assert state.running().pid == tree.launcher.pid
    assert state.leftovers() == []
    assert state.ports() == {"http": 8000}
    with pytest.raises(StartupError, match=rf"running already.*{tree.launcher.pid}.*pdserve down"):
        state.begin({})


def test_leftovers_refuse_the_next_run_and_name_themselves(start, state):
    tree = start()
    kill(tree)
    with pytest.raises(StartupError, match=rf"left 3 processes.*{tree.pids[0]}.*pdserve down"):
        state.begin({})


def test_clear_lets_a_living_launcher_stop_by_itself_first(start, state):
    tree = start(how="tidy")
    assert [p.pid for p in state.clear(20)] == [tree.launcher.pid]
    assert tree.launcher.stdout.readline() == "3\n"
    assert alive([*tree.pids, tree.launcher.pid]) == []


def test_other_clusters_and_unrelated_processes_are_left_alone(start, state):
    ours, theirs = start(), start(port=PORT + 1)
    with subprocess.Popen(["sleep", "600"]) as bystander:
        kill(ours)
        kill(theirs)
        state.clear(4)
        assert alive(ours.pids) == []
        assert alive(theirs.pids) == theirs.pids
        assert alive([bystander.pid]) == [bystander.pid]
        bystander.kill()


def test_a_reused_pid_is_not_taken_for_its_old_owner(start, state):
    tree = start()
    kill(tree)
    with subprocess.Popen(["sleep", "600"]) as bystander:
        stale = {"pid": bystander.pid, "started": 1, "name": "old"}
        with (state.folder / "processes.jsonl").open("a") as records:
            records.write(json.dumps(stale) + '\n{"pid": 12, "torn')
        state.clear(4)
        assert alive([bystander.pid]) == [bystander.pid]
        bystander.kill()
    assert not ProcessRef(pid=os.getpid(), started=1).is_alive()


def test_records_of_another_boot_are_not_believed(start, state):
    tree = start()
    kill(tree)
    run = json.loads((state.folder / "run.json").read_text())
    (state.folder / "run.json").write_text(json.dumps(run | {"boot_id": "another"}))
    assert [p.pid for p in state.leftovers()] == sorted(tree.pids[:2])


def test_a_launcher_sweeps_what_it_started_and_spares_itself(begin, state):
    begin()
    (state.ray_dir / "session").mkdir()
    child = subprocess.Popen(["sleep", "600"])
    assert state.running().pid == os.getpid()
    assert [p.pid for p in state.clear(4)] == [child.pid]
    assert child.wait() == -signal.SIGTERM
    assert not state.folder.exists()


def test_a_new_run_starts_from_an_empty_folder(begin, state):
    first = begin()
    (state.logs_dir / "old.log").touch()
    run = json.loads((state.folder / "run.json").read_text())
    run["launcher"]["started"] = 1  # that launcher is dead
    (state.folder / "run.json").write_text(json.dumps(run))
    assert begin() != first
    assert list(state.logs_dir.iterdir()) == []
    assert state.folder.stat().st_mode & 0o777 == 0o700


def test_logs_of_a_failed_start_can_be_kept(start, state):
    tree = start()
    kill(tree)
    (state.logs_dir / "worker.log").touch()
    state.clear(4, keep_folder=True)
    assert alive(tree.pids) == []
    assert (state.logs_dir / "worker.log").exists()
    state.check_free()


def test_clear_with_nothing_there_does_nothing(state):
    assert state.clear(1) == []


def test_record_skips_what_has_ended(begin, state):
    begin()
    child = subprocess.Popen(["true"])
    child.wait()
    state.record(child.pid, "gone")
    assert not (state.folder / "processes.jsonl").exists()


@pytest.mark.parametrize("kind", ["link", "open", "file"])
def test_a_folder_that_others_could_write_is_refused(tmp_path, state, kind):
    parent = tmp_path / f"pdserve-{os.getuid()}"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        parent.symlink_to(tmp_path / "elsewhere")
    elif kind == "open":
        parent.mkdir()
        parent.chmod(0o777)
    else:
        parent.touch()
    with pytest.raises(StartupError, match=r"run folder"):
        state.begin({})


def test_a_folder_of_another_user_is_refused(tmp_path, state, monkeypatch):
    state.folder.mkdir(mode=0o700, parents=True)
    state.folder.parent.chmod(0o700)
    (state.folder / "run.json").write_text("{}")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(StartupError, match="belongs to another user"):
        state.running()


RAY_LAUNCHER = """
import os, sys
from pathlib import Path
from deploy.run_state import RunState

state = RunState(int(sys.argv[2]), root=Path(sys.argv[1]))
state.begin({})
os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0"
)
import ray

ray.init(
    address="local", include_dashboard=False, num_cpus=1, object_store_memory=80 << 20,
    log_to_driver=False, _temp_dir=str(state.ray_dir),
)

@ray.remote(num_cpus=0, max_restarts=-1)
class Actor:
    def pid(self):
        return os.getpid()

actor = Actor.remote()
print(ray.get(actor.pid.remote()), flush=True)
sys.stdin.read()
"""


@pytest.mark.faults
def test_ray_keeps_the_marker_and_nothing_of_it_outlives_clear():
    """Ray's processes rewrite their titles, and with them, unasked, their environment."""
    with tempfile.TemporaryDirectory(prefix="pd-") as root:  # short: Ray's sockets live in it
        state = RunState(PORT, root=Path(root))
        launcher = subprocess.Popen(
            [sys.executable, "-c", RAY_LAUNCHER, root, str(PORT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        actor = int(launcher.stdout.readline())
        family = psutil.Process(launcher.pid).children(recursive=True)
        started = {process.pid for process in state.started()}
        assert {process.pid for process in family} <= started
        assert actor in started
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        # Some of Ray's processes notice and end by themselves, in their own time; not all do.
        assert state.leftovers()
        assert state.clear(8)
        assert state.leftovers() == []
        assert alive(started) == []
        assert not state.folder.exists()
        launcher.stdin.close()
        launcher.stdout.close()
