"""The fault matrix leaves nothing out: all that can be broken has a row, or a reason why not."""

from __future__ import annotations

import pytest

from cluster.transport.faults import VERBS, Point, Verb
from cluster.wire import control_pb2 as wire
from tests.e2e.fault_cells import (
    LAST_WORD,
    LONE,
    REASONS,
    ROUTERS,
    STATES,
    UNPLAYED,
    WORKERS,
    cells,
    rows,
)

STREAMS = {
    (ROUTERS, Point.CONTROL_OUT): wire.RouterFact,
    (ROUTERS, Point.CONTROL_IN): wire.RouteDecision,
    (WORKERS, Point.CONTROL_OUT): wire.WorkerFact,
    (WORKERS, Point.CONTROL_IN): wire.Directive,
}
"""All that is said to the control plane and by it, by whose stream it is."""
KINDS = [
    (stream, point, field.name)
    for (stream, point), message in STREAMS.items()
    for field in message.DESCRIPTOR.oneofs_by_name["kind"].fields
]


def verbs_of(point: Point) -> set[Verb]:
    """Without the one that states are made of."""
    return set(VERBS[point]) - {Verb.HOLD}


OF_WORKERS = [p for p in Point if p not in (Point.CONTROL_OUT, Point.CONTROL_IN)]


@pytest.mark.parametrize("point", OF_WORKERS)
def test_each_verb_of_each_point_has_a_row(point):
    played = {row.verb for row in rows() if row.point is point}
    if point is Point.LINK:  # "breaks", and "stays broken"
        played |= {Verb.FAIL for row in rows() if row.component == "link" and row.point is None}
    assert played == verbs_of(point)


@pytest.mark.parametrize(("stream", "point", "kind"), KINDS)
def test_each_message_to_and_from_the_control_plane_has_rows_or_a_reason(stream, point, kind):
    mine = [r for r in rows() if (r.component, r.point, r.peer) == (stream, point, kind)]
    if mine:
        assert {row.verb for row in mine} == verbs_of(point)
    assert bool(mine) != (UNPLAYED.get((stream, point, kind)) in REASONS)


def test_each_row_has_cells_and_a_reason_for_every_state_without():
    played = {cell.row for cell in cells()}
    for row in rows():
        obstacles = {row.obstacle(state) for state in STATES}
        assert row in played or obstacles & {LAST_WORD, LONE}, f"{row} is played nowhere"
        assert obstacles <= {"", *REASONS}, f"{row} has no reason"
