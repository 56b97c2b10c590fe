"""``cancel``: streams that are left at random moments, and how soon both workers have let go.

A round starts 16 streams at once and leaves each of them after a random time: in a queue, while
its prompt is computed or moved, or while it decodes. HTTP clients close their connection, gRPC
clients cancel their call. All the while the control plane is asked which grants the workers hold.

A stream is *late* for as long as more grants are held than streams are left to hold one; the value
is the longest that any was, reports and looking included. *Lost* is what the routers did not count
as aborted.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.errors import EngineFault, PdserveError
from deploy.bench.report import Bar, Row
from deploy.bench.site import prompt_ids
from deploy.bench.victims import Victims, wait_until
from deploy.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deploy.bench.site import Doors, Site

NAME = "cancel"
_LATE = Bar(subject="value", relation="<=", limit=1.0)
_LOST = Bar(subject="value", relation="<=", limit=0.0)
_QUIET_S = 10.0
_CALL_TIMEOUT_S = 60.0
_LOOK_S = 0.02
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
        with closing(site.progress(f"{NAME} {door}", size.num_rounds, "round")) as bar:
            cancelling = _Cancelling(doors, size, leave)
            before = _num_aborted(doors)
            rounds = []
            for number in range(size.num_rounds):
                rounds.append(cancelling.run(random.Random(f"{door} {number}")))
                bar.update()
        num_left = sum(len(each.left) for each in rounds)
        rows += _rows(door, rounds, num_left, lost=num_left - (_num_aborted(doors) - before))
    return rows


def _rows(door: str, rounds: Sequence[_Round], num_left: int, *, lost: float) -> list[Row]:
    latest = [each.latest_s for each in rounds]
    usual = statistics.median(latest)
    late = Row(
        name=NAME, what=f"{door}: latest of {num_left} streams to leave both workers, vs usual",
        value=max(latest), unit="s", reference=usual, ratio=max(latest) / max(usual, 1e-3),
        bar=_LATE,
    )  # fmt: skip
    count = Row(
        name=NAME, what=f"{door}: lost of {num_left} streams", value=lost, unit="streams",
        reference=float(num_left), ratio=lost / num_left, bar=_LOST,
    )  # fmt: skip
    return [late, count]


class _Cancelling:
    def __init__(
        self, doors: Doors, size: CancelSize, leave: Callable[[Doors, _Stream], None]
    ) -> None:
        self._doors = doors
        self._size = size
        self._leave = leave
        self._cluster = Victims(doors)

    def run(self, draw: random.Random) -> _Round:
        """Run one round; returns when the cluster is idle again."""
        wait_until(lambda: self._num_held() == 0, _QUIET_S, "work went on")
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
        until = time.monotonic() + _CALL_TIMEOUT_S
        while self._look(seen) or any(thread.is_alive() for thread in threads):
            if time.monotonic() > until:
                raise PdserveError("work goes on after its clients have left", stage="bench")
            time.sleep(_LOOK_S)
        if seen.failures:
            raise EngineFault(f"a stream was not left but ended: {seen.failures[0]}", stage="bench")
        return seen

    def _run_one(self, stream: _Stream, seen: _Round) -> None:
        try:
            self._leave(self._doors, stream)
        except (PdserveError, httpx.HTTPError) as error:
            seen.failures.append(str(error))
        seen.left.append(stream.left_at)

    def _look(self, seen: _Round) -> int:
        asked_at, held = time.monotonic(), self._num_held()
        seen.held.append((asked_at, held))
        return held

    def _num_held(self) -> int:
        view = self._cluster.view()
        if view is None:
            raise PdserveError("the control plane does not answer", stage="bench")
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


def _leave_http(doors: Doors, stream: _Stream) -> None:
    """Read a stream until its time has come, and close the connection."""
    body = {
        "prompt": stream.prompt, "max_tokens": stream.max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    until = time.monotonic() + stream.leave_after_s
    with httpx.Client(timeout=_CALL_TIMEOUT_S) as client:
        request = client.build_request("POST", f"{doors.http}/v1/completions", json=body)
        # The answer begins with its first token; whoever leaves before has no patience for it.
        request.extensions["timeout"]["read"] = max(stream.leave_after_s, 1e-3)
        try:
            response = client.send(request, stream=True)
            for _ in response.iter_raw():
                if stream.is_over(until):
                    return
        except httpx.ReadTimeout:
            stream.left_at = time.monotonic()
            return
    raise EngineFault("it ended by itself", stage="bench")


def _leave_grpc(doors: Doors, stream: _Stream) -> None:
    """Read a stream until its time has come, and cancel the call."""
    until = time.monotonic() + stream.leave_after_s
    with Client(doors.grpc) as client:
        pieces: Iterator[object] = client.generate(
            prompt=stream.prompt, max_tokens=stream.max_tokens, temperature=0.0, ignore_eos=True
        )
        timer = threading.Timer(stream.leave_after_s, client.close)
        timer.start()  # also where no piece comes before
        try:
            for _ in pieces:
                if stream.is_over(until):
                    return
        except (PdserveError, ValueError):  # gRPC's own word for a channel that is closed
            stream.left_at = min(time.monotonic(), until)
            return
        finally:
            timer.cancel()
    raise EngineFault("it ended by itself", stage="bench")


def _num_aborted(doors: Doors) -> float:
    """Return what all routers together have counted; any of them answers a new connection."""
    wanted, counts = doors.config.router.replicas, dict[str, float]()
    until = time.monotonic() + _QUIET_S
    while len(counts) < wanted and time.monotonic() < until:
        text = httpx.get(f"{doors.http}/metrics").text
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
        router = next(s.labels["router"] for s in samples if "router" in s.labels)
        counts[router] = sum(s.value for s in samples if s.name == _ABORTED)
    if len(counts) < wanted:
        raise PdserveError(f"{len(counts)} of {wanted} routers told their metrics", stage="bench")
    return sum(counts.values())
