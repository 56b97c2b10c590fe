"""What of a fault's story becomes a row: failures that nobody had to suffer, and real medians."""

import random
from types import SimpleNamespace

import pytest

from cluster.config import Role
from cluster.errors import PdserveError
from deploy.bench import fault_table
from deploy.bench.load import Ask, Call, one_call
from deploy.bench.victims import Victims
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
    assert (row.ratio, "the survivors' alone" in row.what) == (1.0, True)
    (row,) = table._p50(story_of(good_at=(5.0, 22.0)), "a fault")
    assert (row.ratio, "the replacement's among them" in row.what) == (1.0, True)
    for good_at in ((5.0,), (17.0,)):
        with pytest.raises(PdserveError, match="p50"):
            table._p50(story_of(good_at=good_at), "a fault")


def test_a_failure_that_does_not_say_where_it_happened_is_not_typed():
    with open_doors(FakeDoors(fails=True)) as doors, Client(doors.grpc) as client:
        call = one_call(client, Ask(), random.Random(0))
    assert (call.error, call.is_typed) == ("no_worker", False)


def call_of(error="", **changes) -> Call:
    return Call(started=0.0, ended=1.0, error=error, **changes)


@pytest.mark.parametrize(
    ("meanwhile", "holds"),
    [
        ([call_of("no_worker"), call_of("deadline_exceeded"), call_of()], True),
        ([call_of("no_worker"), call_of("no_worker", is_typed=False)], False),
        ([call_of("no_worker"), call_of("worker_lost")], False),
        ([call_of()], False),  # nobody was refused: it says nothing of how
    ],
)
def test_who_comes_while_nobody_is_there_has_to_be_told_so(make_table, meanwhile, holds):
    row = make_table("1P+1D")._told(meanwhile, "a fault")
    assert row.holds is holds


class Watched(Victims):
    """What its control plane says of the dead, look by look; None: nothing."""

    def __init__(self, *looks) -> None:
        super().__init__(FakeDoors())
        self._looks = iter(looks)

    def view(self):
        num_died = next(self._looks)
        return None if num_died is None else SimpleNamespace(counters={"workers_died": num_died})

    def wait_whole(self, timeout_s) -> None: ...


def judge(table, looks, calls=None, *, is_another=False):
    calls = calls or [call_of()]
    table._victims = Watched(*looks)
    table._tell = lambda what, strike: fault_table._Story(calls, 0.0, AT, REPAIRED)
    rows = table._control("a fault", lambda: (AT, REPAIRED), is_another=is_another)
    return [row.what for row in rows if not row.holds]


def test_a_worker_that_was_declared_dead_and_is_back_was_declared_dead(make_table):
    table = make_table("2P+2D")
    assert judge(table, [3.0, 3.0]) == []
    (failed,) = judge(table, [3.0, 4.0])
    assert "declared dead" in failed
    assert judge(table, [0.0], is_another=True) == []
    assert len(judge(table, [1.0], is_another=True)) == 1


@pytest.mark.parametrize("looks", [[None], [3.0, None]])
def test_a_control_plane_that_does_not_answer_proves_nothing(make_table, looks):
    with pytest.raises(PdserveError, match="does not say who died"):
        judge(make_table("2P+2D"), looks)


def test_without_the_control_plane_nobody_begins_anew(make_table):
    table = make_table("2P+2D")
    assert judge(table, [0.0], [call_of(), call_of()], is_another=True) == []
    (failed,) = judge(table, [0.0], [call_of(), call_of(num_attempts=2)], is_another=True)
    assert "began anew" in failed
