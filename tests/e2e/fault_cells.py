"""The cells of the fault matrix: what stands still where, what is broken then, and who may notice.

A cell's victim is one greedy request. It is brought to a state of its handoff, and held there by
a fault of its own on one worker; then a process is killed or stopped, or the client leaves.
Faults of messages need no holding: they meet the one message that would end the state.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

from cluster.config import Role, TransportKind
from cluster.transport.faults import VERBS, Point, Verb
from tests.e2e.plain_cluster import wait_until
from tests.e2e.process_cluster import CONTROL, fault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.process_cluster import ProcessCluster
    from tests.e2e.streams import Stream

PAUSE_S = 4.0
"""Longer than it takes to declare a worker dead."""
_STEP_S = 0.03
"""Steps are slowed to this, so that each chunk's KV goes out before the next one is there."""


@dataclasses.dataclass(frozen=True)
class Hold:
    """Where a handoff stands still: at the ``nth`` message at ``point`` on a worker of ``role``."""

    role: Role
    point: Point
    nth: int = 1
    breaks_first: bool = False
    """The first handoff fails beforehand, so that its export waits for another decode worker."""


STATES = {
    "offered": Hold(Role.DECODE, Point.OFFER),
    "reserved": Hold(Role.PREFILL, Point.CREDIT),
    "sending": Hold(Role.PREFILL, Point.SEND, nth=2),
    "sent": Hold(Role.DECODE, Point.RECEIVED),
    "committed": Hold(Role.PREFILL, Point.COMMIT),
    "waiting": Hold(Role.PREFILL, Point.REDIRECT, breaks_first=True),
}
"""Each is left by the message that is held: an export waits until its redirect has come."""
MESSAGES = {
    Point.OFFER: ("offered", Role.DECODE, 1),
    Point.CREDIT: ("offered", Role.PREFILL, 1),
    Point.MANIFEST: ("reserved", Role.DECODE, 1),
    Point.SEND: ("sending", Role.PREFILL, 2),
    Point.RECV: ("sending", Role.DECODE, 2),
    Point.RECEIVED: ("sent", Role.DECODE, 1),
    Point.COMMIT: ("committed", Role.PREFILL, 1),
    Point.REDIRECT: ("waiting", Role.PREFILL, 1),
}
"""By point: the state that its message ends, who hears it, and which one it is."""
CONTROL_KINDS = {Point.CONTROL_OUT: ("want", "done"), Point.CONTROL_IN: ("grant",)}
_DELAY_S = 0.3


@dataclasses.dataclass(frozen=True)
class Cell:
    """One fault in one state."""

    component: str
    fault: str
    state: str
    point: Point | None = None
    peer: str = ""
    transport: TransportKind = TransportKind.TORCH_DIST

    def __str__(self) -> str:
        return f"{self.transport.value}-{self.component}-{self.fault}-{self.state}"

    @property
    def row(self) -> str:
        return f"{self.component}: {self.fault}"

    @property
    def moves_kv(self) -> bool:
        """Whether it may matter what moves the bytes."""
        return self.component in ("prefill", "decode", "client", "link")

    @property
    def is_short(self) -> bool:
        """Whether the prompt is of one chunk: the first message with bytes is then the last."""
        return self.state == "sent"

    @property
    def may_fail(self) -> bool:
        """Only whoever loses his own router may see that."""
        return (self.component, self.fault) == ("router", "kill")


def cells() -> Iterator[Cell]:
    """Return the whole matrix."""
    for component in ("prefill", "decode", "control", "router"):
        for fault_name in ("kill", "stop"):
            for state in STATES:
                yield Cell(component, fault_name, state)
    for state in STATES:
        yield Cell("client", "leave", state)
    for point, (state, _, _) in MESSAGES.items():
        for verb in sorted(VERBS[point] - {Verb.HOLD}, key=lambda verb: verb.value):
            yield Cell("link", f"{verb.value} {point.value}", state, point)
    for point, kinds in CONTROL_KINDS.items():
        for kind in kinds:
            for verb in sorted(VERBS[point] - {Verb.HOLD}, key=lambda verb: verb.value):
                name = f"{verb.value} {kind}"
                yield Cell("control plane's stream", name, "any", point, peer=kind)


SLOW_STEPS = fault("delay", Point.STEP.value, times=0, seconds=_STEP_S)


