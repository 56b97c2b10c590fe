"""The policy lab on real clusters of one process each: what it writes, and what ends a play."""

import contextlib
import html
import itertools
import json
import os
import statistics
import threading
import time
from pathlib import Path

import psutil
import pytest

from cluster.config import Host
from deploy import cli
from deploy.bench import cluster as bench_cluster
from deploy.host_inline import InlineHost
from deploy.lab import ready, results, runner
from deploy.lab.configurations import Base
from deploy.lab.play import CALL_TIMEOUT_S, play
from deploy.lab.workload import Arrival, Ask, Loop, Traffic
from deploy.readiness import missing
from tests.e2e.plain_cluster import wait_until
from tests.factories_model import write_tiny_llama

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


SCALE, SEED = 0.15, 7
WINDOW_S = 0.02
PICTURES = {"latency", "waiting", "slots", "goodput"}
MEASURES = (
    *(f"{of}_{which}_s" for of in ("ttft", "tpot", "itl", "waiting")
      for which in ("p50", "p99", "max")),
    "slot_use", "good_per_s", "attainment",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Tiny, with room for the long prompts, and with as much KV as takes a slow link a while."""
    folder = tmp_path_factory.mktemp("lab") / "model"
    return write_tiny_llama(folder, num_layers=4, head_dim=64, max_positions=4096)


@contextlib.contextmanager
def running_here(config):
    """The cluster that ``pdserve serve`` would run in a process of its own, in this one.

    Starting that process takes far longer than what is played on it; the tests above do it.
    """
    host = InlineHost(config, model_path=Path(config.model.path))
    host.start()
    try:
        wait_until(lambda: not missing(config), 30, "ready")
        yield bench_cluster.BenchCluster(config)
    finally:
        host.stop(20)


@pytest.fixture
def run_lab(model, tmp_path, monkeypatch, capsys):
    """Plays a workload by the command; returns its JSON by configuration, and its records.

    Whatever it plays, all measures have to be in all that it writes.
    """
    kept, write = [], runner.write
    monkeypatch.setattr(bench_cluster, "running", running_here)

    def keep(found, folder):
        kept.append(found)
        write(found, folder)

    def run(name, *pictures, scale=SCALE):
        monkeypatch.setattr(runner, "write", keep)
        options = ["--inline", "--scale", str(scale), "--seed", str(SEED), "--out", str(tmp_path)]
        assert cli.main(["lab", name, "--model", str(model), *options]) == 0
        tree = json.loads((tmp_path / "lab.json").read_text())
        page, table = ((tmp_path / name).read_text() for name in ("lab.html", "table.txt"))
        assert_all_is_told(tree, page, table, PICTURES | set(pictures))
        assert table in capsys.readouterr().out
        assert {f"{each}.svg" for each in PICTURES | set(pictures)} <= set(os.listdir(tmp_path))
        (found,) = kept
        assert tree["arrivals"] == found.workload.arrivals
        records = {each.name: each.play.records for each in found.outcomes}
        for each in tree["configurations"]:
            assert_figures_agree(each, records[each["name"]], page, table)
        return {each["name"]: each for each in tree["configurations"]}, records, table

    return run


def assert_all_is_told(tree, page, table, pictures):
    assert (tree["seed"], tree["cores"]) == (SEED, 2)
    for text in (page, table):
        assert html_of(text, tree["arrivals"]) in text
        assert f"eed {SEED}" in text
        for head in ("TTFT p50", "TPOT p50", "ITL p50", "waiting p50", "slot use", "good/s"):
            assert head in text
    assert page.count("<svg") == len(pictures)
    for each in tree["configurations"]:
        assert each["median"]["total"].keys() >= set(MEASURES), each["name"]
        assert each["median"]["total"]["failed"] == 0
        assert each["slots"], "over time"
        assert each["slots"][-1].keys() == {"at_s", "num_used", "num_slots", "num_waiting"}
        for group, figures in each["median"]["groups"].items():
            # Streams that their clients leave never tell how long they waited.
            assert figures.keys() >= {"ttft_p50_s", "waiting_p50_s"} - (
                set() if "e2e_p50_s" in figures else {"waiting_p50_s"}
            )
            assert group in table
            assert html_of(page, group) in page


def assert_figures_agree(told, records, page, table):
    """What stands in all three is the same, follows from what was noted, and from one another."""
    total, groups = told["median"]["total"], told["median"]["groups"]
    assert total["sent"] == len(records) == sum(each["sent"] for each in groups.values())
    assert total["good"] == sum(each["good"] for each in groups.values())
    assert total["attainment"] == pytest.approx(total["good"] / total["sent"])
    assert total["good_per_s"] == pytest.approx(total["good"] / total["seconds"])
    firsts = [each.arrivals[0] - each.sent_s for each in records if each.arrivals]
    gaps = [b - a for each in records for a, b in itertools.pairwise(each.arrivals)]
    assert total["ttft_p50_s"] == pytest.approx(statistics.median(firsts))
    assert (total["ttft_max_s"], total["itl_max_s"]) == (max(firsts), max(gaps))
    assert total["itl_p50_s"] == pytest.approx(statistics.median(gaps)), "of all streams' gaps"
    for of in ("ttft", "tpot", "itl", "waiting"):
        p50, p99, most = (total[f"{of}_{which}_s"] for which in ("p50", "p99", "max"))
        assert 0 <= p50 <= p99 <= most, of
    assert all(0 <= each["num_used"] <= each["num_slots"] for each in told["slots"])
    row = next(line for line in table.splitlines() if line.split()[:1] == [told["name"]])
    for name in ("ttft_p50_s", "tpot_p50_s", "itl_p99_s", "itl_max_s", "waiting_max_s"):
        cell = results.milliseconds(total[name])
        assert cell in row, name
        assert cell in page, name


def html_of(text, told):
    return html.escape(told) if text.startswith("<") else told


def group_of(figures, kind):
    groups = figures["median"]["groups"]
    return next(found for group, found in groups.items() if group.startswith(kind))


def began(records, kind):
    """When each of a kind had its first token."""
    return [record.arrivals[0] for record in records if record.ask.kind == kind]


def test_short_ones_wait_for_a_bulky_one_only_where_the_first_to_come_goes_first(run_lab):
    found, records, table = run_lab("order")

    assert "short (32 in, 16 out), high" in table, "waiting is told by size and tier"
    waiting = {name: group_of(each, "short")["waiting_p50_s"] for name, each in found.items()}
    assert max(waiting["sjf"], waiting["priority"]) < waiting["fcfs"]
    for name in ("sjf", "priority"):
        (bulky,) = began(records[name], "bulky")
        assert sum(at_s < bulky for at_s in began(records[name], "short")) >= 4, name
    (bulky,) = began(records["fcfs"], "bulky")
    assert sum(at_s < bulky for at_s in began(records["fcfs"], "short")) < 4


def test_a_stream_of_short_ones_starves_a_long_one_unless_it_ages(run_lab):
    found, records, _ = run_lab("starvation")

    aging_s, hurry_s = 5.0 * SCALE, 0.5
    younger = {name: overtakers(each) for name, each in records.items()}
    late = {name: [by for by in each if by > aging_s + hurry_s] for name, each in younger.items()}
    assert late["sjf-aging"] == late["fcfs"] == [], "nobody so much younger goes first"
    assert len(late["sjf"]) > 0
    assert len(younger["fcfs"]) < len(younger["sjf-aging"]) < len(younger["sjf"])
    waiting = {name: group_of(each, "long")["waiting_max_s"] for name, each in found.items()}
    assert waiting["fcfs"] < waiting["sjf-aging"] < waiting["sjf"]


def overtakers(records):
    """By how much each was younger than the long one, and had its first token before."""
    (long,) = (record for record in records if record.ask.kind == "long")
    after = (record for record in records if record.sent_s > long.sent_s)
    return [each.sent_s - long.sent_s for each in after if each.arrivals[0] < long.arrivals[0]]


def test_what_prompts_do_to_streams_is_told_of_all_three_and_what_the_prompts_wait(run_lab):
    # The streams have begun before the first prompt comes, also on a slow machine.
    found, _, table = run_lab("interference", "gaps", scale=0.6)

    assert list(found) == ["unchunked", "chunked", "disaggregated"]
    beside = table[table.index("gaps of streams beside prompts") :]
    for name, each in found.items():
        total, prompts = each["median"]["total"], group_of(each, "prompt")
        assert total["beside_max_s"] >= total["beside_p99_s"] >= total["beside_p50_s"] > 0
        assert prompts["ttft_p50_s"] > 0
        assert results.milliseconds(prompts["ttft_p50_s"]) in table
        row = next(line for line in beside.splitlines() if line.startswith(name))
        assert results.milliseconds(total["beside_max_s"]) in row
        assert f"{total['beside_ratio']:.2f}" in row


def test_the_window_is_the_least_that_anybody_waits(run_lab):
    found, records, _ = run_lab("window")

    least = {name: min(lone_waits(noted)) for name, noted in records.items()}
    assert least["continuous"] < WINDOW_S <= least["dynamic"]
    waiting = {name: each["median"]["total"]["waiting_p50_s"] for name, each in found.items()}
    assert waiting["continuous"] < waiting["dynamic"]


def lone_waits(records):
    """How long each waited that was sent when all before it were long through."""
    waits, free_s = [], float("-inf")
    for each in sorted(records, key=lambda each: each.sent_s):
        if each.sent_s > free_s + WINDOW_S:
            waits.append(each.waiting_s)
        free_s = max(free_s, each.ended_s)
    return waits


def test_the_slower_the_link_the_longer_it_takes_until_the_gain_is_eaten(run_lab):
    found, records, _ = run_lab("bandwidth", "bandwidth")

    # Between a request's first two tokens its KV travels.
    firsts = {
        name: statistics.median(each.arrivals[1] - each.arrivals[0] for each in noted)
        for name, noted in records.items()
    }
    slow = {name: each for name, each in found.items() if name.startswith("link-")}
    assert list(slow) == ["link-100", "link-25", "link-10", "link-5"]
    for name, each in slow.items():
        least_s = 512 * 2048 / each["link_bytes_per_s"]
        assert each["median"]["total"]["itl_max_s"] > 0.5 * least_s, name
    assert firsts["link-5"] > firsts["link-100"]


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
