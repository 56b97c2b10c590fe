"""``restarts``: a worker that dies fifty times under load, and what that leaves in the others.

First long prompts go through every block of every pool once: memory of a pool that was never
written is not there yet, and would look like growth. Then two clients call one after another all
the time, in a cluster of one prefill and one decode worker.
Fifty times each, ``kill -9`` ends a worker and its host replaces it. When the new one is alive and
the router says that it is ready, one more call is made: the first request after ready. *Normal* is
the median call before the first kill.

What the survivors hold is looked at after every restart: the control plane, the routers and the
worker that is never killed. *Grown* is the trend over those looks, times the number of restarts:
the median of all slopes between two looks, which buffers that come and go do not move, while a
link with its process group, two sockets and a thread at least, that was left behind by each restart
would show fifty times.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.errors import PdserveError
from deploy.bench import victims
from deploy.bench.load import Ask, Load, one_call
from deploy.bench.report import Bar, Row, percentile
from deploy.bench.victims import Footprint, Victims
from deploy.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cluster.config import Role
    from deploy.bench.site import Doors, Site

NAME = "restarts"
_FEW = Bar(subject="value", relation="<=", limit=4.0)
_MEMORY = Bar(subject="value", relation="<=", limit=8.0)
"""Half a staging buffer, in all restarts together."""
_NONE = Bar(subject="value", relation="<=", limit=0.0)
_FIRST = Bar(subject="value", relation="<=", limit=1.0)
_HELD: tuple[tuple[str, str, Bar, Callable[[Footprint], float]], ...] = (
    ("descriptors", "files", _FEW, lambda held: float(held.num_files)),
    ("sockets of process groups and others", "sockets", _FEW, lambda held: float(held.num_sockets)),
    ("threads", "threads", _FEW, lambda held: float(held.num_threads)),
    ("memory", "MiB", _MEMORY, lambda held: held.memory_bytes / 2**20),
)
_WAIT_S = 120.0
_FILL_SHARE = 1.25
"""Of the largest pool's tokens; partly filled last blocks are given back before they are full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartsSize:
    """How much is measured; the default is what the bars speak of."""

    num_restarts: int = 50
    num_warm: int = 5
    """Restarts before the first look: what is held for good is held by then."""
    num_clients: int = 2
    num_normal: int = 40
    """Calls before the first kill."""
    fill: Ask = field(default_factory=lambda: Ask(num_prompt_tokens=512, max_tokens=2))
    """What goes through the pools before that."""
    replace_s: float = 60.0
    ask: Ask = field(default_factory=lambda: Ask(num_prompt_tokens=128))
    """Long enough to be handed over: no decode worker prefills it because that is cheaper."""


def measure(site: Site, doors: Doors, *, role: Role, size: RestartsSize | None = None) -> list[Row]:
    """Restart the worker of a role; raises PdserveError where it does not come back."""
    size = size or RestartsSize()
    progress = site.progress(f"{NAME} {role.value}", size.num_restarts, "restart")
    with closing(progress) as bar:
        return _Restarts(doors, size, role, bar.update).measure()


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
        self._looks: dict[str, list[Footprint]] = {}
        self._num_failed = 0

    def measure(self) -> list[Row]:
        size = self._size
        self._victims.wait_whole(size.replace_s)
        with Client(self._doors.grpc) as client:
            self._fill(client)
        with (
            Load(self._doors, num_clients=size.num_clients, ask=size.ask) as load,
            Client(self._doors.grpc) as client,
        ):
            load.wait_calls(size.num_normal, _WAIT_S)
            normal_s = statistics.median(call.seconds for call in load.calls if not call.error)
            survivors = self._survivors()
            for index in range(size.num_restarts):
                self._restart(client)
                if index >= size.num_warm:
                    for name, pid in survivors.items():
                        self._looks.setdefault(name, []).append(Footprint.of(pid))
        return [*self._first(normal_s), *self._held()]

    def _fill(self, client: Client) -> None:
        ask, draw = self._size.fill, random.Random(0)
        num_tokens = _FILL_SHARE * max(pool.kv_tokens for pool in self._doors.config.pools)
        for _ in range(round(num_tokens / ask.num_prompt_tokens)):
            call = one_call(client, ask, draw)
            if call.error:
                raise PdserveError(f"a call failed: {call.error}: {call.reason}", stage="bench")

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
        if first.error:
            self._num_failed += 1
            sys.stderr.write(f"\n{NAME}: a first request failed: {first.error}: {first.reason}")
        self._on_restart()

    def _first(self, normal_s: float) -> list[Row]:
        what = f"{self._role.value}: first request after ready"
        late = [
            Row(
                name=NAME, what=f"{what}, {which} above normal", value=late_s - normal_s, unit="s",
                reference=normal_s, ratio=late_s / normal_s, bar=_FIRST,
            )
            for which, late_s in (
                ("p95", percentile(self._firsts, 95)),
                ("slowest", max(self._firsts)),
            )
        ]  # fmt: skip
        num_calls = float(self._size.num_restarts)
        failed = Row(
            name=NAME, what=f"{what}, failed", value=float(self._num_failed), unit="calls",
            reference=num_calls, ratio=self._num_failed / num_calls, bar=_NONE,
        )  # fmt: skip
        return [*late, failed]

    def _held(self) -> list[Row]:
        """Return the survivor that grew most, by kind of thing."""
        rows = []
        for what, unit, bar, count in _HELD:
            held = {name: [count(look) for look in looks] for name, looks in self._looks.items()}
            for name, counts in held.items():
                series = " ".join(f"{each:.0f}" for each in counts)
                sys.stderr.write(f"\n{NAME} {self._role.value}: {what} of the {name}: {series}")
            grown = {name: slope(counts) * self._size.num_restarts for name, counts in held.items()}
            most = max(grown, key=lambda name: grown[name])
            was = statistics.median(held[most])
            row = Row(
                name=NAME,
                what=f"{self._role.value}: {what} of a survivor grew most in the {most} by",
                value=grown[most],
                unit=unit,
                reference=was,
                ratio=(was + grown[most]) / was,
                bar=bar,
            )
            rows.append(row)
        return rows


def slope(values: Sequence[float]) -> float:
    """Return the median slope between any two of at least two values, per step (Theil and Sen)."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median((after - before) / (j - i) for (i, before), (j, after) in pairs)
