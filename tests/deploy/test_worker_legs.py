"""Where a worker's legs come in: those that were given up before they came."""

import pytest

from cluster.errors import Cancelled, HandoffFailed
from cluster.handoff import AbortCause
from cluster.request import LegKind
from cluster.rpc.given_up import REMEMBERED_S
from cluster.rpc.legs import LegBook
from deploy.worker_legs import WorkerLegs
from tests.deploy.world import make_leg
from tests.factories import FakeClock, make_key


class Rules:
    worker_id = "d-0"

    def check(self, leg) -> None:
        pass


class Half:
    """A half that keeps legs until they are given up, and ends them at the next flush."""

    def __init__(self) -> None:
        self.book = LegBook()

    def may_renew(self, leg, sink) -> bool:
        return False

    def start_leg(self, leg, sink) -> None:
        self.book.open(leg, sink, 0.0)

    def abort_leg(self, key, cause) -> None:
        opened = self.book.get(key)
        self.book.end(opened, error=Cancelled("as its router says"))
        self.book.flush()


class Sink:
    def __init__(self) -> None:
        self.ends = []

    def emit(self, tokens, ends, *others) -> None:
        self.ends += ends


class Door:
    """A decode worker's legs, and one router that reads what they say."""

    def __init__(self) -> None:
        self.clock, self.half, self.sink = FakeClock(), Half(), Sink()
        self.legs = WorkerLegs(
            None, self.half, rules=Rules(), check_state=lambda: None, clock=self.clock
        )

    def start(self, grant_id) -> None:
        self.legs.start_leg(make_leg(LegKind.DECODE, "r", grant_id=grant_id), self.sink)

    def abort(self, grant_id, cause=AbortCause.FAULT) -> None:
        self.legs.abort_leg(make_key("r"), cause, grant_id, self.sink)

    @property
    def grants(self):
        return list(self.half.book.grants())


@pytest.mark.parametrize(
    ("cause", "error"),
    [
        (AbortCause.FAULT, HandoffFailed),
        (AbortCause.CANCELLED, Cancelled),
        (AbortCause.FINISHED, Cancelled),
    ],
)
def test_the_abort_of_a_leg_that_never_came_is_answered(cause, error):
    """CASES P-20: its start was lost; the router waits for its end."""
    door = Door()
    door.abort("g1", cause)
    (end,) = door.sink.ends
    assert (end.key, end.grant_id, end.finish_reason) == (make_key("r"), "g1", None)
    assert isinstance(end.error, error)
    assert end.error.worker_id == "d-0"


def test_a_start_that_comes_after_its_abort_is_refused_and_the_next_leg_is_not():
    """CASES P-20, in disorder: nobody would ever give that leg up again."""
    door = Door()
    door.abort("g1")
    door.start("g1")
    door.start("g1")
    assert (door.grants, door.legs.num_rejected, len(door.sink.ends)) == ([], 2, 1)
    door.start("g2")
    assert (door.grants, len(door.sink.ends)) == (["g2"], 1)


def test_an_abort_means_the_leg_of_its_grant():
    door = Door()
    door.start("g2")
    door.abort("g1")
    assert (door.grants, [end.grant_id for end in door.sink.ends]) == (["g2"], ["g1"])
    door.abort("g2")
    assert (door.grants, [end.grant_id for end in door.sink.ends]) == ([], ["g1", ""])
    door.start("g3")
    door.abort("")
    assert door.grants == []


def test_what_was_given_up_is_forgotten_in_time():
    door = Door()
    door.abort("g1")
    door.clock.advance(REMEMBERED_S)
    door.start("g1")
    assert door.grants == ["g1"]
