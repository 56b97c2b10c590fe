"""Faults on purpose: a plan of what goes wrong where, and the switch that all seams ask.

Off unless the deploy file says ``faults.enabled``; tests then set a plan while the worker runs.
Whatever passes a *point* is counted there and asks the ``FaultSwitch`` what shall happen to it.
Nothing is left to chance: a fault meets the ``nth`` message since its plan was set, and each
firing is counted, so that a test can prove that its fault happened.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)


class Verb(enum.Enum):
    """What happens to a message."""

    DROP = "drop"
    """It never arrives, and nobody is told."""
    DELAY = "delay"
    """It, and all behind it, come ``seconds`` later."""
    CORRUPT = "corrupt"
    """One byte is another one: that at ``offset``."""
    TRUNCATE = "truncate"
    """Its last half is missing."""
    DUPLICATE = "duplicate"
    """It comes twice."""
    REORDER = "reorder"
    """It comes after the one behind it."""
    EARLY = "early"
    """Done is said before the data is there."""
    FAIL = "fail"
    """Its link breaks instead."""
    HOLD = "hold"
    """It, and all behind it, wait until the plan is cleared or replaced."""


class Point(enum.Enum):
    """Where a message passes.

    Peers are the worker at the other end of a link, and the kind of a message from or to the
    control plane, as control.proto has it.
    """

    SEND = "data.send"
    RECV = "data.recv"
    """Before the bytes are taken."""
    RECEIVED = "data.received"
    """After they were, and before anything is done with them."""
    OFFER = "signal.offer"
    CREDIT = "signal.credit"
    MANIFEST = "signal.manifest"
    COMMIT = "signal.commit"
    ABORT = "signal.abort"
    LEG = "leg.start"
    LEG_ABORT = "leg.abort"
    REDIRECT = "leg.redirect"
    LINK = "link"
    """A link: each that has carried a word when the plan is set, and each new one at its first."""
    STEP = "engine.step"
    """Before a step is computed."""
    STORED = "engine.stored"
    """After layers of a step that runs were stored, and told of."""
    CONTROL_OUT = "control.out"
    """What a client of the control plane says."""
    CONTROL_IN = "control.in"
    """What it is told."""


_SIGNAL = {Verb.DROP, Verb.DELAY, Verb.DUPLICATE, Verb.REORDER, Verb.FAIL, Verb.HOLD}
_LEG = {Verb.DROP, Verb.DELAY, Verb.DUPLICATE, Verb.HOLD}
_CONTROL = {*_LEG, Verb.REORDER}
_BYTES = {Verb.DROP, Verb.DELAY, Verb.CORRUPT, Verb.TRUNCATE, Verb.FAIL, Verb.HOLD}
VERBS: dict[Point, frozenset[Verb]] = {
    Point.SEND: frozenset(_BYTES | {Verb.DUPLICATE}),
    Point.RECV: frozenset(_BYTES | {Verb.EARLY}),
    Point.RECEIVED: frozenset({Verb.DELAY, Verb.FAIL, Verb.HOLD}),
    Point.OFFER: frozenset(_SIGNAL),
    Point.CREDIT: frozenset(_SIGNAL | {Verb.EARLY}),
    Point.MANIFEST: frozenset(_SIGNAL),
    Point.COMMIT: frozenset(_SIGNAL),
    Point.ABORT: frozenset(_SIGNAL),
    Point.LEG: frozenset(_LEG),
    Point.LEG_ABORT: frozenset(_LEG),
    Point.REDIRECT: frozenset(_LEG),
    Point.LINK: frozenset({Verb.FAIL}),
    Point.STEP: frozenset({Verb.DELAY, Verb.FAIL, Verb.HOLD}),
    Point.STORED: frozenset({Verb.DELAY, Verb.HOLD}),
    Point.CONTROL_OUT: frozenset(_CONTROL),
    Point.CONTROL_IN: frozenset(_CONTROL),
}
"""What can be done at each point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong: the ``nth`` message at ``point`` of ``peer``, and maybe more."""

    verb: Verb
    point: Point
    nth: int = 1
    """1 is the first since the plan was set."""
    times: int = 1
    """How many from then on; 0: all."""
    seconds: float = 0.0
    """Of a delay."""
    offset: int = 0
    """Of the byte that is corrupted; negative ones count from the end, where the trailer is."""
    peer: str = ""
    """Empty: any."""
    seconds_per_byte: float = 0.0
    """Of a delay at SEND, besides ``seconds``: what a slow link would take for the bytes."""
    seconds_per_token: float = 0.0
    """Of a delay at STEP, besides ``seconds``: what a slow worker would take for the tokens."""

    def __post_init__(self) -> None:
        """Refuse what can't be done."""
        if self.verb not in VERBS[self.point]:
            raise InvalidRequest(f"{self.point.value} knows no {self.verb.value}", field="verb")
        if self.nth < 1 or self.times < 0 or self.seconds < 0:
            raise InvalidRequest("nth is 1 or more, times and seconds 0 or more", field="nth")
        for name, point in (("seconds_per_byte", Point.SEND), ("seconds_per_token", Point.STEP)):
            value, is_its_place = getattr(self, name), self.point is point
            if value < 0 or (value and not (self.verb is Verb.DELAY and is_its_place)):
                raise InvalidRequest(
                    f"{name} is 0 or more, and for a delay at {point.value}", field=name
                )

    def meets(self, count: int) -> bool:
        """Whether the ``count``-th message is one that this happens to."""
        return count >= self.nth and (self.times == 0 or count < self.nth + self.times)


