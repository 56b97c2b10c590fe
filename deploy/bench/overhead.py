"""``overhead``: what router, control plane and wires add to the first token of a lone request.

The value is the client's time to the first token less what the prefill worker itself needed for it
(``queue_s + compute_s`` of its leg): the client's call, tokenising, placement, the way to the
worker and the token's way back. One request at a time, alternately over gRPC and over HTTP, on
connections that stay open. A run is 20 requests by each door and counts their medians; the
reference is the prefill's own compute time in the same requests.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from cluster.errors import EngineFault
from deploy.bench.report import Bar, Row, Run, row_of
from deploy.client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deploy.bench.site import Doors, Site

NAME = "overhead"
_BAR = Bar(subject="value", relation="<=", limit=10.0)
_WARM_UPS = 2
_TIMEOUT_S = 60.0
_PROMPT = (
    "Report number {number} of the harbour master. Every morning she walks along the quiet pier "
    "and counts the boats that came home during the night. Some carry fish, others carry stones "
    "for the new bridge, and one small vessel always brings letters from the island. The children "
    "wait for that boat because its captain tells them stories about whales, lanterns, forgotten "
    "maps and mountains made of glass. Today she counted {number} boats, and then she said that"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadSize:
    """How much is measured; the default is what the bars speak of."""

    num_requests: int = 20
    """In a run, by each door."""
    num_runs: int = 3


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One request, in seconds: what the client waited, and the prefill worker's part of it."""

    waited_s: float
    queue_s: float
    compute_s: float

    @property
    def overhead_s(self) -> float:
        """What everything but the prefill worker added."""
        return self.waited_s - self.queue_s - self.compute_s


def measure(site: Site, doors: Doors, size: OverheadSize | None = None) -> list[Row]:
    """Return a row for each door."""
    size = size or OverheadSize()
    numbers = itertools.count()
    runs: dict[str, list[Run]] = {"gRPC": [], "HTTP": []}
    with (
        closing(site.progress(NAME, size.num_runs * size.num_requests, "pair")) as bar,
        Client(doors.grpc) as client,
        httpx.Client(timeout=_TIMEOUT_S) as http,
    ):
        ask = {
            "gRPC": lambda: _over_grpc(client, next(numbers)),
            "HTTP": lambda: _over_http(http, doors.http, next(numbers)),
        }
        for _ in range(_WARM_UPS):
            for door in runs:
                ask[door]()
        for _ in range(size.num_runs):
            seen: dict[str, list[FirstToken]] = {door: [] for door in runs}
            for _ in range(size.num_requests):
                for door in runs:
                    seen[door].append(ask[door]())
                bar.update()
            for door, found in seen.items():
                runs[door].append(_run(found))
    return [
        row_of(NAME, f"added to the first token over {door}, vs prefill itself", "ms", done, _BAR)
        for door, done in runs.items()
    ]


def _run(found: list[FirstToken]) -> Run:
    return Run(
        statistics.median(each.overhead_s for each in found) * 1e3,
        statistics.median(each.compute_s for each in found) * 1e3,
    )


def _over_grpc(client: Client, number: int) -> FirstToken:
    began, first = time.monotonic(), None
    pieces = client.generate(
        prompt=_PROMPT.format(number=number),
        max_tokens=2,
        temperature=0.0,
        ignore_eos=True,
        timeline=True,
    )
    for piece in pieces:
        if first is None and piece.token_ids:
            first = time.monotonic()
        if piece.finish_reason:
            prefill = piece.timeline.prefill
            return _first_token(began, first, prefill.queue_s, prefill.compute_s)
    raise EngineFault("the stream ended without its timeline", stage="bench")


def _over_http(http: httpx.Client, base: str, number: int) -> FirstToken:
    body = {
        "prompt": _PROMPT.format(number=number),
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "timeline": True,
    }
    began, first = time.monotonic(), None
    timeline: dict[str, Any] | None = None
    with http.stream("POST", f"{base}/v1/completions", json=body) as response:
        for event in _events(response):
            if first is None and any(choice["text"] for choice in event["choices"]):
                first = time.monotonic()
            timeline = event.get("pdserve", {}).get("timeline") or timeline
    if timeline is None:
        raise EngineFault("the stream ended without its timeline", stage="bench")
    prefill = timeline["prefill"]
    return _first_token(began, first, prefill["queue_s"], prefill["compute_s"])


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    if response.status_code != httpx.codes.OK:
        reason = response.read().decode(errors="replace")
        raise EngineFault(f"HTTP {response.status_code}: {reason[:200]}", stage="bench")
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise EngineFault(f"HTTP: {event['error']['message']}", stage="bench")
        yield event


def _first_token(began: float, first: float | None, queue_s: float, compute_s: float) -> FirstToken:
    if first is None:
        raise EngineFault("no message carried the first token", stage="bench")
    return FirstToken(first - began, queue_s, compute_s)
