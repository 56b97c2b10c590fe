"""``refusal``: calls on a router whose queue is full: how soon they hear so, at either door.

The router's doors are real, in a process and on a core of their own; what stands behind them places
nobody, so that the queue fills and stays full (``deploy.bench.stand_in``). The clients are sockets
of this process, which is bound to another core. First a thousand call at once, and the queue holds
64 of them. Then, with those still there, 32 clients call one after another, each as soon as its
last call was refused.

At the client a refusal lasts from connecting to the answer's end. In the router it lasts

    HTTP   from the moment at which the first of its bytes were read from its socket
    gRPC   from the moment at which the core of gRPC had read the call's head, as it says by how
           much of the call's deadline is left

to the refusal's being said: the turns that a call waits for in the router's loop are in it. What a
thousand at once make of that is the turns of all the others, and is held by no bar of its own.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import statistics
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from cluster.errors import EngineFault
from cluster.wire import public_v1_pb2 as pb
from deploy.bench import stand_in
from deploy.bench.grpc_burst import PATH, Burst
from deploy.bench.pinned import PinnedChild
from deploy.bench.report import Bar, Row, percentile
from deploy.cores import pin_process
from deploy.heap import keep_what_start_made
from router.http_guard import GuardedConnection

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, MutableMapping

    from deploy.bench.site import Site

NAME = "refusal"
_REFUSAL_BAR = Bar(subject="value", relation="<=", limit=50.0)
_CROWD_BAR = Bar(subject="value", relation="<=", limit=2.0)
_REFUSED = (429, 503)
_REFUSED_CODES = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
_READ = "pdserve.bench.read"
_DEADLINE_S = 60
_NUM_CLIENTS = 32
_PATIENCE_S = 30.0
_SILENCE_S = 1.0
"""After which nobody is expected to hear more: whoever is left waits in the queue."""
_LOOK_S = 0.01
_WORDS = "and the boats that came home during the night carry stones for the new bridge "


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalSize:
    """How much is measured; the default is what the bars speak of."""

    num_calls: int = 1000
    max_waiting: int = 64
    num_steady: int = 1024
    """Calls one after another, of all clients together."""
    num_runs: int = 3


@dataclass(slots=True)
class _Refusals:
    """Seconds of each, over all runs."""

    in_router: list[float] = field(default_factory=list)
    """Of those that came at once."""
    at_client: list[float] = field(default_factory=list)
    steady: list[float] = field(default_factory=list)
    """At the client, of those that came one after another."""

    def add(self, run: _Run, in_router: list[float]) -> None:
        """Take one run's; ``in_router`` are all of them, in their order."""
        num_seen = len(run.at_client) + len(run.steady)
        if len(in_router) != num_seen:
            seen = f"{len(in_router)} by the router, {num_seen} at the clients"
            raise EngineFault(f"not everybody saw the same refusals: {seen}", stage="bench")
        self.in_router += in_router[: len(run.at_client)]
        self.at_client += run.at_client
        self.steady += run.steady


@dataclass(frozen=True, slots=True)
class _Run:
    at_client: list[float]
    steady: list[float]


def measure(site: Site, size: RefusalSize | None = None) -> list[Row]:
    """Return the rows of each door: one after another, and all at once.

    Raises EngineFault where calls that find the queue full are not all refused.
    """
    size = size or RefusalSize()
    own = os.sched_getaffinity(0)
    arguments = {"folder": str(site.folder), "max_waiting": size.max_waiting}
    found = {door: _Refusals() for door in _RUNS}
    with (
        closing(site.progress(NAME, size.num_runs * len(found), "run")) as bar,
        PinnedChild(__name__, min(own), arguments) as router,
    ):
        pin_process((site.core,))
        # A collection of all that this process has loaded stops the clients for 100 ms.
        gc.disable()
        try:
            ports = router.ask(ask="ports")
            for _ in range(size.num_runs):
                for door, refusals in found.items():
                    run = asyncio.run(_RUNS[door](ports[door], size))
                    refusals.add(run, router.ask(ask="refusals", door=door))
                    bar.update()
        finally:
            gc.enable()
            pin_process(tuple(own))
    return [row for door, refusals in found.items() for row in _rows(door, refusals, size)]


def _rows(door: str, found: _Refusals, size: RefusalSize) -> list[Row]:
    num_refused = len(found.at_client)
    # A few more than the queue holds are let in where they come while others are being tokenised;
    # the control plane, which is not here, is who refuses these.
    least = size.num_runs * (size.num_calls - 2 * size.max_waiting)
    if num_refused < least:
        raise EngineFault(
            f"{door}: {least} calls at least were to be refused, {num_refused} were", stage="bench"
        )
    steady_ms, in_router_ms = (
        [seconds * 1e3 for seconds in each] for each in (found.steady, found.in_router)
    )
    steady = f"{len(steady_ms)} refusals at the client, {_NUM_CLIENTS} clients"
    crowd = f"{num_refused} refusals, {size.num_calls} calls at once"
    return [
        _row(f"{door}: p99 of {steady}, vs p50", "ms", steady_ms, 99, None),
        _row(f"{door}: slowest of {steady}, vs p50", "ms", steady_ms, 100, _REFUSAL_BAR),
        _row(f"{door}, in the router: slowest of {crowd}, vs p50", "ms", in_router_ms, 100, None),
        _row(f"{door}, at the client: p99 of {crowd}, vs p50", "s", found.at_client, 99, None),
        _row(
            f"{door}, at the client: slowest of {crowd}, vs p50",
            "s",
            found.at_client,
            100,
            _CROWD_BAR,
        ),
    ]


