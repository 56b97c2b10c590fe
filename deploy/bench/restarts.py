"""``restarts``: a worker that dies fifty times under load, and what that leaves in the others.

Two clients call one after another all the time, in a cluster of one prefill and one decode worker.
Fifty times each, ``kill -9`` ends a worker and its host replaces it. When the new one is alive and
the router says that it is ready, one more call is made: the first request after ready. *Normal* is
the median call before the first kill.

What the survivors hold is looked at when five restarts are through and after the last: the control
plane, the routers and the worker that is never killed. Links and their process groups are two
descriptors and a thread or more each, so one that was left behind would show fifty times.
"""

from __future__ import annotations

import random
import statistics
import threading
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from cluster.config import Role
from deploy.bench import victims
from deploy.bench.load import Ask, Load, one_call
from deploy.bench.report import Bar, Row, percentile
from deploy.bench.victims import Footprint, Victims
from deploy.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable

    from deploy.bench.site import Doors, Site

NAME = "restarts"
_FILES = Bar(subject="value", relation="<=", limit=8.0)
"""Connections of clients come and go."""
_THREADS = Bar(subject="value", relation="<=", limit=4.0)
_MEMORY = Bar(subject="value", relation="<=", limit=32.0)
"""Two staging buffers: at a look, that of the last dead link may not be given back yet."""
_NONE = Bar(subject="value", relation="<=", limit=0.0)
_FIRST = Bar(subject="value", relation="<=", limit=1.0)
_HELD: tuple[tuple[str, str, Bar, Callable[[Footprint], float]], ...] = (
    ("descriptors", "files", _FILES, lambda held: float(held.num_files)),
    ("threads", "threads", _THREADS, lambda held: float(held.num_threads)),
    ("memory", "MiB", _MEMORY, lambda held: held.memory_bytes / 2**20),
)
_WAIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartsSize:
    """How much is measured; the default is what the bars speak of."""

    num_restarts: int = 50
    num_warm: int = 5
    """Restarts before the survivors are looked at first."""
    num_clients: int = 2
    num_normal: int = 40
    """Calls before the first kill."""
    replace_s: float = 60.0
    quiet_s: float = 2.0
    """How long links and legs of the dead may take to be cleared away."""
    ask: Ask = field(default_factory=Ask)


def measure(site: Site, doors: Doors, size: RestartsSize | None = None) -> list[Row]:
    """Restart each kind of worker; raises PdserveError where one does not come back."""
    size = size or RestartsSize()
    rows = []
    for role in (Role.PREFILL, Role.DECODE):
        progress = site.progress(f"{NAME} {role.value}", size.num_restarts, "restart")
        with closing(progress) as bar:
            rows += _Restarts(doors, size, role, bar.update).measure()
    return rows


@dataclass(frozen=True, slots=True)
class _Grown:
    """What one survivor held at both looks."""

    name: str
    before: Footprint
    after: Footprint


class _Restarts:
    def __init__(
        self, doors: Doors, size: RestartsSize, role: Role, on_restart: Callable[[], object]
    ) -> None:
        self._doors = doors
        self._size = size
        self._role = role
        self._on_restart = on_restart
        self._victims = Victims(doors)
        self._firsts: list[float] = []
        self._num_failed = 0

    def measure(self) -> list[Row]:
        size = self._size
        self._victims.wait_whole(size.replace_s)
        with (
            Load(self._doors, num_clients=size.num_clients, ask=size.ask) as load,
            Client(self._doors.grpc) as client,
        ):
            load.wait_calls(size.num_normal, _WAIT_S)
            normal_s = statistics.median(call.seconds for call in load.calls if not call.error)
            survivors = self._survivors()
            for _ in range(size.num_warm):
                self._restart(client)
            before = self._look(survivors)
            self._firsts.clear()
            for _ in range(size.num_restarts - size.num_warm):
                self._restart(client)
            after = self._look(survivors)
        grown = [_Grown(name, before[name], after[name]) for name in survivors]
        return [*self._first(normal_s), *self._held(grown)]

    def _survivors(self) -> dict[str, int]:
        """Name everybody who is never killed, with his pid."""
        pids = {"control plane": self._victims.control_pid()}
        for index, pid in enumerate(self._victims.router_pids()):
            pids[f"router {index}"] = pid
        for worker in self._victims.workers():
            if worker.worker.role is not self._role:
                pids[f"{worker.worker.role.value} worker"] = worker.worker.pid
        return pids

    def _restart(self, client: Client) -> None:
        dead = self._victims.first(self._role)
        victims.kill(dead.worker.pid)
        self._victims.wait_heir(dead, self._size.replace_s)
        self._victims.wait_ready(self._size.replace_s)
        first = one_call(client, self._size.ask, random.Random(len(self._firsts)))
        self._firsts.append(first.seconds)
        self._num_failed += bool(first.error)
        self._on_restart()

    def _look(self, survivors: dict[str, int]) -> dict[str, Footprint]:
        threading.Event().wait(self._size.quiet_s)
        return {name: Footprint.of(pid) for name, pid in survivors.items()}

    def _first(self, normal_s: float) -> list[Row]:
        late_s = percentile(self._firsts, 95) - normal_s
        what = f"{self._role.value}: first request after ready"
        late = Row(
            name=NAME, what=f"{what}, p95 above normal", value=late_s, unit="s",
            reference=normal_s, ratio=(late_s + normal_s) / normal_s, bar=_FIRST,
        )  # fmt: skip
        num_calls = float(self._size.num_restarts)
        failed = Row(
            name=NAME, what=f"{what}, failed", value=float(self._num_failed), unit="calls",
            reference=num_calls, ratio=self._num_failed / num_calls, bar=_NONE,
        )  # fmt: skip
        return [late, failed]

    def _held(self, grown: list[_Grown]) -> list[Row]:
        """Return the survivor that grew most, by kind of thing."""
        rows = []
        for what, unit, bar, count in _HELD:
            most = max(grown, key=partial(_growth, count))
            was, now = count(most.before), count(most.after)
            text = f"{self._role.value}: {what} of a survivor grew most in the {most.name} by"
            row = Row(
                name=NAME, what=text, value=now - was, unit=unit, reference=was, ratio=now / was,
                bar=bar,
            )  # fmt: skip
            rows.append(row)
        return rows


def _growth(count: Callable[[Footprint], float], one: _Grown) -> float:
    return count(one.after) - count(one.before)
