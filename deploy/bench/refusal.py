"""``refusal``: a thousand calls at once on a router whose queue holds 64: how soon the rest hear.

The router's HTTP door is real, in a process and on a core of its own; what stands behind it places
nobody, so that the queue fills and stays full (``deploy.bench.stand_in``). The clients are sockets
of this process, which is bound to another core. A refusal in the router lasts from a call's head
to the first byte of its answer; at the client from its connecting to the answer's end, the turns
of a thousand others included.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import EngineFault
from deploy.bench import stand_in
from deploy.bench.pinned import PinnedChild
from deploy.bench.report import Bar, Row, percentile
from deploy.cores import pin_process
from deploy.heap import keep_what_start_made

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from deploy.bench.site import Site

NAME = "refusal"
_ROUTER_BAR = Bar(subject="value", relation="<=", limit=50.0)
_CLIENT_BAR = Bar(subject="value", relation="<=", limit=2.0)
_REFUSED = (429, 503)
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
    num_runs: int = 3


@dataclass(slots=True)
class _Refusals:
    """Seconds of each, over all runs."""

    in_router: list[float] = field(default_factory=list)
    at_client: list[float] = field(default_factory=list)


def measure(site: Site, size: RefusalSize | None = None) -> list[Row]:
    """Return four rows: p99 and the slowest, in the router and at the client.

    Raises EngineFault where calls that find the queue full are not all refused.
    """
    size = size or RefusalSize()
    own = os.sched_getaffinity(0)
    arguments = {"folder": str(site.folder), "max_waiting": size.max_waiting}
    found = _Refusals()
    with (
        closing(site.progress(NAME, size.num_runs, "run")) as bar,
        PinnedChild(__name__, min(own), arguments) as router,
    ):
        pin_process((site.core,))
        try:
            port = router.ask(ask="port")
            for _ in range(size.num_runs):
                found.at_client += asyncio.run(_burst(port, size))
                found.in_router += router.ask(ask="refusals")
                bar.update()
        finally:
            pin_process(tuple(own))
    return _rows(found, size)


def _rows(found: _Refusals, size: RefusalSize) -> list[Row]:
    num_refused = len(found.at_client)
    # A few more than the queue holds are let in where they come while others are being tokenised;
    # the control plane, which is not here, is who refuses these.
    least = size.num_runs * (size.num_calls - 2 * size.max_waiting)
    if not (num_refused >= least and len(found.in_router) == num_refused):
        seen = f"{len(found.in_router)} by the router, {num_refused} at the clients"
        raise EngineFault(f"{least} calls at least were to be refused: {seen}", stage="bench")
    in_router_ms = [seconds * 1e3 for seconds in found.in_router]
    crowd = f"{num_refused} refusals, {size.num_calls} calls at once"
    return [
        _row(f"in the router: p99 of {crowd}, vs p50", "ms", in_router_ms, 99, None),
        _row(f"in the router: slowest of {crowd}, vs p50", "ms", in_router_ms, 100, _ROUTER_BAR),
        _row(f"at the client: p99 of {crowd}, vs p50", "s", found.at_client, 99, None),
        _row(f"at the client: slowest of {crowd}, vs p50", "s", found.at_client, 100, _CLIENT_BAR),
    ]


def _row(what: str, unit: str, values: list[float], percent: int, held: Bar | None) -> Row:
    value = max(values) if percent == 100 else percentile(values, percent)
    usual = statistics.median(values)
    return Row(
        name=NAME, what=what, value=value, unit=unit, reference=usual, ratio=value / usual, bar=held
    )


async def _burst(port: int, size: RefusalSize) -> list[float]:
    """Call at once; returns how long each refused call took, and hangs up on those that wait."""
    waiting = {asyncio.create_task(_call(port)) for _ in range(size.num_calls)}
    refused = set[asyncio.Task[float]]()
    until, has_news = time.monotonic() + _PATIENCE_S, True
    while (has_news or len(waiting) > 2 * size.max_waiting) and time.monotonic() < until:
        ended, waiting = await asyncio.wait(waiting, timeout=_SILENCE_S)
        has_news = bool(ended)
        refused |= ended
    for call in waiting:
        call.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return [call.result() for call in refused]


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


class _Watch:
    """ASGI middleware that notes how long each refusal took."""

    def __init__(self, app: Any, seconds: list[float]) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        began = time.perf_counter()

        async def note(message: MutableMapping[str, Any]) -> None:
            await send(message)
            if message["type"] == "http.response.start" and message["status"] in _REFUSED:
                self._seconds.append(time.perf_counter() - began)

        await self._app(scope, receive, note)


def start(arguments: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Serve in this child and return what answers its parent."""
    folder, max_waiting = Path(arguments["folder"]), int(arguments["max_waiting"])
    router = stand_in.StandInRouter(folder, _WORDS, max_waiting=max_waiting)
    seconds: list[float] = []
    router.api.add_middleware(_Watch, seconds=seconds)
    router.start()
    keep_what_start_made()

    def respond(message: dict[str, Any]) -> Any:
        if message["ask"] == "port":
            return router.port
        until = time.monotonic() + _PATIENCE_S
        while router.num_open and time.monotonic() < until:
            time.sleep(_LOOK_S)  # those that waited are being given up
        told = list(seconds)
        seconds.clear()
        return told

    return respond
