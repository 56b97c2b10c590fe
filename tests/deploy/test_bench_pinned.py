"""Children bound to one core: what they see, how they answer, how they end."""

import os

import pytest

from cluster.errors import StartupError
from deploy import processes
from deploy.bench.gloo_pair import gloo_pair
from deploy.bench.pinned import PinnedChild

CHILD = """
import os
import sys

AT_IMPORT = sorted(os.sched_getaffinity(0))


def start(arguments):
    print("libraries print what they like")

    def respond(message):
        if message["do"] == "fail":
            raise RuntimeError("out of luck")
        return {
            "pid": os.getpid(),
            "cores": AT_IMPORT,
            "threads": os.environ["OMP_NUM_THREADS"],
            "arguments": arguments,
        }

    return respond
"""


@pytest.fixture
def child_module(tmp_path, monkeypatch):
    (tmp_path / "bench_child.py").write_text(CHILD)
    paths = [str(tmp_path), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return "bench_child"


@pytest.fixture
def core() -> int:
    return max(os.sched_getaffinity(0))


def test_a_child_is_bound_before_its_module_is_imported(child_module, core):
    with PinnedChild(child_module, core, {"size": 3}) as child:
        seen = child.ask(do="tell")
        assert child.ask(do="tell") == seen

    assert seen["cores"] == [core]
    assert seen["threads"] == "1"
    assert seen["arguments"] == {"size": 3}
    assert processes.look_up(seen["pid"]) is None


def test_a_child_that_fails_tells_why(child_module, core):
    with (
        pytest.raises(StartupError, match="ended with code 1: RuntimeError: out of luck"),
        PinnedChild(child_module, core, {}) as child,
    ):
        child.ask(do="fail")


def test_a_child_ends_with_an_interrupted_parent(child_module, core):
    pids = []

    def use() -> None:
        with PinnedChild(child_module, core, {}) as child:
            pids.append(child.ask(do="tell")["pid"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()

    assert processes.look_up(pids[0]) is None


def test_the_gloo_pair_moves_bytes_as_often_as_asked(core):
    with gloo_pair(1 << 16, core, core) as pair:
        assert len(pair.transfer(3)) == 3
        (seconds,) = pair.transfer(1)

    assert 0 < seconds < 5
