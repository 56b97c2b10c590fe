"""What of a fault's story becomes a row: failures that nobody had to suffer, and real medians."""

import random

import pytest

from cluster.config import Role
from cluster.errors import PdserveError
from deploy.bench import fault_table
from deploy.bench.load import Ask, Call, one_call
from deploy.client import Client
from tests.deploy.bench_doors import FakeDoors, make_site, open_doors

AT, REPAIRED = 10.0, 20.0
FAILED_AT = (5.0, 12.0, 15.0, 21.0)
"""Ends of failed calls: before the fault, twice while nobody is there, after the repair."""


def story_of(failed_at=FAILED_AT, good_at=()) -> fault_table._Story:
    calls = [Call(started=end - 1, ended=end, error="no_worker") for end in failed_at]
    calls += [Call(started=end - 1, ended=end) for end in good_at]
    return fault_table._Story(calls, 0.0, AT, REPAIRED)


@pytest.fixture
def make_table(tmp_path):
    def make(shape: str) -> fault_table._Table:
        size = fault_table.FaultTableSize()
        return fault_table._Table(make_site(tmp_path), FakeDoors(), shape, size)

    return make


@pytest.mark.parametrize(
    ("shape", "role", "expected"),
    [
        ("1P+1D", Role.DECODE, 2),  # who fails while it is gone could be served by nobody
        ("1P+1D", Role.PREFILL, 4),  # the decode worker prefills, too
        ("2P+2D", Role.DECODE, 4),  # there is another one
    ],
)
def test_a_failure_counts_where_somebody_could_have_served_it(make_table, shape, role, expected):
    row = make_table(shape)._servable(story_of(), "a fault", role)
    assert (row.value, row.holds) == (expected, False)
    row = make_table(shape)._servable(story_of(failed_at=()), "a fault", role)
    assert (row.value, row.holds) == (0, True)


def test_a_median_of_nothing_is_an_error_and_no_missing_row(make_table):
    table = make_table("2P+2D")
    (row,) = table._p50(story_of(good_at=(5.0, 17.0)), "a fault")
    assert row.ratio == 1.0
    for good_at in ((5.0,), (17.0,)):
        with pytest.raises(PdserveError, match="p50"):
            table._p50(story_of(good_at=good_at), "a fault")


def test_a_failure_that_does_not_say_where_it_happened_is_not_typed():
    with open_doors(FakeDoors(fails=True)) as doors, Client(doors.grpc) as client:
        call = one_call(client, Ask(), random.Random(0))
    assert (call.error, call.is_typed) == ("no_worker", False)
