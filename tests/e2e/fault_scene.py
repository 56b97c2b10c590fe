"""Plays the cells of the fault matrix on one cluster, and proves that each fault happened."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cluster.config import Role
from cluster.transport.faults import Point, Verb
from tests.e2e.fault_cells import STATES, STAYS_BROKEN, Cell, Hold, Kind
from tests.e2e.plain_cluster import wait_until
from tests.e2e.process_cluster import CONTROL, fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.wire import faults_pb2 as wire
    from tests.e2e.process_cluster import ProcessCluster
    from tests.e2e.streams import Stream

PAUSE_S = 4.0
"""Longer than it takes to declare a worker dead."""
_STEP_S = 0.03
"""Steps are slowed to this, so that each chunk's KV goes out before the next one is there."""
_DELAY_S = 0.3
_NUM_PARTS = 2
"""Of a prompt whose KV leaves by layers: the model has so many."""
SLOW_STEPS = fault("delay", Point.STEP.value, times=0, seconds=_STEP_S)
_FAILS = fault(Verb.FAIL.value, Point.RECEIVED.value)
_UNANSWERED = fault(Verb.DROP.value, Point.OFFER.value)
"""Makes a handoff fail and leaves its link open."""
_UNHEARD = fault(Verb.DROP.value, Point.LEG_ABORT.value, times=0)
"""Nobody hears from a router that a leg is given up."""


class NotEntered(Exception):
    """The victim did not come into its state, so nothing was broken: there was no scene."""