class Scene:
    """Plays cells on one cluster."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self._cluster = cluster

    def play(self, cell: Cell, victim: Stream, router: str) -> None:
        """Bring the victim into the cell's state, do the fault, and wait for the victim's end."""
        if cell.point is None:
            self._break_process(cell, victim, router)
        else:
            self._break_message(cell, victim, router)

    def mend(self) -> None:
        """Let go of everything, and start again what was killed."""
        cluster = self._cluster
        for name in (CONTROL, *cluster.routers, *cluster.pools):
            if name not in cluster.processes:
                cluster.restart(name)
        cluster.clear_faults()
        cluster.wait_whole()

    def hold(self, hold: Hold) -> str:
        """Let the next handoff of a cluster of one pair stand still; returns on which worker."""
        (holder,) = self._of(hold.role)
        if hold.role is Role.DECODE:
            self._slow_down()
        there = fault("hold", hold.point.value, nth=hold.nth)
        self._cluster.faults(holder).set(there, SLOW_STEPS)
        return holder

    # ---- messages

    def _break_message(self, cell: Cell, victim: Stream, router: str) -> None:
        verb = cell.fault.split()[0]
        options = {"seconds": _DELAY_S} if verb == Verb.DELAY.value else {}
        if cell.peer:
            names = [router]
            plan = [fault(verb, cell.point.value, peer=cell.peer, **options)]
        else:
            state, role, nth = MESSAGES[cell.point]
            if STATES[state].breaks_first:
                self._break_first()
            names = self._of(role)
            plan = [fault(verb, cell.point.value, nth=nth, **options)]
        self._slow_down()
        for name in names:
            self._cluster.faults(name).set(*plan, SLOW_STEPS)
        victim.start()
        victim.wait_end()
        num_fired = sum(self._cluster.faults(name).fired()[0] for name in names)
        assert num_fired > 0, "the fault did not happen"

    # ---- processes

    def _break_process(self, cell: Cell, victim: Stream, router: str) -> None:
        hold = STATES[cell.state]
        if hold.breaks_first:
            self._break_first()
        else:
            self._slow_down()
        held = self._of(hold.role)
        for name in held:
            hold_there = fault("hold", hold.point.value, nth=hold.nth)
            self._cluster.faults(name).set(hold_there, SLOW_STEPS)
        victim.start()
        holder = self._wait_held(held)
        for name in self.cluster_workers():
            if name != holder:
                self._cluster.faults(name).clear()  # a second attempt shall not be held too
        target = self._target(cell.component, holder, router)
        if cell.fault == "leave":
            victim.leave()
        elif cell.fault == "kill":
            self._cluster.kill(target)
        else:
            self._stop(target, holder)
        if holder in self._cluster.processes:
            self._cluster.faults(holder).clear()
        if target == CONTROL and cell.fault == "kill":
            self._cluster.restart(CONTROL)
        victim.wait_end()

    def _stop(self, target: str, holder: str) -> None:
        """Stop a process for a while; whoever holds the handoff lets it go meanwhile."""
        with self._cluster.stopped(target):
            if holder != target:
                self._cluster.faults(holder).clear()
            threading.Event().wait(PAUSE_S)

    def _target(self, component: str, holder: str, router: str) -> str:
        if component == "client":
            return ""
        if component == CONTROL:
            return CONTROL
        if component == "router":
            return router
        if self._cluster.pools[holder].role.value == component:
            return holder
        return self._partner(Role(component))

    def _partner(self, role: Role) -> str:
        """Find the other worker of the one handoff there is: it has a grant."""
        found: list[str] = []

        def is_seen() -> bool:
            found[:] = [
                w.worker.worker_id
                for w in self._cluster.view().workers
                if w.worker.role is role and w.report.held_grants
            ]
            return bool(found)

        wait_until(is_seen, 5, f"no {role.value} worker has a leg")
        return found[0]

    def _wait_held(self, names: list[str]) -> str:
        found: list[str] = []

        def is_held() -> bool:
            found[:] = [name for name in names if self._cluster.faults(name).fired()[0]]
            return bool(found)

        wait_until(is_held, 10, "the handoff did not come to stand still")
        return found[0]

    def _slow_down(self) -> None:
        for name in self._of(Role.PREFILL):
            self._cluster.faults(name).set(SLOW_STEPS)

    def _break_first(self) -> None:
        for name in self._of(Role.DECODE):
            self._cluster.faults(name).set(fault("fail", Point.RECEIVED.value))

    def _of(self, role: Role) -> list[str]:
        return [name for name, pool in self._cluster.pools.items() if pool.role is role]

    def cluster_workers(self) -> list[str]:
        return list(self._cluster.pools)