@dataclass(frozen=True, slots=True)
class Firing:
    """A fault that happens now, under the plan that was set ``plan``-th."""

    fault: Fault
    plan: int


class FaultSwitch:
    """The plan of one process and what came of it; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._plan = 0
        self._faults: tuple[Fault, ...] = ()
        self._met: list[int] = []
        self._fired: list[int] = []
        self._passed: Counter[Point] = Counter()
        self._on_change: list[Callable[[], None]] = []

    def set(self, faults: Sequence[Fault]) -> None:
        """Replace the plan; what is held goes on, and all counts begin at 0."""
        with self._changed:
            self._plan += 1
            self._faults = tuple(faults)
            self._met = [0] * len(self._faults)
            self._fired = [0] * len(self._faults)
            self._passed.clear()
            self._changed.notify_all()
            listeners = list(self._on_change)
        for listener in listeners:
            listener()

    def at(self, point: Point, peer: str = "") -> Firing | None:
        """Count a message at ``point`` and say what happens to it; None: it passes."""
        happens: Firing | None = None
        with self._changed:
            self._passed[point] += 1
            for index, fault in enumerate(self._faults):
                if fault.point is not point or fault.peer not in ("", peer):
                    continue
                self._met[index] += 1
                if happens is None and fault.meets(self._met[index]):
                    self._fired[index] += 1
                    happens = Firing(fault, self._plan)
        if happens is not None:
            logger.warning(
                "fault=%s point=%s peer=%s", happens.fault.verb.value, point.value, peer or "-"
            )
        return happens

    def fired(self) -> tuple[int, ...]:
        """Return how often each fault of the plan has happened, in the plan's order."""
        with self._changed:
            return tuple(self._fired)

    def passed(self) -> dict[Point, int]:
        """Return what has passed each point since the plan was set."""
        with self._changed:
            return dict(self._passed)

    def is_over(self, firing: Firing) -> bool:
        """Whether the plan that ``firing`` belongs to was replaced."""
        return self._plan != firing.plan

    def wait_over(self, firing: Firing, timeout_s: float, is_gone: threading.Event) -> bool:
        """Block until the plan was replaced, or ``is_gone`` was set and ``nudge`` called."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over(firing) or is_gone.is_set(), timeout_s)
            return self.is_over(firing)

    def nudge(self) -> None:
        """Have those who block look again."""
        with self._changed:
            self._changed.notify_all()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each change of the plan, on whatever thread makes it."""
        with self._changed:
            self._on_change.append(listener)

    def unsubscribe(self, listener: Callable[[], None]) -> None:
        """Call it no more."""
        with self._changed:
            self._on_change.remove(listener)