def _row(what: str, unit: str, values: list[float], percent: int, held: Bar | None) -> Row:
    value = max(values) if percent == 100 else percentile(values, percent)
    usual = statistics.median(values)
    return Row(
        name=NAME, what=what, value=value, unit=unit, reference=usual, ratio=value / usual, bar=held
    )


async def _http_run(port: int, size: RefusalSize) -> _Run:
    """Call at once, then steadily; hangs up on those that wait in the end."""
    waiting = {asyncio.create_task(_call(port)) for _ in range(size.num_calls)}
    refused = set[asyncio.Task[float]]()
    until, has_news = time.monotonic() + _PATIENCE_S, True
    while (has_news or len(waiting) > 2 * size.max_waiting) and time.monotonic() < until:
        ended, waiting = await asyncio.wait(waiting, timeout=_SILENCE_S)
        has_news = bool(ended)
        refused |= ended
    steady = await _steady(lambda: _call(port), size)
    for call in waiting:
        call.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return _Run([call.result() for call in refused], steady)


async def _grpc_run(port: int, size: RefusalSize) -> _Run:
    """Do the same at the other door."""
    message = pb.GenerateRequest(prompt=_WORDS * 30, max_tokens=16).SerializeToString()

    async def call() -> float:
        async with Burst(port, message, num_calls=1, timeout_s=_DEADLINE_S) as one:
            seconds = await one.next_end(_PATIENCE_S)
        if seconds is None:
            raise EngineFault("no refusal came", stage="bench")
        return seconds

    at_client: list[float] = []
    until = time.monotonic() + _PATIENCE_S
    async with Burst(port, message, num_calls=size.num_calls, timeout_s=_DEADLINE_S) as burst:
        while time.monotonic() < until:
            seconds = await burst.next_end(_SILENCE_S)
            if seconds is not None:
                at_client.append(seconds)
            elif size.num_calls - len(at_client) <= 2 * size.max_waiting:
                break
        return _Run(at_client, await _steady(call, size))


_RUNS: dict[str, Callable[[int, RefusalSize], Coroutine[Any, Any, _Run]]] = {
    "http": _http_run,
    "grpc": _grpc_run,
}


async def _steady(call: Callable[[], Coroutine[Any, Any, float]], size: RefusalSize) -> list[float]:
    """Have so many clients call, each when its last call has ended."""

    async def client() -> list[float]:
        return [await call() for _ in range(size.num_steady // _NUM_CLIENTS)]

    each = await asyncio.gather(*(client() for _ in range(_NUM_CLIENTS)))
    return list(itertools.chain.from_iterable(each))


async def _call(port: int) -> float:
    body = json.dumps({"prompt": _WORDS * 30, "max_tokens": 16}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + body)
        answer = await reader.read()
    finally:
        writer.close()
    status = int(answer.split(maxsplit=2)[1])
    if status not in _REFUSED or b"retry-after:" not in answer.lower():
        raise EngineFault(f"HTTP {status} instead of a refusal", stage="bench")
    return time.perf_counter() - began


# ---- in the child


class _Timed(GuardedConnection):
    """Knows when its first bytes were read. Each carries one call here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_s = 0.0

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        self._read_s = self._read_s or time.perf_counter()
        super().data_received(data)

    def handle_events(self) -> None:
        """Tell a call that is passed on."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self.scope["extensions"][_READ] = {"at_s": self._read_s}


class _HttpWatch:
    """ASGI middleware that notes how long each refusal took."""

    def __init__(self, app: Any, seconds: list[float]) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def note(message: MutableMapping[str, Any]) -> None:
            await send(message)
            if message["type"] == "http.response.start" and message["status"] in _REFUSED:
                began = scope["extensions"][_READ]["at_s"]
                self._seconds.append(time.perf_counter() - began)

        await self._app(scope, receive, note)


class _GrpcWatch(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not so at run time
    """Does so where there is no socket to look at: gRPC counts a deadline from a call's head on."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler_call_details.method != PATH:
            return handler
        answer = handler.unary_stream

        async def timed(request: Any, context: Any) -> None:
            try:
                await answer(request, context)
            finally:
                if context.code() in _REFUSED_CODES:
                    self._seconds.append(_DEADLINE_S - context.time_remaining())

        return handler._replace(unary_stream=timed)


def start(arguments: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Serve in this child and return what answers its parent."""
    folder, max_waiting = Path(arguments["folder"]), int(arguments["max_waiting"])
    router = stand_in.StandInRouter(folder, _WORDS, max_waiting=max_waiting, connection=_Timed)
    seconds: dict[str, list[float]] = {door: [] for door in _RUNS}
    router.api.add_middleware(_HttpWatch, seconds=seconds["http"])
    router.start()
    ports = {"http": router.port, "grpc": router.open_grpc(_GrpcWatch(seconds["grpc"]))}
    keep_what_start_made()

    def respond(message: dict[str, Any]) -> Any:
        if message["ask"] == "ports":
            return ports
        until = time.monotonic() + _PATIENCE_S
        while router.num_open and time.monotonic() < until:
            time.sleep(_LOOK_S)  # those that waited are being given up
        told = list(seconds[message["door"]])
        seconds[message["door"]].clear()
        return told

    return respond
