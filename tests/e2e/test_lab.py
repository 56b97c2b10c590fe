"""The policy lab on real clusters of one process each: what it writes, and what ends a play."""

import json
import os
import threading
import time

import psutil
import pytest

from cluster.config import Host
from deploy import cli
from deploy.bench import cluster as bench_cluster
from deploy.lab import ready
from deploy.lab.configurations import Base
from deploy.lab.play import CALL_TIMEOUT_S, play
from deploy.lab.workload import Arrival, Ask, Loop, Traffic

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the lab compares on two cores"),
]


def test_one_command_compares_all_kinds_of_batching(tiny_llama, tmp_path, capsys):
    """P-14: in static batches others wait for the longest member, in continuous ones for a slot."""
    out = tmp_path / "out"
    arguments = ["batches", "--model", str(tiny_llama), "--inline", "--out", str(out)]

    assert cli.main(["lab", *arguments]) == 0

    tree = json.loads((out / "lab.json").read_text())
    found = {each["name"]: each["median"] for each in tree["configurations"]}
    assert set(found) == {"static", "dynamic", "continuous"}
    for figures in found.values():
        assert (figures["total"]["sent"], figures["total"]["failed"]) == (25, 0)
        assert 0 < figures["total"]["slot_use"] <= 1
    static, continuous = (
        found[name]["groups"]["short (32 in, 60 out)"]["waiting_p50_s"]
        for name in ("static", "continuous")
    )
    assert continuous < static
    # While others wait: most of that time a static batch has two of eight left.
    assert found["static"]["total"]["slot_use_while_waiting_p50"] <= 0.3
    assert found["continuous"]["total"]["slot_use_while_waiting"] >= 0.9
    assert found["continuous"]["total"]["slot_use_while_waiting_p50"] == 1
    assert "continuous" in capsys.readouterr().out
    assert (out / "lab.html").read_text().count("<svg") == 4
    assert {"slots.svg", "waiting.svg", "table.txt"} <= {path.name for path in out.iterdir()}


def test_a_cluster_that_dies_in_a_play_fails_its_requests_and_hangs_nobody(tiny_llama):
    base = Base(cores=(0, 1), model=str(tiny_llama), host=Host.INLINE, dtype="fp32")
    deploy = ready.comparison("window").configurations(base)[0].deploy
    long = Ask(kind="long", num_prompt_tokens=16, max_tokens=900)
    traffic = Traffic(
        arrivals=tuple(Arrival(at_s=0.0, ask=long) for _ in range(3)),
        loops=(Loop(ask=Ask(kind="short", num_prompt_tokens=8, max_tokens=2), num_clients=1,
                    from_s=0.0, until_s=3.0),),
    )  # fmt: skip
    has_begun = threading.Event()
    others = set(psutil.Process().children())  # of tests before this one
    with bench_cluster.running(bench_cluster.on_free_ports(deploy)) as doors:

        def kill():
            assert has_begun.wait(60)
            (served,) = set(psutil.Process().children()) - others
            served.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        began = time.monotonic()
        notes = play(doors, traffic, seed=0, run=0, on_end=has_begun.set)
        killer.join()

    assert time.monotonic() - began < CALL_TIMEOUT_S / 2
    cut = [record for record in notes.records if record.ask == long]
    assert len(cut) == 3
    assert all(record.error for record in cut), "its process died in the midst of each"
    assert any(not record.error for record in notes.records), "and before that it served"
