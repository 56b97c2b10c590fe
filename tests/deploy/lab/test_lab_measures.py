"""From notes to figures, and from figures to table, JSON and page."""

import dataclasses
import json
from xml.etree import ElementTree

import pytest

from deploy.lab import page, results
from deploy.lab.configurations import Base, Configuration, Draft
from deploy.lab.measures import (
    Limit,
    Measured,
    disturbance,
    is_good,
    limit_of,
    measure,
    median_of,
    percentile,
    slot_use,
)
from deploy.lab.play import Play, Record, Sample
from deploy.lab.results import Outcome, Results
from deploy.lab.workload import Ask, Objective, Traffic, Workload

SHORT = Ask(kind="short", num_prompt_tokens=8, max_tokens=3, tier="high")
STREAM = Ask(kind="stream", num_prompt_tokens=8, max_tokens=50)
LONG = Ask(kind="prompt", num_prompt_tokens=500, max_tokens=2)
WORKLOAD = Workload(
    name="test", title="<A test>", arrivals="as it goes", traffic=lambda _draw: Traffic(),
    watched="stream", disturber="prompt",
)  # fmt: skip


def record(ask=SHORT, *, sent_s=0.0, arrivals=(1.0, 1.5, 2.5), **others) -> Record:
    ended_s = arrivals[-1] if arrivals else sent_s + 1.0
    return Record(
        **{"ask": ask, "sent_s": sent_s, "arrivals": arrivals, "ended_s": ended_s,
           "due_s": sent_s, **others}
    )  # fmt: skip


def play(*records, samples=(), seconds=10.0) -> Play:
    return Play(records=tuple(records), samples=tuple(samples), seconds=seconds)


def sample(at_s, used, *, waiting=0, slots=8) -> Sample:
    return Sample(at_s=at_s, num_used=used, num_slots=slots, num_waiting=waiting)


def test_figures_are_those_of_the_definitions():
    two = [
        record(sent_s=0.5, waiting_s=0.25),  # TTFT 0.5; gaps 0.5, 1.0; TPOT 0.75; E2E 2.0
        record(sent_s=0.0, arrivals=(2.0, 2.1), waiting_s=1.0),  # TTFT 2.0; gap 0.1; TPOT 0.1
    ]
    limits = {SHORT.group: Limit(ttft_s=1.0, tpot_s=0.8)}

    total = measure(play(*two), limits, WORKLOAD).total

    assert total["ttft_p50_s"] == pytest.approx(1.25)
    assert total["ttft_max_s"] == 2.0
    assert total["tpot_p50_s"] == pytest.approx(0.425)
    assert total["itl_p50_s"] == pytest.approx(0.5), "gaps of all requests are one pool"
    assert total["itl_max_s"] == 1.0
    assert total["waiting_max_s"] == 1.0
    assert total["e2e_max_s"] == pytest.approx(2.1)
    assert (total["good"], total["attainment"], total["good_per_s"]) == (1, 0.5, 0.1)
    assert total["tokens_per_s"] == 0.5


def test_a_failed_request_is_a_miss_and_has_no_latency():
    limits = {SHORT.group: Limit(ttft_s=9.0, tpot_s=9.0)}
    failed = record(arrivals=(0.1, 9.0), error="worker_lost")

    found = measure(play(record(), failed), limits, WORKLOAD)

    assert (found.total["sent"], found.total["failed"], found.total["good"]) == (2, 1, 1)
    assert found.total["itl_max_s"] == 1.0
    assert found.total["attainment"] == 0.5


def test_a_play_in_which_everything_failed_has_counts_and_no_latency():
    total = measure(play(record(arrivals=(), error="no_worker")), {}, WORKLOAD).total

    assert (total["sent"], total["failed"], total["good_per_s"]) == (1, 1, 0.0)
    assert "ttft_p50_s" not in total
    assert "itl_p99_s" not in total


def test_kinds_and_tiers_are_told_apart():
    low = Ask(kind="bulky", num_prompt_tokens=99, max_tokens=3, tier="low")

    groups = measure(play(record(waiting_s=0.1), record(low, waiting_s=5.0)), {}, WORKLOAD).groups

    assert groups["short (8 in, 3 out), high"]["waiting_p50_s"] == 0.1
    assert groups["bulky (99 in, 3 out), low"]["waiting_p50_s"] == 5.0


