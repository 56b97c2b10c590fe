"""``isolation``: what prompts that arrive back to back do to streams that are running.

Four streams decode. The load is two callers in a closed loop: each sends a 512-token prompt, takes
two tokens and sends the next, so that there is always one more prompt waiting. Two tokens, since
one alone would end at the prefill worker: so each prompt's KV goes through the handoff and joins
the streams' batch for a single step. A run is several rounds of quiet, load, quiet, each with fresh
streams, for a step takes longer as contexts grow, and so load and quiet meet the same ones. The
value is the p99 of all inter-token gaps of the streams that began under load, the reference the
median of those that began in quiet. Gaps are the gRPC client's, between messages that carry tokens;
the client shares the machine's two cores.

The bar is for the two-pool trial. Two colocated workers of one core each go through the same, in
the same call of the command but in a cluster of their own, for comparison.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from cluster.errors import EngineFault, PdserveError
from cluster.wire import public_v1_pb2 as pb
from deploy.bench.report import Bar, Row, Run, percentile, row_of
from deploy.bench.site import prompt_ids
from deploy.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deploy.bench.site import Doors, Site

NAME = "isolation"
_BAR = Bar(subject="ratio", relation="<=", limit=1.5)
_START_TIMEOUT_S = 60.0
_JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationSize:
    """How much is measured; the default is what the bar speaks of."""

    num_streams: int = 4
    stream_prompt_tokens: int = 64
    stream_max_tokens: int = 1800
    """More than a run can take: the streams are cancelled when it is over."""
    warm_up_tokens: int = 16
    """Of each stream, before anything is measured."""
    num_callers: int = 2
    prompt_tokens: int = 512
    num_rounds: int = 3
    """Of a run, each with streams of its own."""
    quiet_s: float = 2.0
    """Before the load, and again after it."""
    load_s: float = 5.0
    num_runs: int = 3


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a run, on the client's clock."""

    began: float
    ended: float


def measure_pools(site: Site, doors: Doors, size: IsolationSize | None = None) -> list[Row]:
    """Return the row of the two-pool trial."""
    return _measure(site, doors, "two pools", _BAR, size or IsolationSize())


def measure_colocated(site: Site, doors: Doors, size: IsolationSize | None = None) -> list[Row]:
    """Return the row of two colocated workers, which has no bar."""
    return _measure(site, doors, "two colocated workers", None, size or IsolationSize())


def _measure(
    site: Site, doors: Doors, title: str, held: Bar | None, size: IsolationSize
) -> list[Row]:
    draw = random.Random(2)
    runs, num_prompts = [], 0
    with contextlib.closing(site.progress(f"{NAME}, {title}", size.num_runs, "run")) as bar:
        for _ in range(size.num_runs):
            run, prompts = _run(doors, size, draw)
            runs.append(run)
            num_prompts += prompts
            bar.update()
    what = (
        f"{title}: gap p99 of {size.num_streams} streams beside {num_prompts} prompts of "
        f"{size.prompt_tokens} tokens, vs undisturbed median"
    )
    return [row_of(NAME, what, "ms", runs, held)]


def _run(doors: Doors, size: IsolationSize, draw: random.Random) -> tuple[Run, int]:
    """Return one run and the number of prompts that were served under load."""
    quiet: list[float] = []
    loaded: list[float] = []
    served = 0
    for _ in range(size.num_rounds):
        with _streams(doors, size, draw) as streams:
            before = _pass(size.quiet_s, streams)
            with _callers(doors, size, draw) as callers:
                load = _pass(size.load_s, [*streams, *callers])
            after = _pass(size.quiet_s, streams)
        served += sum(caller.served for caller in callers)
        arrivals = [stream.arrivals for stream in streams]
        quiet += gaps(arrivals, before) + gaps(arrivals, after)
        loaded += gaps(arrivals, load)
    if served == 0:
        raise EngineFault("no prompt was served under load", stage="bench")
    if min(len(quiet), len(loaded)) < 2:
        raise EngineFault("too few tokens came to tell of gaps", stage="bench")
    return Run(percentile(loaded, 99) * 1e3, statistics.median(quiet) * 1e3), served


