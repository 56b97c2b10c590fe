"""``fault-table``: what clients see when a process of the cluster dies or stops under load.

Eight clients call one after another, 100 times each at least and until the cluster is whole again.
Once each has been served twenty times, one process gets ``kill -9``, or is stopped for ten seconds
where that is said; whoever hosts the cluster replaces what died. A call has failed unless every
token came and is what the prompt gives undisturbed, as ``answers`` has it. *p50 after* is of the
good calls that began five seconds or more after the fault and ended before the replacement was
there; where it came sooner, of all that began so late, and the row says so.
*Replaced* is when the new worker has got its first leg. With one worker of each kind a call may
fail where nobody was left who could serve it: between the death of the only decode worker and its
replacement, and never at the death of the prefill worker, as decode workers prefill, too. Each
failure says that one may try again, or that the deadline passed, and at which stage. The eight have
calls under way then, which wait for the replacement; so others call meanwhile, with half a second
for each call, and are refused by name. *Workers declared dead* is the control plane's own count: a
worker that is declared dead and lives comes back under its old name.

Each fault is a scenario that can be run alone, by its name: ``fault-table/2p2d-decode``.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING

from cluster.config import Role
from cluster.errors import BY_CODE, PdserveError
from deploy.bench import victims
from deploy.bench.load import Ask, Call, Load, failures, p50_s
from deploy.bench.report import Bar, Row
from deploy.bench.victims import Victims

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.control.facts import WorkerView
    from deploy.bench.site import Doors, Site

NAME = "fault-table"
_NONE = Bar(subject="value", relation="<=", limit=0.0)
_P50 = Bar(subject="ratio", relation="<=", limit=1.5)
_ALL = Bar(subject="ratio", relation=">=", limit=1.0)
_REPLACED = Bar(subject="value", relation="<=", limit=20.0)
_WAIT_S = 600.0
_WRONG = "wrong_token"
_GAP_CLIENTS, _GAP_S = 2, 0.5
"""Who calls while the only decode worker is away, and how long each call has."""
_IN_A_WHILE = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
SINGLE = ("1p1d-prefill", "1p1d-decode")
"""Scenarios with one worker of each kind: what nobody can serve fails by name."""
SPARE = ("2p2d-prefill", "2p2d-decode", "2p2d-control-killed", "2p2d-control-paused")
"""Scenarios with two of each: nobody may notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTableSize:
    """How much is measured; the default is what the bars speak of."""

    num_clients: int = 8
    num_calls: int = 100
    """Of each client at least."""
    num_before: int = 20
    """Of them before the fault."""
    settle_s: float = 5.0
    after_s: float = 3.0
    """Calls go on for so long beyond ``settle_s`` and the replacement."""
    pause_s: float = 10.0
    replace_s: float = 60.0
    """When a replacement, or its first leg, is given up."""
    ask: Ask = field(default_factory=lambda: Ask(num_prompt_tokens=128))
    """Long enough to be handed over: no decode worker prefills it because that is cheaper."""


def measure(
    site: Site, doors: Doors, *, scenario: str, size: FaultTableSize | None = None
) -> list[Row]:
    """Play one of ``SINGLE`` on one worker of each kind, or one of ``SPARE`` on two of each."""
    shape = "1P+1D" if scenario in SINGLE else "2P+2D"
    table = _Table(site, doors, shape, size or FaultTableSize())
    return _SCENARIOS[scenario.partition("-")[2]](table)


@dataclass(frozen=True, slots=True)
class _Story:
    """One fault: what the clients met, when it happened and when it was repaired."""

    calls: list[Call]
    began: float
    at: float
    repaired: float


