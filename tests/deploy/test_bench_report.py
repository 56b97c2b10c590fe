"""What a benchmark's runs become: medians, bars, a table, JSON."""

import datetime
import json

import pytest

from deploy.bench.report import Bar, Run, as_json, as_table, machine, percentile, row_of

AT_LEAST_TWICE = Bar(subject="ratio", relation=">=", limit=2.0)
AT_MOST_TEN = Bar(subject="value", relation="<=", limit=10.0)


def test_a_row_is_the_median_of_its_runs_and_the_ratio_the_median_of_theirs():
    runs = [Run(10.0, 5.0), Run(30.0, 6.0), Run(20.0, 20.0)]

    row = row_of("prefill", "what", "tok/s", runs)

    assert (row.value, row.reference) == (20.0, 6.0)
    # Runs are pairs: a slow spell that met both sides of one says nothing.
    assert row.ratio == 2.0


def test_fewer_than_three_runs_are_no_median():
    with pytest.raises(ValueError, match="2 runs"):
        row_of("prefill", "what", "tok/s", [Run(1.0, 1.0)] * 2)


@pytest.mark.parametrize(
    ("bar", "value", "ratio", "expected"),
    [
        (AT_LEAST_TWICE, 1.0, 2.0, True),
        (AT_LEAST_TWICE, 9.0, 1.99, False),
        (AT_MOST_TEN, 10.0, 99.0, True),
        (AT_MOST_TEN, 10.1, 1.0, False),
    ],
)
def test_a_bar_is_on_the_value_or_on_the_ratio(bar, value, ratio, expected):
    assert bar.holds(value, ratio) is expected


def test_json_has_the_promised_fields():
    held = row_of("handoff", "a transfer", "ms", [Run(8.0, 4.0)] * 3, AT_MOST_TEN)
    plain = row_of("isolation", "colocated", "ms", [Run(900.0, 60.0)] * 3)

    first, second = json.loads(as_json([held, plain]))

    assert first == {
        "name": "handoff",
        "what": "a transfer",
        "value": 8.0,
        "unit": "ms",
        "reference": 4.0,
        "ratio": 2.0,
        "bar": 10.0,
        "rule": "value <= 10",
        "holds": True,
    }
    assert (second["bar"], second["rule"], second["holds"]) == (None, None, None)
    assert second["ratio"] == 15.0


def test_the_table_shows_whether_each_bar_is_held():
    rows = [
        row_of("handoff", "a transfer", "ms", [Run(8.0, 4.0)] * 3, AT_MOST_TEN),
        row_of("decode-step", "a step", "tok/s", [Run(3.0, 2.0)] * 3, AT_LEAST_TWICE),
        row_of("isolation", "colocated", "ms", [Run(9.0, 6.0)] * 3),
    ]

    head, *lines = as_table(rows).splitlines()

    assert head.split() == ["name", "what", "value", "reference", "ratio", "bar", "holds"]
    assert [line.split()[-1] for line in lines] == ["yes", "NO", "-"]
    assert "8.00 ms" in lines[0]
    assert "ratio >= 2" in lines[1]


def test_percentiles_interpolate():
    assert percentile([float(n) for n in range(101)], 99) == pytest.approx(99.0)
    assert percentile([1.0, 2.0], 50) == pytest.approx(1.5)


def test_the_machine_line_names_the_date_and_the_libraries():
    line = machine(datetime.datetime(2026, 3, 1, 12, 5, tzinfo=datetime.UTC))

    assert line.startswith("2026-03-01 12:05 UTC; ")
    assert "torch " in line
    assert "cores" in line
