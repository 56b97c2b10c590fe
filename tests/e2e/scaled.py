"""A cluster whose pools grow and shrink, and the loads that make them: for tests of scaling."""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster import errors
from cluster.transport.faults import Point
from deploy.client import Client
from tests.e2e.plain_cluster import view_of, wait_until
from tests.e2e.process_cluster import Faults, fault
from tests.e2e.stalls import Stalls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.control.facts import WorkerView
    from tests.e2e.serve_watch import ServeWatch
    from tests.e2e.test_hardware_pools import Deployed

logger = logging.getLogger(__name__)

RAISED_S, READY_S = 10, 30
"""Issue 6: a burst raises the target within the first, and its workers are there within the
second."""
PATIENCE_S = 60
"""With whatever is bounded otherwise, or not at all."""
_DEADLINE_S = 300
"""Of a stream, which is longer than most loads last."""
_LINE = re.compile(r"pool=(\S+) workers=(\d+) before=(\d+): (.*)")
_ASKED = re.compile(r"(?P<half>\w+) is asked for (?P<asked>[\d.]+) .* of (?P<could>[\d.]+): ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Why a pool grew, as Serve's controller logs it."""

    half: str
    asked: float
    could: float
    text: str


class Streams:
    """Requests one after the other, on as many threads as are added, until they are let go."""

    def __init__(self, address: str, num_prompt_tokens: int, max_tokens: int) -> None:
        self._address = address
        self._asks = (num_prompt_tokens, max_tokens)
        self._numbers = itertools.count()
        self.num_ended = 0
        """Those that were served to their end."""
        self._threads: list[tuple[threading.Thread, threading.Event]] = []
        self._errors: list[errors.PdserveError] = []

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_) -> None:
        self.leave(len(self._threads))
        assert self._errors == []

    def add(self, count: int) -> float:
        """Begin with so many more; returns when."""
        began_at = time.monotonic()
        for _ in range(count):
            is_over = threading.Event()
            thread = threading.Thread(target=self._run, args=(is_over,), daemon=True)
            self._threads.append((thread, is_over))
            thread.start()
        return began_at

    def leave(self, count: int) -> None:
        """Let go of so many, the oldest first; they hang up in mid-stream."""
        leaving, self._threads = self._threads[:count], self._threads[count:]
        for _, is_over in leaving:
            is_over.set()
        for thread, _ in leaving:
            thread.join(30)

    def _run(self, is_over: threading.Event) -> None:
        num_prompt_tokens, max_tokens = self._asks
        try:
            with Client(self._address) as client:
                while not is_over.is_set():
                    first = next(self._numbers)  # no two prompts begin alike
                    prompt = [40 + (first + 7 * i) % 400 for i in range(num_prompt_tokens)]
                    pieces = client.generate(
                        prompt_ids={"ids": prompt},
                        max_tokens=max_tokens,
                        ignore_eos=True,
                        timeout_s=_DEADLINE_S,
                    )
                    for _ in pieces:
                        if is_over.is_set():
                            break
                    else:
                        self.num_ended += 1
        except errors.PdserveError as error:
            self._errors.append(error)