class _Table:
    def __init__(self, site: Site, doors: Doors, shape: str, size: FaultTableSize) -> None:
        self._site = site
        self._doors = doors
        self._shape = shape
        self._size = size
        self._victims = Victims(doors)

    def prefill_killed(self) -> list[Row]:
        """Kill the first prefill worker."""
        return self._worker_killed(Role.PREFILL)

    def decode_killed(self) -> list[Row]:
        """Kill the first decode worker."""
        return self._worker_killed(Role.DECODE)

    def control_killed(self) -> list[Row]:
        """Kill the control plane."""

        def strike() -> tuple[float, float]:
            killed_at = victims.kill(self._victims.control_pid())
            self._victims.wait_whole(self._size.replace_s)
            return killed_at, time.monotonic()

        return self._control("kill -9 of the control plane", strike, is_another=True)

    def control_paused(self) -> list[Row]:
        """Stop the control plane, and let it go on."""

        def strike() -> tuple[float, float]:
            with victims.paused(self._victims.control_pid()) as stopped_at:
                threading.Event().wait(self._size.pause_s)
            self._victims.wait_whole(self._size.replace_s)
            return stopped_at, time.monotonic()

        what = f"control plane stopped {self._size.pause_s:g} s"
        return self._control(what, strike, is_another=False)

    # ---- inside

    def _worker_killed(self, role: Role) -> list[Row]:
        is_spare = self._shape == "2P+2D"
        is_gap = role is Role.DECODE and not is_spare
        meanwhile: list[Call] = []

        def strike() -> tuple[float, float]:
            dead = self._victims.first(role)
            killed_at = victims.kill(dead.worker.pid)
            if not is_gap:
                return killed_at, self._replaced_at(dead)
            ask = replace(self._size.ask, timeout_s=_GAP_S)
            with Load(self._doors, num_clients=_GAP_CLIENTS, ask=ask) as load:
                replaced_at = self._replaced_at(dead)
            meanwhile.extend(load.calls)
            return killed_at, replaced_at

        story = self._tell(f"{role.value} killed", strike)
        meanwhile[:] = self._marked(meanwhile)
        what = f"{self._shape}, kill -9 of a {role.value} worker"
        rows = [
            self._failed(story, what, _NONE if is_spare else None),
            self._servable(story, what, role),
            self._untyped([*story.calls, *meanwhile], what),
            self._row(f"{what}: replaced", story.repaired - story.at, "s", bar=_REPLACED),
        ]
        if is_gap:
            rows.append(self._told(meanwhile, what))
        return [*rows, *self._p50(story, what)] if is_spare else rows

    def _control(
        self, what: str, strike: Callable[[], tuple[float, float]], *, is_another: bool
    ) -> list[Row]:
        """``is_another``: the one after the fault has no counts of before."""
        self._victims.wait_whole(self._size.replace_s)
        before = 0.0 if is_another else self._victims.num_declared_dead()
        story = self._tell(what, strike)
        num_dead = self._victims.num_declared_dead() - before
        what = f"{self._shape}, {what}"
        num_again = sum(call.num_attempts > 1 for call in story.calls)
        return [
            self._failed(story, what, _NONE),
            self._row(f"{what}: workers declared dead", num_dead, "workers", bar=_NONE),
            self._row(f"{what}: calls that began anew elsewhere", num_again, "calls", bar=_NONE),
        ]

    def _tell(self, what: str, strike: Callable[[], tuple[float, float]]) -> _Story:
        """Run the clients round one fault."""
        size = self._size
        num_calls = size.num_clients * size.num_calls
        self._victims.wait_whole(size.replace_s)
        progress = self._site.progress(f"{NAME} {self._shape} {what}", num_calls, "call")
        with (
            closing(progress) as bar,
            Load(
                self._doors, num_clients=size.num_clients, ask=size.ask, on_call=bar.update
            ) as load,
        ):
            # The first calls open connections and links: they say nothing of the usual.
            load.wait_calls(2 * size.num_clients, _WAIT_S)
            began = time.monotonic()
            load.wait_calls(size.num_clients * size.num_before, _WAIT_S)
            at, repaired = strike()
            load.wait_calls(num_calls, _WAIT_S)
            rest_s = max(at + size.settle_s, repaired) + size.after_s - time.monotonic()
            threading.Event().wait(max(0.0, rest_s))
            victims.wait_until(
                lambda: p50_s(load.calls, at + size.settle_s, math.inf) is not None,
                _WAIT_S,
                "no good call after the fault",
            )
        story = _Story(self._marked(load.calls), began, at, repaired)
        _tell_failures(story)
        return story

    def _marked(self, calls: list[Call]) -> list[Call]:
        """Return the calls; those that got a wrong token have failed, and none of them may."""
        from deploy.bench.answers import AnswerKey  # loads torch, which no client is to wait for

        key = AnswerKey(self._site.folder, self._doors.config)
        marked = []
        with closing(self._site.progress(f"{NAME} answers", len(calls), "answer")) as bar:
            for call in calls:
                at = None if call.error else key.wrong_at(call.prompt_ids, call.output_ids)
                why = f"token {at} is not what the model gives"
                wrong = replace(call, error=_WRONG, reason=why, is_typed=False)
                marked.append(call if at is None else wrong)
                bar.update()
        return marked

    def _replaced_at(self, dead: WorkerView) -> float:
        """Wait for the heir's first leg."""
        heir = self._victims.wait_heir(dead, self._size.replace_s)

        def serves() -> bool:
            counters = (
                w.report.counters
                for w in self._victims.workers()
                if w.worker.incarnation == heir.worker.incarnation
            )
            return any(each.get("legs_received", 0) > 0 for each in counters)

        victims.wait_until(serves, self._size.replace_s, "the replacement serves nobody")
        return time.monotonic()

    def _failed(self, story: _Story, what: str, bar: Bar | None) -> Row:
        failed = failures(story.calls)
        detail = ", ".join(f"{count} {code}" for code, count in failed.items())
        text = f"{what}: failed of {len(story.calls)}{f' ({detail})' if detail else ''}"
        return self._row(text, sum(failed.values()), "calls", float(len(story.calls)), bar)

    def _servable(self, story: _Story, what: str, role: Role) -> Row:
        """Count the failed calls that one of the others, or the replacement, could have served."""
        is_spare = self._shape == "2P+2D"
        failed = [call for call in story.calls if call.error]
        if role is Role.DECODE and not is_spare:
            failed = [c for c in failed if not story.at <= c.ended <= story.repaired]
        return self._row(f"{what}: failed and could be served", len(failed), "calls", bar=_NONE)

    def _untyped(self, calls: list[Call], what: str) -> Row:
        untyped = sum(not call.is_typed for call in calls)
        return self._row(f"{what}: failed without a reason", untyped, "calls", bar=_NONE)

    def _told(self, meanwhile: list[Call], what: str) -> Row:
        """Count who was told to come back, of those who came when nobody was there."""
        refused = [call for call in meanwhile if call.error]
        told = sum(
            call.is_typed and BY_CODE[call.error].http_status in _IN_A_WHILE for call in refused
        )
        text = f"{what}: refused meanwhile as 503 or 504 with its stage, of {len(refused)}"
        return self._row(text, told, "calls", float(max(1, len(refused))), _ALL)

    def _p50(self, story: _Story, what: str) -> list[Row]:
        before = p50_s(story.calls, story.began, story.at)
        since, end = story.at + self._size.settle_s, max(call.ended for call in story.calls)
        after = p50_s(story.calls, since, story.repaired)
        is_with_heir = after is None
        if is_with_heir:
            after = p50_s(story.calls, since, end)
        if before is None or after is None:
            raise PdserveError(f"{what}: no good call to take the p50 of", stage="bench")
        whose = "the replacement's among them" if is_with_heir else "the survivors' alone"
        text = f"{what}: p50 from {self._size.settle_s:g} s after on, {whose}, vs before"
        return [self._row(text, after * 1e3, "ms", before * 1e3, _P50)]

    def _row(
        self, what: str, value: float, unit: str, reference: float = 1.0, bar: Bar | None = None
    ) -> Row:
        return Row(
            name=NAME,
            what=what,
            value=float(value),
            unit=unit,
            reference=reference,
            ratio=value / reference,
            bar=bar,
        )


def _tell_failures(story: _Story) -> None:
    """Say on standard error what the table has no room for."""
    for call in story.calls:
        if call.error:
            times = (
                f"{call.started - story.at:.2f} to {call.ended - story.at:.2f} s after the fault"
            )
            sys.stderr.write(f"\n{NAME}: a call failed, {times}: {call.error}: {call.reason}")


_SCENARIOS: dict[str, Callable[[_Table], list[Row]]] = {
    "prefill": _Table.prefill_killed,
    "decode": _Table.decode_killed,
    "control-killed": _Table.control_killed,
    "control-paused": _Table.control_paused,
}