class Scene:
    """Plays cells on one cluster; ``router`` is the victim's."""

    def __init__(self, cluster: ProcessCluster, router: str = "router-0") -> None:
        self._cluster = cluster
        self._router = router
        self._extra: tuple[wire.Fault, ...] = ()
        """What else shall happen on every worker, besides that the victim is held."""
        self._num_before = 0
        """Messages that were overtaken before this cell."""

    def play(self, cell: Cell, victim: Stream, bystander: Stream) -> None:
        """Bring the victim into the cell's state, do the fault, and wait for the victim's end.

        ``bystander`` is another request: at the same router, for faults of messages that the
        victim's state does not depend on, or at the other one where the router dies. A message is
        in the wrong order only where another one came before it; else it was late.
        """
        self._num_before = self._num_overtaken()
        plays: dict[Kind, Callable[[Cell, Stream], None]] = {
            Kind.PROCESS: lambda cell, victim: self._break_process(cell, victim, bystander),
            Kind.CLIENT: lambda cell, victim: self._leave(cell, victim, bystander),
            Kind.LINK: self._break_link,
            Kind.MESSAGE: self._break_message,
            Kind.LEAVING: lambda cell, victim: self._leave(cell, victim, bystander),
            Kind.CONTROL: lambda cell, victim: self._break_stream(cell, victim, bystander),
            Kind.REPORT: self._break_report,
            Kind.DEATH: self._hide_death,
            Kind.ENGINE: self._break_step,
        }
        plays[cell.row.kind](cell, victim)
        victim.wait_end()
        if cell.row.verb is Verb.REORDER:
            self._wait_overtaken()

    def mend(self) -> None:
        """Let go of everything, and start again what was killed."""
        cluster = self._cluster
        for name in (CONTROL, *cluster.routers, *cluster.pools):
            if name not in cluster.processes:
                cluster.restart(name)
        cluster.clear_faults()
        cluster.wait_whole()

    def hold(self, hold: Hold, *steps: wire.Fault) -> str:
        """Let the next handoff of a cluster of one pair stand still; returns on which worker.

        ``steps``: what befalls the steps of the prefill worker, which are slow.
        """
        (holder,) = self._of(hold.role)
        self._set(Role.DECODE, SLOW_STEPS)
        self._set(Role.PREFILL, *steps, SLOW_STEPS)
        mine = steps if hold.role is Role.PREFILL else ()
        self._cluster.faults(holder).set(_held(hold), *mine, SLOW_STEPS)
        return holder

    # ---- states

    def _enter(self, state: str, victim: Stream, *, fails: wire.Fault = _FAILS) -> str:
        """Start the victim and bring it into a state; returns who holds it there.

        ``fails``: how the first handoff fails, where it has to.
        """
        hold = STATES[state]
        is_redirected = state == "redirected"
        first = STATES["waiting"] if is_redirected else hold
        self._set(Role.PREFILL, SLOW_STEPS, *self._extra)
        decode = []
        if first.breaks_first:
            decode.append(fails)
        elif state == "committed":
            decode.append(_held(STATES["streaming"]))  # else the leg might be over by then
        self._set(Role.DECODE, *decode, *self._extra)
        names = self._of(first.role)
        self._set(first.role, _held(first), SLOW_STEPS, *self._extra)
        victim.start()
        holder = self._wait_held(names)
        if state == "stored":
            self._let_layers_land(holder)
        elif state == "committed":
            streaming = self._of(Role.DECODE)
            self._only(self._wait_held(streaming), streaming)
        elif is_redirected:
            names = self._of(hold.role)
            self._set(hold.role, _held(hold), *self._extra)
            self._cluster.faults(holder).set(SLOW_STEPS, *self._extra)
            holder = self._wait_held(names)
        self._only(holder, names)
        return holder

    def _only(self, holder: str, names: list[str]) -> None:
        """Have nothing befall a second attempt, at whoever else it comes to."""
        for name in names:
            if name != holder:
                self._cluster.faults(name).set(*self._extra)

    def _let_layers_land(self, holder: str) -> None:
        """Let the held step go on from part to part; the last one's KV lands with it held."""
        for num_parts in range(1, _NUM_PARTS + 1):
            if num_parts > 1:
                self._cluster.faults(holder).set(_held(STATES["stored"]), *self._extra)
                self._wait_held([holder])
            wait_until(
                lambda num=num_parts: self._num_passed(Point.RECEIVED) == num,
                10,
                f"part {num_parts} of the layers has not landed",
            )

    def _release(self, *names: str) -> None:
        """Let go of all that is held, or by these; who was killed or stands still is left alone."""
        for name in names or (self._router, *self._cluster.pools):
            if name in self._cluster.processes:
                self._cluster.faults(name).clear()

    # ---- messages

    def _break_message(self, cell: Cell, victim: Stream) -> None:
        row = cell.row
        there = _broken(cell, nth=cell.nth)
        if cell.is_own:
            self._set(Role.PREFILL, SLOW_STEPS)
            if STATES[cell.state].breaks_first:
                self._set(Role.DECODE, _FAILS)
            self._set(row.role, there, SLOW_STEPS)
            victim.start()
        else:
            # A redirect lets the second handoff begin, the held step the token that goes alone.
            is_redirected = cell.state == "redirected"
            holder = self._enter("waiting" if is_redirected else cell.state, victim)
            self._set(Role.DECODE, *([there] if row.role is Role.DECODE else []))
            here = [there] if row.role is Role.PREFILL else []
            self._cluster.faults(holder).set(*here, SLOW_STEPS)
        names = self._of(row.role)
        self._only(self._wait_held(names), names)
        victim.wait_end()

    def _break_stream(self, cell: Cell, victim: Stream, bystander: Stream) -> None:
        """A fault of the router's stream to the control plane."""
        there = _broken(cell, nth=cell.nth)
        if cell.is_own:
            if STATES[cell.state].breaks_first:
                self._set(Role.DECODE, _FAILS)
            self._set(None, there)
            victim.start()
            if cell.row.verb is Verb.REORDER:
                self._wait_held([self._router])
                bystander.start()  # its word comes first
                bystander.wait_end()
            victim.wait_end()
            self._wait_held([self._router])
            return
        self._enter(cell.state, victim)
        self._set(None, there)
        bystander.start()
        self._wait_held([self._router])
        assert not victim.ended_at, "the victim is over"
        self._release(*self._cluster.pools)
        victim.wait_end()  # what is said of that comes before the bystander's, where it has to
        bystander.wait_end()

    def _break_report(self, cell: Cell, victim: Stream) -> None:
        """A fault of what the worker tells when it is let go."""
        holder = self._enter(cell.state, victim)
        self._cluster.faults(holder).set(_broken(cell), SLOW_STEPS)
        victim.wait_end()
        self._wait_held([holder])

    def _hide_death(self, cell: Cell, victim: Stream) -> None:
        """The router does not hear from the control plane, or later, or twice, that one died."""
        holder = self._enter(cell.state, victim)
        self._set(None, _broken(cell))
        self._cluster.kill(holder)
        victim.wait_end()
        self._wait_held([self._router])

    # ---- steps

    def _break_step(self, cell: Cell, victim: Stream) -> None:
        """The next step is late, or fails, and then its worker gives up by itself."""
        if cell.row.point is Point.STORED:
            # It ends its state by itself.
            self._set(cell.row.role, _broken(cell))
            victim.start()
            self._wait_held(self._of(cell.row.role))
            victim.wait_end()
            return
        holder = self._enter(cell.state, victim)
        self._cluster.faults(holder).set(_broken(cell))
        if cell.kills:
            assert self._cluster.wait_exit(holder, 15) > 0
        else:
            self._wait_held([holder])
        victim.wait_end()

    # ---- clients and links

    def _leave(self, cell: Cell, victim: Stream, bystander: Stream) -> None:
        """The client leaves; where a message is to be broken, it is one that says so."""
        is_message = cell.row.kind is Kind.LEAVING
        if is_message:
            # The control plane has its word only where the router's does not arrive.
            first = [_UNHEARD] if cell.row.peer == "abort" else []
            self._extra = (*first, _broken(cell))
        self._enter(cell.state, victim)
        victim.leave()
        if is_message:
            wait_until(self._has_extra_fired, 10, "the fault did not happen")
        if cell.row.verb is Verb.REORDER:
            bystander.start()
            self._wait_overtaken()
        self._release()
        if bystander.started_at:
            bystander.wait_end()

    def _has_extra_fired(self) -> bool:
        return any(self._fired(name)[-1] for name in (self._router, *self._cluster.pools))

    def _break_link(self, cell: Cell, victim: Stream) -> None:
        """The decode worker's end breaks, and every later one too where it stays broken."""
        is_waiting = cell.state == "waiting"
        holder = self._enter(cell.state, victim, fails=_UNANSWERED if is_waiting else _FAILS)
        if STATES[cell.state].role is Role.DECODE:
            breaker = holder
        elif is_waiting:
            decode = self._of(Role.DECODE)
            breaker = self._wait_held(decode)  # who left the offer unanswered
            self._only(breaker, decode)
        else:
            breaker = self._partner(Role.DECODE)
        peer = "" if cell.state == "streaming" else self._prefill_of(holder)
        times = 1 if peer else len(self._of(Role.PREFILL))
        if cell.row.fault == STAYS_BROKEN:
            times = 0
        broken = fault(Verb.FAIL.value, Point.LINK.value, times=times, peer=peer)
        self._cluster.faults(breaker).set(broken)
        if cell.state != "granted":  # where it may not be open, and breaks at its first word
            self._wait_held([breaker])
        if holder != breaker:
            self._cluster.faults(holder).set(SLOW_STEPS)
        victim.wait_end()
        self._wait_held([breaker])

    def _prefill_of(self, holder: str) -> str:
        if self._cluster.pools[holder].role is Role.PREFILL:
            return holder
        return self._partner(Role.PREFILL)

    # ---- processes

    def _break_process(self, cell: Cell, victim: Stream, bystander: Stream) -> None:
        # Whoever decodes makes steps, of which some states hold one; its first token needs none.
        is_first = STATES[cell.state].point is not Point.STEP and cell.state != "committed"
        if cell.kills_router and is_first:
            self._extra = (SLOW_STEPS,)
            bystander.start()
            bystander.wait_tokens(2)
        served = self._num_legs()
        holder = self._enter(cell.state, victim)
        target = self._target(cell, holder, served)
        if cell.kills_router and not is_first:
            bystander.start()
            bystander.wait_tokens(1)
        assert not bystander.ended_at, "the stream at the other router is over"
        if cell.row.fault == "stop":
            with self._cluster.stopped(target):
                for name in (self._router, *self._cluster.pools):
                    if name != target:
                        self._cluster.faults(name).clear()
                threading.Event().wait(PAUSE_S)
        else:
            self._cluster.kill(target)
        self._release()
        if cell.kills_router:
            bystander.wait_end()
        if target == CONTROL and cell.row.fault == "kill":
            self._cluster.restart(CONTROL)

    def _target(self, cell: Cell, holder: str, served: dict[str, float]) -> str:
        component = cell.row.component
        if component == CONTROL:
            return CONTROL
        if component == "router":
            return self._router
        if self._cluster.pools[holder].role.value == component:
            return holder
        if cell.state == "streaming":
            return next(name for name, num in self._num_legs().items() if num > served[name])
        return self._partner(Role(component))

    def _num_legs(self) -> dict[str, float]:
        """Return how many legs each prefill worker has had."""
        return {
            w.worker.worker_id: w.report.counters["legs_received"]
            for w in self._cluster.view().workers
            if w.worker.role is Role.PREFILL
        }

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

    # ---- switches

    def _set(self, role: Role | None, *faults: wire.Fault) -> None:
        for name in self._of(role):
            self._cluster.faults(name).set(*faults)

    def _fired(self, name: str) -> list[int]:
        return self._cluster.faults(name).fired() or [0]

    def _wait_overtaken(self) -> None:
        is_overtaken = lambda: self._num_overtaken() > self._num_before  # noqa: E731
        wait_until(is_overtaken, 5, "it was late, and nothing came before it")

    def _num_overtaken(self) -> int:
        """Return how often a message was heard after the one behind it, as the logs have it."""
        names = (self._router, *self._cluster.pools)
        return sum(self._cluster.log(name).count("fault=reorder overtaken") for name in names)

    def _num_passed(self, point: Point) -> int:
        return sum(self._cluster.faults(n).passed(point.value) for n in self._of(Role.DECODE))

    def _wait_held(self, names: list[str]) -> str:
        found: list[str] = []

        def is_held() -> bool:
            found[:] = [name for name in names if self._fired(name)[0]]
            return bool(found)

        try:
            wait_until(is_held, 10, "it did not come to stand still")
        except AssertionError as error:
            raise NotEntered("the victim took another way") from error
        return found[0]

    def _of(self, role: Role | None) -> list[str]:
        if role is None:
            return [self._router]
        return [name for name, pool in self._cluster.pools.items() if pool.role is role]


def _held(hold: Hold) -> wire.Fault:
    return fault(Verb.HOLD.value, hold.point.value, nth=hold.nth, peer=hold.peer)


def _broken(cell: Cell, **options) -> wire.Fault:
    row = cell.row
    if row.verb is Verb.DELAY:
        options["seconds"] = _DELAY_S
    return fault(row.verb.value, row.point.value, peer=row.peer, **options)