class Pools:
    """The pools of one deployed cluster: their targets by Serve, their workers by our own view."""

    def __init__(
        self, cluster: Deployed, watch: ServeWatch, floor: Mapping[str, int], forgiven_s: float
    ) -> None:
        """``forgiven_s``: so much longer than elsewhere a start may take here."""
        self.cluster = cluster
        self._ready_s = READY_S + forgiven_s
        self._watch = watch
        self._floor = floor
        self._num_told = self._num_logged = 0

    @property
    def targets(self) -> dict[str, int]:
        """Those of now."""
        targets = self._watch.now.targets
        return {name: targets[name] for name in self._floor}

    @property
    def nodes(self) -> Mapping[str, int]:
        """How many there are now, by their accelerator."""
        return self._watch.now.nodes

    def begin(self) -> None:
        """Wait for the floor; what was told and logged until now is no more looked at."""
        wait_until(
            lambda: self._floor.keys() <= self._watch.now.targets.keys(), 30, "nothing is told"
        )
        self.wait_floor()
        self._num_told, self._num_logged = len(self._watch.told) - 1, 0
        self._num_logged = len(self._logged())

    def course(self, pool: str) -> list[int]:
        """Return a pool's targets since ``begin``, each once in a row."""
        told = [told.targets[pool] for told in self._watch.told[self._num_told :]]
        return [target for target, _ in itertools.groupby(told)]

    def workers(self, pool: str) -> list[WorkerView]:
        return [view for view in view_of(self.cluster).workers if view.worker.pool == pool]

    def streams(self, num_prompt_tokens: int, max_tokens: int) -> Streams:
        return Streams(self.cluster.grpc, num_prompt_tokens, max_tokens)

    def slow(self, pool: str, **delay: float) -> None:
        """Long steps, so that a load stands without this machine's help."""
        for view in self.workers(pool):
            faults = Faults(view.worker.address)
            faults.set(fault("delay", Point.STEP.value, times=0, **delay))
            faults.close()

    def unslow(self) -> None:
        """Steps are as they were."""
        for view in view_of(self.cluster).workers:
            faults = Faults(view.worker.address)
            faults.clear()
            faults.close()

    def wait_running(self, count: int, *pools: str) -> None:
        """Wait until so many sequences run on these, and some on each of their workers."""

        def run() -> bool:
            running = [each.report.num_running for name in pools for each in self.workers(name)]
            return all(running) and sum(running) == count

        wait_until(run, PATIENCE_S, f"not {count} sequences on {pools}", pace_s=0.1)

    def wait_target(self, pool: str, count: int) -> float:
        """Wait until a pool is asked for so many workers; returns since when it is."""
        wait_until(
            lambda: self.targets[pool] == count, PATIENCE_S, f"{pool} has no target of {count}"
        )
        last = itertools.takewhile(
            lambda told: told.targets.get(pool) == count, reversed(self._watch.told)
        )
        return min(told.at for told in last)

    def wait_grown(self, pool: str, count: int, burst_at: float) -> Growth:
        """Wait until a pool is asked for so many workers and they are there, both as soon after the
        burst as they have to be; returns why.
        """
        with Stalls() as stalls:
            raised_s = self.wait_target(pool, count) - burst_at
            wait_until(
                lambda: len(self.workers(pool)) == count, PATIENCE_S, f"{pool} is not ready",
                pace_s=0.2,
            )  # fmt: skip
            ready_s = time.monotonic() - burst_at
        text = next(each[3] for each in reversed(self._logged()) if each[:2] == (pool, f"{count}"))
        logger.info("%s=%d after %.1f s, ready %.1f s: %s", pool, count, raised_s, ready_s, text)
        assert raised_s <= RAISED_S + stalls.longest_s, f"{pool}={count} after {raised_s:.1f} s"
        assert ready_s <= self._ready_s + stalls.longest_s, f"{pool} is ready after {ready_s:.1f} s"
        found = _ASKED.match(text)
        assert found, text
        asked, could = float(found["asked"]), float(found["could"])
        return Growth(half=found["half"], asked=asked, could=could, text=text)

    def wait_floor(self, quiet_at: float | None = None) -> float:
        """Wait until the load is forgotten; returns for how long there was none by then."""
        began = time.monotonic() if quiet_at is None else quiet_at
        wait_until(lambda: self.targets == self._floor, PATIENCE_S, "not back at the floor")
        took_s = time.monotonic() - began
        num_workers = sum(self._floor.values())
        wait_until(
            lambda: len(view_of(self.cluster).workers) == num_workers, PATIENCE_S,
            "they did not leave", pace_s=0.2,
        )  # fmt: skip
        logger.info("floor after %.1f s, left after %.1f s", took_s, time.monotonic() - began)
        return took_s

    def _logged(self) -> list[tuple[str, str, str, str]]:
        """Return each change's pool, target, target before, and why; of those since ``begin``."""
        return _LINE.findall(self.cluster.nodes.serve_log())[self._num_logged :]