def gaps(arrivals: Sequence[Sequence[float]], window: Window) -> list[float]:
    """Return the gaps of all streams that began in the window, however late they ended."""
    return [
        later - earlier
        for times in arrivals
        for earlier, later in pairwise(times)
        if window.began <= earlier < window.ended
    ]


class _Worker:
    """A client's thread that calls until it is told to stop; its error is kept for the bench."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.failed = threading.Event()
        self.error: PdserveError | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except PdserveError as error:
            self.error = error
            self.failed.set()

    def join(self) -> None:
        self._thread.join(_JOIN_TIMEOUT_S)

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class _Stream(_Worker):
    """One running stream and when its tokens came."""

    def __init__(self, client: Client, prompt: list[int], size: IsolationSize) -> None:
        self.arrivals: list[float] = []
        self.is_warm = threading.Event()
        self.stop = threading.Event()
        self._client, self._prompt, self._size = client, prompt, size
        super().__init__("stream", self._read)

    def _read(self) -> None:
        try:
            pieces = self._client.generate(
                prompt_ids=pb.TokenIds(ids=self._prompt),
                max_tokens=self._size.stream_max_tokens,
                temperature=0.0,
                ignore_eos=True,
            )
            for piece in pieces:
                if piece.token_ids:
                    self.arrivals.append(time.monotonic())
                if len(self.arrivals) >= self._size.warm_up_tokens:
                    self.is_warm.set()
                if self.stop.is_set():
                    return  # leaving the stream cancels it
            raise EngineFault("a stream ended before its run did", stage="bench")
        finally:
            self.is_warm.set()


class _Caller(_Worker):
    """Sends one prompt after another."""

    def __init__(
        self, client: Client, next_prompt: Callable[[], list[int]], stop: threading.Event
    ) -> None:
        self.served = 0
        self._client, self._next_prompt, self._stop = client, next_prompt, stop
        super().__init__("caller", self._call)

    def _call(self) -> None:
        while not self._stop.is_set():
            prompt = pb.TokenIds(ids=self._next_prompt())
            for _ in self._client.generate(
                prompt_ids=prompt, max_tokens=2, temperature=0.0, ignore_eos=True
            ):
                pass
            self.served += 1


@contextlib.contextmanager
def _streams(doors: Doors, size: IsolationSize, draw: random.Random) -> Iterator[list[_Stream]]:
    """Run the streams for the time of a ``with``; all of them are decoding when it begins."""
    with Client(doors.grpc) as client:
        streams = [
            _Stream(client, prompt_ids(size.stream_prompt_tokens, draw), size)
            for _ in range(size.num_streams)
        ]
        try:
            for stream in streams:
                if not stream.is_warm.wait(_START_TIMEOUT_S):
                    raise EngineFault("a stream did not start", stage="bench")
                stream.check()
            yield streams
        finally:
            for stream in streams:
                stream.stop.set()
            for stream in streams:
                stream.join()
    for stream in streams:
        stream.check()


@contextlib.contextmanager
def _callers(doors: Doors, size: IsolationSize, draw: random.Random) -> Iterator[list[_Caller]]:
    """Run the load for the time of a ``with``; its last prompts are served before it ends."""
    stop, lock = threading.Event(), threading.Lock()

    def next_prompt() -> list[int]:
        with lock:
            return prompt_ids(size.prompt_tokens, draw)

    with Client(doors.grpc) as client:
        callers = [_Caller(client, next_prompt, stop) for _ in range(size.num_callers)]
        try:
            yield callers
        finally:
            stop.set()
            for caller in callers:
                caller.join()
    for caller in callers:
        caller.check()


def _pass(seconds: float, workers: Sequence[_Worker]) -> Window:
    """Let time pass and return the window; raises what a client's thread met meanwhile."""
    began = time.monotonic()
    ended = began + seconds
    while (left_s := ended - time.monotonic()) > 0:
        for worker in workers:
            worker.check()
        workers[0].failed.wait(min(left_s, 0.5))
    return Window(began, ended)
