"""``cancel``: streams that are left at random moments, and how soon both workers have let go.

A round starts 16 streams at once and leaves each of them after a random time: in a queue, while
its prompt is computed or moved, or while it decodes. HTTP clients close their connection, gRPC
clients cancel their call. All the while the control plane is asked which grants the workers hold.

A stream is *late* for as long as more grants are held than streams are left to hold one; the value
is the longest that any was, reports and looking included. *Lost* is what the routers received and
did not count as aborted; a call that was cancelled before a byte of it was sent reaches no router.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.control.status import asking
from cluster.errors import EngineFault, PdserveError
from cluster.trust import ClusterToken
from deploy.bench.report import Bar, Row
from deploy.bench.site import prompt_ids
from deploy.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cluster.control.status import Ask
    from deploy.bench.site import Doors, Site

    Leave = Callable[[httpx.Client, Doors, "_Stream"], None]

NAME = "cancel"
_LATE = Bar(subject="value", relation="<=", limit=1.0)
_LOST = Bar(subject="value", relation="<=", limit=0.0)
_QUIET_S = 10.0
_ANSWER_S = 5.0
_CALL_TIMEOUT_S = 60.0
_LOOK_S = 0.02
_RECEIVED = "pdserve_requests_received_total"
_ABORTED = "pdserve_requests_aborted_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelSize:
    """How much is measured; the default is what the bars speak of."""

    num_streams: int = 16
    num_rounds: int = 20
    spread_s: float = 4.0
    """Streams are left within so long after their start."""
    num_prompt_tokens: int = 256
    max_tokens: int = 1500
    """More than can come in that time."""


@dataclass(slots=True)
class _Round:
    """What was seen of one round; instants are this process's monotonic clock."""

    num_streams: int
    left: list[float] = field(default_factory=list)
    held: list[tuple[float, int]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def latest_s(self) -> float:
        """How long after its leaving some stream still held a grant at most."""
        longest = 0.0
        for number, left_at in enumerate(sorted(self.left), 1):
            over = [at for at, held in self.held if held > self.num_streams - number]
            longest = max(longest, max(over, default=left_at) - left_at)
        return longest


def measure(site: Site, doors: Doors, size: CancelSize | None = None) -> list[Row]:
    """Return two rows for each door; raises PdserveError where work goes on for ever."""
    size = size or CancelSize()
    rows = []
    for door, leave in (("HTTP", _leave_http), ("gRPC", _leave_grpc)):
        with (
            closing(site.progress(f"{NAME} {door}", size.num_rounds, "round")) as bar,
            httpx.Client(timeout=_CALL_TIMEOUT_S, trust_env=False) as http,
        ):
            cancelling = _Cancelling(http, doors, size, leave)
            before = _counts(doors)
            rounds = []
            for number in range(size.num_rounds):
                rounds.append(asyncio.run(cancelling.run(random.Random(f"{door} {number}"))))
                bar.update()
        rows += _rows(door, rounds, *_received_and_lost(doors, before))
    return rows


def _rows(door: str, rounds: Sequence[_Round], num_received: float, lost: float) -> list[Row]:
    num_left = sum(len(each.left) for each in rounds)
    if num_received < num_left / 2:
        reason = f"{num_received:.0f} of {num_left} streams reached a router"
        raise EngineFault(reason, stage="bench")
    latest = [each.latest_s for each in rounds]
    usual = statistics.median(latest)
    late = Row(
        name=NAME, what=f"{door}: latest of {num_left} streams to leave both workers, vs usual",
        value=max(latest), unit="s", reference=usual, ratio=max(latest) / max(usual, 1e-3),
        bar=_LATE,
    )  # fmt: skip
    count = Row(
        name=NAME, what=f"{door}: lost of {num_received:.0f} streams", value=lost, unit="streams",
        reference=num_received, ratio=lost / num_received, bar=_LOST,
    )  # fmt: skip
    return [late, count]


class _Cancelling:
    def __init__(self, http: httpx.Client, doors: Doors, size: CancelSize, leave: Leave) -> None:
        """``http`` is shared: each client that loads certificates takes the cluster's cores."""
        self._http = http
        self._doors = doors
        self._size = size
        self._leave = leave

    async def run(self, draw: random.Random) -> _Round:
        """Run one round; returns when the cluster is idle again."""
        endpoints = self._doors.config.endpoints
        token = ClusterToken.load(self._doors.config.security)
        async with asking(f"{endpoints.host}:{endpoints.control_port}", token) as ask:
            await self._until_idle(ask)
            seen, threads = self._start(draw)
            until = time.monotonic() + _CALL_TIMEOUT_S
            while await self._look(ask, seen) or any(thread.is_alive() for thread in threads):
                if time.monotonic() > until:
                    raise PdserveError("work goes on after its clients have left", stage="bench")
                await asyncio.sleep(_LOOK_S)
        if seen.failures:
            raise EngineFault(f"a stream was not left but ended: {seen.failures[0]}", stage="bench")
        return seen

    async def _until_idle(self, ask: Ask) -> None:
        until = time.monotonic() + _QUIET_S
        while await _num_held(ask):
            if time.monotonic() > until:
                raise PdserveError("work goes on from before", stage="bench")
            await asyncio.sleep(_LOOK_S)

    def _start(self, draw: random.Random) -> tuple[_Round, list[threading.Thread]]:
        size = self._size
        seen = _Round(size.num_streams)
        streams = [
            _Stream(
                prompt=prompt_ids(size.num_prompt_tokens, draw),
                max_tokens=size.max_tokens,
                leave_after_s=draw.uniform(0.0, size.spread_s),
            )
            for _ in range(size.num_streams)
        ]
        threads = [
            threading.Thread(target=self._run_one, args=(stream, seen), daemon=True)
            for stream in streams
        ]
        for thread in threads:
            thread.start()
        return seen, threads

    def _run_one(self, stream: _Stream, seen: _Round) -> None:
        try:
            self._leave(self._http, self._doors, stream)
        except (PdserveError, httpx.HTTPError) as error:
            seen.failures.append(str(error))
        seen.left.append(stream.left_at)

    async def _look(self, ask: Ask, seen: _Round) -> int:
        asked_at, held = time.monotonic(), await _num_held(ask)
        seen.held.append((asked_at, held))
        return held


async def _num_held(ask: Ask) -> int:
    view = await ask(_ANSWER_S)
    return len({grant for worker in view.workers for grant in worker.report.held_grants})


@dataclass(slots=True)
class _Stream:
    prompt: list[int]
    max_tokens: int
    leave_after_s: float
    left_at: float = 0.0

    def is_over(self, until: float) -> bool:
        """Whether it is time to leave; notes when."""
        self.left_at = time.monotonic()
        return self.left_at >= until


def _leave_http(http: httpx.Client, doors: Doors, stream: _Stream) -> None:
    """Read a stream until its time has come, and close the connection."""
    body = {
        "prompt": stream.prompt, "max_tokens": stream.max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    until = time.monotonic() + stream.leave_after_s
    request = http.build_request("POST", f"{doors.http}/v1/completions", json=body)
    # The answer begins with its first token; whoever leaves before has no patience for it.
    request.extensions["timeout"]["read"] = max(stream.leave_after_s, 1e-3)
    try:
        with closing(http.send(request, stream=True)) as response:
            for _ in response.iter_raw():
                if stream.is_over(until):
                    return
    except httpx.ReadTimeout:
        stream.left_at = time.monotonic()
        return
    raise EngineFault("it ended by itself", stage="bench")


def _leave_grpc(_: httpx.Client, doors: Doors, stream: _Stream) -> None:
    """Read a stream until its time has come, and cancel the call."""
    until = time.monotonic() + stream.leave_after_s
    with Client(doors.grpc) as client:
        pieces: Iterator[object] = client.generate(
            prompt=stream.prompt, max_tokens=stream.max_tokens, temperature=0.0, ignore_eos=True
        )
        timer = threading.Timer(stream.leave_after_s, client.close)
        timer.start()  # also where no piece comes before
        try:
            for _piece in pieces:
                if stream.is_over(until):
                    return
        except (PdserveError, ValueError):  # gRPC's own word for a channel that is closed
            stream.left_at = min(time.monotonic(), until)
            return
        finally:
            timer.cancel()
    raise EngineFault("it ended by itself", stage="bench")


def _received_and_lost(doors: Doors, before: Counter[str]) -> tuple[float, float]:
    """Return what reached the routers since, and what of it they have not aborted in the end."""
    until = time.monotonic() + _QUIET_S
    while True:
        now = _counts(doors)
        received = now[_RECEIVED] - before[_RECEIVED]
        lost = received - (now[_ABORTED] - before[_ABORTED])
        if lost == 0 or time.monotonic() > until:
            return float(received), float(lost)
        time.sleep(_LOOK_S)


def _counts(doors: Doors) -> Counter[str]:
    """Return what all routers together have counted; any of them answers a new connection."""
    wanted, counts = doors.config.router.replicas, dict[str, Counter[str]]()
    until = time.monotonic() + _QUIET_S
    while len(counts) < wanted and time.monotonic() < until:
        text = httpx.get(f"{doors.http}/metrics", trust_env=False).text
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
        router = next(s.labels["router"] for s in samples if "router" in s.labels)
        counts[router] = Counter()
        for sample in samples:
            if sample.name in (_RECEIVED, _ABORTED):
                counts[router][sample.name] += int(sample.value)
    if len(counts) < wanted:
        raise PdserveError(f"{len(counts)} of {wanted} routers told their metrics", stage="bench")
    return sum(counts.values(), Counter())