def test_who_left_as_planned_counts_with_what_came():
    left = record(STREAM, arrivals=(1.0, 1.2), has_left=True)
    limits = {STREAM.group: Limit(ttft_s=2.0, tpot_s=1.0)}

    total = measure(play(left), limits, WORKLOAD).total

    assert (total["failed"], total["good"]) == (0, 1)
    assert "e2e_p50_s" not in total


def test_what_is_good_comes_from_an_idle_cluster():
    unloaded = record(sent_s=0.0, arrivals=(0.1, 0.2, 0.3))

    limit = limit_of(unloaded, Objective(ttft_factor=5.0, tpot_factor=2.0))

    assert (limit.ttft_s, limit.tpot_s) == pytest.approx((0.5, 0.2))
    assert is_good(unloaded, limit)
    assert not is_good(record(sent_s=0.0, arrivals=(0.6, 0.7)), limit)
    assert not is_good(record(sent_s=0.0, arrivals=(0.1, 0.4)), limit)


def test_slots_are_weighed_by_time_and_a_sample_holds_until_the_next():
    samples = [sample(0.0, 8, waiting=3), sample(2.0, 2, waiting=3), sample(8.0, 4)]

    use = slot_use(samples, until_s=10.0)

    assert use["slot_use"] == pytest.approx((2 * 1.0 + 6 * 0.25 + 2 * 0.5) / 10)
    assert use["slot_use_while_waiting"] == pytest.approx((2 * 1.0 + 6 * 0.25) / 8)
    assert use["slot_use_while_waiting_p50"] == 0.25, "for most of the time"
    assert slot_use([], until_s=1.0) == {}


def test_gaps_beside_a_prompt_are_told_apart_from_the_others():
    steady = tuple(1.0 + 0.1 * i for i in range(50))
    stalled = (2.0, 2.1, 2.2, 3.2, 3.3, 3.4, 5.0)
    prompt = record(LONG, sent_s=2.25, arrivals=(3.1, 3.15))
    records = [record(STREAM, arrivals=steady), record(STREAM, arrivals=stalled), prompt]

    found = disturbance(records, watched="stream", disturber="prompt")

    assert found["beside_max_s"] == pytest.approx(1.0)
    assert found["undisturbed_p50_s"] == pytest.approx(0.1)
    assert found["undisturbed_max_s"] == pytest.approx(1.6), "that is not the prompt's doing"
    assert found["beside_ratio"] == pytest.approx(found["beside_p99_s"] / 0.1)


def test_gaps_count_from_when_all_streams_run():
    early = record(STREAM, arrivals=(0.0, 4.0, 5.5, 5.6))
    late = record(STREAM, arrivals=(5.0, 5.1, 5.2))
    prompt = record(LONG, sent_s=1.0, arrivals=(2.0,))

    found = disturbance([early, late, prompt], watched="stream", disturber="prompt")

    assert "beside_max_s" not in found
    assert found["undisturbed_max_s"] < 1.0


def test_the_median_of_runs_is_taken_figure_by_figure():
    runs = [Measured(total={"a": a}, groups={"g": {"b": a}}) for a in (1.0, 5.0, 2.0)]
    odd = Measured(total={"c": 7.0})

    assert median_of([*runs, odd]) == Measured(total={"a": 2.0, "c": 7.0}, groups={"g": {"b": 2.0}})


def test_a_percentile_of_one_value_is_that_value():
    assert percentile([3.0], 99) == 3.0
    assert percentile([float(i) for i in range(101)], 99) == 99.0


# ---- table, JSON, page


def outcome(name: str, *, rate=None, failure="", is_measured=True) -> Outcome:
    configuration = Configuration(
        name=name, what=f"what {name} <is>", deploy=Draft(Base(cores=(0, 1))).single(),
        link_bytes_per_s=rate,
    )  # fmt: skip
    if not is_measured:
        return Outcome(configuration=configuration, failure=failure)
    notes = play(
        record(waiting_s=0.0),
        record(STREAM, arrivals=tuple(1.0 + 0.1 * i for i in range(900))),
        record(LONG, sent_s=2.0, arrivals=(4.0, 4.1), waiting_s=0.3),
        record(arrivals=(), error="no_worker"),
        samples=[sample(0.0, 8, waiting=2), sample(5.0, 2)],
        seconds=90.0,
    )
    runs = (measure(notes, {SHORT.group: Limit(ttft_s=2.0, tpot_s=1.0)}, WORKLOAD),)
    return Outcome(configuration=configuration, runs=runs, play=notes, failure=failure)


