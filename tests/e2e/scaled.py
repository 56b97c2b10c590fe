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

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.control.facts import WorkerView
    from tests.e2e.serve_watch import ServeWatch
    from tests.e2e.test_hardware_pools import Deployed

logger = logging.getLogger(__name__)

RAISED_S, READY_S = 10, 30
"""Issue 6: a burst raises the target within the first, and its workers are there within the
second."""
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
        self._threads: list[tuple[threading.Thread, threading.Event]] = []
        self._errors: list[errors.PdserveError] = []

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_) -> None:
        self.leave(len(self._threads))
        assert self._errors == []

    def add(self, count: int) -> None:
        for _ in range(count):
            is_over = threading.Event()
            thread = threading.Thread(target=self._run, args=(is_over,), daemon=True)
            self._threads.append((thread, is_over))
            thread.start()

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
                        prompt_ids={"ids": prompt}, max_tokens=max_tokens, ignore_eos=True
                    )
                    for _ in pieces:
                        if is_over.is_set():
                            break
        except errors.PdserveError as error:
            self._errors.append(error)


class Pools:
    """The pools of one deployed cluster: their targets by Serve, their workers by our own view."""

    def __init__(self, cluster: Deployed, watch: ServeWatch, floor: Mapping[str, int]) -> None:
        self.cluster = cluster
        self._watch = watch
        self._floor = floor
        self._num_told = self._num_logged = 0

    @property
    def targets(self) -> dict[str, int]:
        """Those of now."""
        return {name: self._watch.targets[name] for name in self._floor}

    def begin(self) -> None:
        """Wait for the floor; what was told and logged until now is no more looked at."""
        wait_until(lambda: self._floor.keys() <= self._watch.targets.keys(), 30, "nothing is told")
        self.wait_floor()
        self._num_told, self._num_logged = len(self._watch.told) - 1, 0
        self._num_logged = len(self._logged())

    def course(self, pool: str) -> list[int]:
        """Return a pool's targets since ``begin``, each once in a row."""
        told = [targets[pool] for targets in self._watch.told[self._num_told :]]
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

        wait_until(run, 30, f"not {count} sequences on {pools}")

    def wait_target(self, pool: str, count: int, timeout_s: float) -> None:
        wait_until(
            lambda: self.targets[pool] == count, timeout_s, f"{pool} has no target of {count}"
        )

    def wait_raised(self, pool: str, count: int, timeout_s: float = RAISED_S) -> Growth:
        """Wait until a pool is asked for so many workers; returns why."""
        began = time.monotonic()
        self.wait_target(pool, count, timeout_s)
        text = next(each[3] for each in reversed(self._logged()) if each[:2] == (pool, f"{count}"))
        logger.info("%s=%d after %.1f s: %s", pool, count, time.monotonic() - began, text)
        found = _ASKED.match(text)
        assert found, text
        asked, could = float(found["asked"]), float(found["could"])
        return Growth(half=found["half"], asked=asked, could=could, text=text)

    def wait_ready(self, pool: str, count: int) -> None:
        began = time.monotonic()
        wait_until(lambda: len(self.workers(pool)) == count, READY_S, f"{pool} is not ready")
        logger.info("%s=%d ready after %.1f s", pool, count, time.monotonic() - began)

    def wait_grown(self, pool: str, count: int) -> Growth:
        """Both."""
        growth = self.wait_raised(pool, count)
        self.wait_ready(pool, count)
        return growth

    def wait_floor(self) -> float:
        """Wait until the load is forgotten; returns after how long the targets were down."""
        began = time.monotonic()
        wait_until(lambda: self.targets == self._floor, 60, "not back at the floor")
        took_s = time.monotonic() - began
        num_workers = sum(self._floor.values())
        wait_until(
            lambda: len(view_of(self.cluster).workers) == num_workers, 60, "they did not leave"
        )
        logger.info("floor after %.1f s, left after %.1f s", took_s, time.monotonic() - began)
        return took_s

    def _logged(self) -> list[tuple[str, str, str, str]]:
        """Return each change's pool, target, target before, and why; of those since ``begin``."""
        return _LINE.findall(self.cluster.nodes.serve_log())[self._num_logged :]
