"""The cells of the fault matrix: where a request stands, what is broken then, and what cannot be.

A cell's victim is one greedy request. It is brought to a state, and held there by a fault of its
own on one process; then a process is killed or stopped, a link breaks, the client leaves, or a
message is lost, late, repeated or spoilt. A message that ends a state needs no holding.

Every fault has a cell for every state, or the reason why there can be none.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from cluster.config import Role, TransportKind
from cluster.transport.faults import VERBS, Point, Verb

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Hold:
    """What holds a request in a state: the ``nth`` message at ``point`` on a worker of ``role``."""

    role: Role | None
    """None: at its router."""
    point: Point
    nth: int = 1
    peer: str = ""
    breaks_first: bool = False
    """The first handoff fails beforehand, so that its export waits for another decode worker."""


STATES = {
    "wanted": Hold(None, Point.CONTROL_IN, peer="grant"),
    "granted": Hold(Role.PREFILL, Point.LEG),
    "offered": Hold(Role.DECODE, Point.OFFER),
    "reserved": Hold(Role.PREFILL, Point.CREDIT),
    "sending": Hold(Role.PREFILL, Point.SEND, nth=2),
    "stored": Hold(Role.PREFILL, Point.STORED),
    "sent": Hold(Role.DECODE, Point.RECEIVED),
    "committed": Hold(Role.PREFILL, Point.COMMIT),
    "waiting": Hold(Role.PREFILL, Point.REDIRECT, breaks_first=True),
    "redirected": Hold(Role.DECODE, Point.OFFER, breaks_first=True),
    "streaming": Hold(Role.DECODE, Point.STEP, nth=4),
}
"""In their order: not granted yet; legs under way; the handoff as the decode worker sees it
(``stored``: all KV has landed layer by layer, and the token that goes alone is not drawn; ``sent``:
all of it is under way in one segment; ``committed``: its sender does not know); an export that
waits for a redirect; the offer to another decode worker; decoding, with nothing to hand over."""
SPANS = {
    Point.LEG: ("granted",),
    Point.OFFER: ("offered", "redirected"),
    Point.CREDIT: ("reserved", "redirected"),
    Point.MANIFEST: ("reserved", "sending", "stored", "sent", "redirected"),
    Point.SEND: ("reserved", "sending", "sent", "redirected"),
    Point.RECV: ("sending", "sent", "redirected"),
    Point.RECEIVED: ("sending", "sent", "redirected"),
    Point.COMMIT: ("committed", "redirected"),
    Point.REDIRECT: ("waiting",),
    Point.ABORT: (
        "offered", "reserved", "sending", "stored", "sent", "committed", "redirected",
    ),
    Point.LEG_ABORT: tuple(STATES)[1:],
}  # fmt: skip
"""By point: the states in which its message can be under way."""
HEARD_BY = {
    Point.LEG: (Role.PREFILL, Role.DECODE),
    Point.CREDIT: (Role.PREFILL,),
    Point.SEND: (Role.PREFILL,),
    Point.COMMIT: (Role.PREFILL,),
    Point.REDIRECT: (Role.PREFILL,),
}
"""Where it is not the decode worker."""
LAST_WORDS = (Point.CREDIT, Point.COMMIT, Point.ABORT)
"""Behind which nothing of the same handoff comes that way, until they are heard."""
LEAVING = (Point.ABORT, Point.LEG_ABORT)
"""What is said because the client left."""
CONTROL_KINDS = {Point.CONTROL_OUT: ("want", "done"), Point.CONTROL_IN: ("grant",)}
"""What a router says and hears of each request; other kinds are played in fewer states."""
BREAKS, STAYS_BROKEN = "breaks", "stays broken"

NO_WORKER = "no worker"
NO_HANDOFF = "no handoff"
NOT_YET = "not yet"
PAST = "past"
NO_BYTES = "no bytes"
ELSEWHERE = "torch_dist"
NO_STEP = "no step"
SNAPSHOT = "snapshot"
SAME_WORD = "same word"
ANSWERED = "answered"
TOLD_TWICE = "told twice"
OPENING = "opening"
AT_THE_END = "at the end"
OF_OPERATORS = "operators'"
OF_OTHERS = "of others"
NO_REFUSAL = "no refusal"
LAST_WORD = "last word"
LONE = "lone"
BYTES_NEXT = "bytes next"
REASONS = {
    NO_WORKER: "nobody has granted the request, so no worker and no link has anything of it",
    NO_HANDOFF: "no handoff is under way, so no message of one is",
    NOT_YET: "what is said earlier in a handoff has not been heard, so this has not been said",
    PAST: "this was said and heard before the state began, and is not said again",
    NO_BYTES: "all KV has landed: what is left to be sent is a token, in a manifest without bytes",
    ELSEWHERE: "played over torch_dist: what moves the bytes can make no difference",
    NO_STEP: "its worker computes nothing here: it is through with it, or waits for KV",
    SNAPSHOT: "each tells all there is anew, once a second too: played where that changes most",
    SAME_WORD: "has the worker do what leg.abort does, which is played wherever there is a leg",
    ANSWERED: "its want was answered: who leaves withdraws none, and gives the grant back",
    TOLD_TWICE: "the stream to the worker breaks too: played where that one carries tokens",
    OPENING: "opens a stream, on which nothing was said yet: it is lost with its stream only",
    AT_THE_END: "said by a worker that has nothing left (test_drain), or whose step has failed",
    OF_OPERATORS: "what an operator orders, and no request: test_drain, test_set_role",
    OF_OTHERS: "another client's word on a request, by its id: tests of cluster.control",
    NO_REFUSAL: "said here of a leg that was lost, and of nothing else: it would be a second fault",
    LAST_WORD: "nothing of its handoff comes behind it; the next one's does in test_overtaken",
    LONE: "a worker is told nothing else by the control plane, unless another request is given up",
    BYTES_NEXT: "its bytes are due, and no word follows before they are taken, or Gloo gives up",
}
ROUTERS, WORKERS = "control's stream", "worker's stream"
_OUT, _IN = Point.CONTROL_OUT, Point.CONTROL_IN
UNPLAYED = {
    (ROUTERS, _OUT, "hello"): OPENING,
    (ROUTERS, _IN, "welcome"): OPENING,
    (ROUTERS, _IN, "cancel"): OF_OTHERS,
    (ROUTERS, _OUT, "cancel_request"): OF_OTHERS,
    (ROUTERS, _OUT, "cancel_result"): OF_OTHERS,
    (ROUTERS, _IN, "cancel_result"): OF_OTHERS,
    (ROUTERS, _IN, "reject"): NO_REFUSAL,
    (WORKERS, _OUT, "register"): OPENING,
    (WORKERS, _IN, "accepted"): OPENING,
    (WORKERS, _IN, "refused"): OPENING,
    (WORKERS, _OUT, "leave"): AT_THE_END,
    (WORKERS, _IN, "drain"): OF_OPERATORS,
    (WORKERS, _IN, "role"): OF_OPERATORS,
}
"""Messages to and from the control plane of which there is no row, by whose stream it is."""


class Kind(enum.Enum):
    """How a cell is played."""

    PROCESS = "process"
    CLIENT = "client"
    LINK = "link"
    MESSAGE = "message"
    LEAVING = "message after the client left"
    CONTROL = "message of the control plane's stream"
    REPORT = "message of a worker's stream"
    DEATH = "message of a worker's death"
    ENGINE = "step"


@dataclasses.dataclass(frozen=True)
class Row:
    """One fault, in whatever state."""

    kind: Kind
    component: str
    fault: str
    point: Point | None = None
    verb: Verb | None = None
    role: Role | None = None
    """Of the worker that hears the message."""
    peer: str = ""
    states: tuple[str, ...] = ()
    """Where it is played, if not wherever it can be."""
    elsewhere: str = ""
    """Why not in the other states."""

    def __str__(self) -> str:
        return f"{self.component}: {self.fault}"

    @property
    def why_alone(self) -> str:
        """Why nothing could overtake it, where that is the fault; else empty."""
        if self.verb is not Verb.REORDER:
            return ""
        if self.point in LAST_WORDS:
            return LAST_WORD
        return LONE if (self.component, self.point) == (WORKERS, Point.CONTROL_IN) else ""

    def obstacle(self, state: str) -> str:
        """Return why there is no cell in this state; empty where there is one."""
        if self.states:
            return self.why_alone if state in self.states else self.elsewhere
        if state == "wanted":
            is_there = self.kind in (Kind.CONTROL, Kind.CLIENT) or (
                self.kind is Kind.PROCESS and self.component in ("control", "router")
            )
            return "" if is_there else NO_WORKER
        if self.point not in SPANS or state in SPANS[self.point]:
            return self.why_alone
        return _why_not_under_way(self.point, state)


def _why_not_under_way(point: Point, state: str) -> str:
    order, span = list(STATES), SPANS[point]
    is_of_bytes = point in (Point.SEND, Point.RECV, Point.RECEIVED)
    if state == "stored" and is_of_bytes:
        return NO_BYTES
    if state == "granted" or (state == "waiting" and point is not Point.LEG):
        return NO_HANDOFF
    return NOT_YET if order.index(state) < order.index(span[0]) else PAST


@dataclasses.dataclass(frozen=True)
class Cell:
    """One fault in one state, over one transport."""

    row: Row
    state: str
    transport: TransportKind = TransportKind.TORCH_DIST

    def __str__(self) -> str:
        return f"{self.transport.value}-{self.row.component}-{self.row.fault}-{self.state}"

    @property
    def obstacle(self) -> str:
        """Why it cannot be; empty where it can."""
        is_gloo = self.transport is TransportKind.TORCH_DIST
        if obstacle := self.row.obstacle(self.state):
            return obstacle
        if not is_gloo and not self.moves_kv:
            return ELSEWHERE
        # Where more is still being computed, more is to be sent: one segment after the other.
        is_blocked = is_gloo and self.state in ("reserved", "sending", "redirected")
        is_ahead = self.row.point is Point.MANIFEST and self.row.verb is Verb.REORDER
        return BYTES_NEXT if is_blocked and is_ahead else ""

    @property
    def moves_kv(self) -> bool:
        """Whether it may matter what moves the bytes."""
        is_of_kv = self.row.component in ("prefill", "decode", "client", "link")
        is_of_first = self.state not in ("wanted", "granted", "redirected", "streaming")
        return is_of_kv and is_of_first and self.row.kind is not Kind.LEAVING

    @property
    def is_own(self) -> bool:
        """Whether the message needs no holding, for it ends the state."""
        if self.row.kind is Kind.CONTROL:
            return self.state in ("wanted", "waiting") and not self.row.states
        return self.row.kind is Kind.MESSAGE and self.state not in ("stored", "redirected")

    @property
    def nth(self) -> int:
        """Which of the messages it is: an export that waits has been wanted and granted before."""
        is_again = self.state == "waiting" and self.row.peer in ("want", "grant")
        is_second = self.state == "sending" and self.row.kind is not Kind.CONTROL
        return 2 if is_second or is_again else 1

    @property
    def kills_router(self) -> bool:
        """Whether the victim's router dies."""
        return (self.row.component, self.row.fault) == ("router", "kill")

    @property
    def may_fail(self) -> bool:
        """Only whoever loses his own router or leaves may see that."""
        return self.kills_router or self.is_left

    @property
    def kills(self) -> bool:
        """Whether a process dies of it."""
        row = self.row
        is_failure = row.kind is Kind.ENGINE and row.verb is Verb.FAIL
        return row.fault == "kill" or row.kind is Kind.DEATH or is_failure

    @property
    def is_left(self) -> bool:
        """Whether the client leaves."""
        return self.row.kind in (Kind.CLIENT, Kind.LEAVING)

    def outcome(self, error: str) -> str:
        """Return what is told of a victim that has ended so, as it may."""
        is_overtaken = self.row.verb is Verb.REORDER and (self.is_left or not error)
        return "overtaken" if is_overtaken else error.removesuffix("_exceeded") or "ok"

    @property
    def is_forgotten_late(self) -> bool:
        """Whether the control plane has to find out by itself that the request is over."""
        return self.row.fault == "drop done"