def found_of(*outcomes: Outcome) -> Results:
    return Results(
        workload=WORKLOAD, outcomes=outcomes,
        limits={SHORT.group: Limit(ttft_s=2.0, tpot_s=1.0)},
        seed=7, num_cores=2, machine="one machine",
    )  # fmt: skip


FOUND = found_of(
    outcome("fast"),
    outcome("slow", rate=4e6),
    outcome("slower", rate=1e6),
    outcome("gone", is_measured=False, failure="not measured: the cluster ended: no"),
)


def test_the_table_has_every_configuration_also_those_that_failed():
    text = results.as_text(FOUND)

    assert "seed 7" in text
    assert "2 cores each" in text
    line = next(line for line in text.splitlines() if line.startswith("fast"))
    assert line.split()[:3] == ["fast", "3", "1"]
    assert "gone" in text
    assert "the cluster ended: no" in text
    assert FOUND.has_failed


def test_the_json_has_figures_errors_and_the_arrival_process():
    tree = json.loads(results.as_json(FOUND))

    assert (tree["seed"], tree["arrivals"], tree["cores"]) == (7, "as it goes", 2)
    fast, slow, _slower, gone = tree["configurations"]
    assert fast["errors"] == [{"group": SHORT.group, "error": "no_worker"}]
    assert fast["median"]["total"]["beside_ratio"] > 0
    assert slow["link_bytes_per_s"] == 4e6
    assert gone["failure"].endswith("no")
    assert gone["runs"] == []


def test_a_workload_that_was_scaled_says_so_everywhere():
    scaled = dataclasses.replace(FOUND, scale=0.25)

    for told in (results.as_text, lambda found: page.as_html(found, {})):
        assert "as it goes, scaled by 0.25" in told(scaled)
        assert "scaled" not in told(FOUND)
    scales = [json.loads(results.as_json(found))["scale"] for found in (scaled, FOUND)]
    assert scales == [0.25, 1.0]


def test_rates_lag_and_what_a_p99_of_few_says_stand_beside_the_tables():
    """PERF_FACTS section 1, (e) and (g)."""
    for text in (results.as_text(FOUND), page.as_html(FOUND, {})):
        # Four, the last one due after 2 s; three ended well in 90 s.
        assert "fast: offered 2.00/s, achieved 0.03/s, sent 0.0 ms late at most" in text
        assert "a p99 of 4 requests is close to their maximum" in text
    at_once = measure(play(record(), record(due_s=0.0, sent_s=0.004)), {}, WORKLOAD).total
    assert "offered_per_s" not in at_once
    assert at_once["send_lag_max_s"] == 0.004
    found = Outcome(configuration=FOUND.outcomes[0].configuration, runs=(Measured(total=at_once),))
    assert results.notes(found_of(found))[0].startswith("fast: offered at once, achieved 0.20/s")


def test_the_page_is_one_file_that_loads_and_runs_nothing():
    pictures = page.pictures_of(FOUND)
    text = page.as_html(FOUND, pictures)

    assert {"latency", "waiting", "slots", "goodput", "gaps", "bandwidth"} == set(pictures)
    assert "<script" not in text
    assert "src=" not in text
    assert "href=" not in text
    assert "<A test>" not in text, "what others wrote is escaped"
    assert text.count("<svg") == len(pictures)


def test_every_picture_is_well_formed_and_small():
    for name, picture in page.pictures_of(FOUND).items():
        ElementTree.fromstring(picture)
        assert len(picture) < 60_000, name
        assert "nan" not in picture, name


def test_nothing_measured_makes_a_page_without_pictures():
    empty = found_of(outcome("gone", is_measured=False, failure="not measured: no"))

    assert page.pictures_of(empty) == {}
    assert "not measured" in page.as_html(empty, {})
    assert "gone" in results.as_text(empty)