def rows() -> Iterator[Row]:
    """Return every fault."""
    for component in ("prefill", "decode", "control", "router"):
        for fault in ("kill", "stop"):
            yield Row(Kind.PROCESS, component, fault)
    for role in HEARD_BY[Point.LEG]:
        yield from _rows_of(Kind.MESSAGE, "router", Point.LEG, role)
    yield from _rows_of(Kind.LEAVING, "router", Point.LEG_ABORT)
    yield Row(Kind.CLIENT, "client", "leave")
    for fault in (BREAKS, STAYS_BROKEN):
        yield Row(Kind.LINK, "link", fault)
    for point in SPANS:
        if point not in (Point.LEG, *LEAVING):
            yield from _rows_of(Kind.MESSAGE, "link", point)
    yield from _rows_of(Kind.LEAVING, "link", Point.ABORT)
    for point, kinds in CONTROL_KINDS.items():
        for kind in kinds:
            yield from _rows_of_stream(Kind.CONTROL, ROUTERS, point, kind)
    yield from _rare_rows()


def _rare_rows() -> Iterator[Row]:
    """Return faults that say nothing new in most states."""
    yield from _rows_of_stream(Kind.CONTROL, ROUTERS, _IN, "view", ("streaming",), SNAPSHOT)
    yield from _rows_of_stream(Kind.DEATH, ROUTERS, _IN, "dead", ("streaming",), TOLD_TWICE)
    yield from _rows_of_stream(Kind.LEAVING, ROUTERS, _OUT, "cancel", ("wanted",), ANSWERED)
    both = ("granted", "streaming")
    yield from _rows_of_stream(Kind.REPORT, WORKERS, _OUT, "report", both, SNAPSHOT)
    yield from _rows_of_stream(Kind.LEAVING, WORKERS, _IN, "abort", ("streaming",), SAME_WORD)
    for role, point, state in (
        (Role.PREFILL, Point.STEP, "granted"),
        (Role.PREFILL, Point.STORED, "stored"),
        (Role.DECODE, Point.STEP, "streaming"),
    ):
        for verb in _verbs(point):
            fault, states = f"{verb.value} {point.value}", (state,)
            yield Row(
                Kind.ENGINE, role.value, fault, point, verb, role, states=states, elsewhere=NO_STEP
            )


def _rows_of_stream(
    part: Kind,
    component: str,
    point: Point,
    kind: str,
    states: tuple[str, ...] = (),
    elsewhere: str = "",
) -> Iterator[Row]:
    for verb in _verbs(point):
        fault = f"{verb.value} {kind}"
        yield Row(
            part, component, fault, point, verb, peer=kind, states=states, elsewhere=elsewhere
        )


def _rows_of(kind: Kind, component: str, point: Point, role: Role | None = None) -> Iterator[Row]:
    to = "" if role is None else f" to {role.value}"
    role = role or HEARD_BY.get(point, (Role.DECODE,))[0]
    for verb in _verbs(point):
        yield Row(kind, component, f"{verb.value} {point.value}{to}", point, verb, role)


def _verbs(point: Point) -> list[Verb]:
    return sorted(VERBS[point] - {Verb.HOLD}, key=lambda verb: verb.value)


def cells() -> Iterator[Cell]:
    """Return every cell that there can be."""
    for transport in (TransportKind.TORCH_DIST, TransportKind.SHM):
        for row in rows():
            mine = (Cell(row, state, transport) for state in STATES)
            yield from (cell for cell in mine if not cell.obstacle)
