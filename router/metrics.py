"""What one router counts, and the Prometheus text of it and of the control plane's view.

``received = success + aborted + failed + rejected`` once nothing is in flight. Tokens of requests
that ended well are ``generated``; those of others, and what was made after a stop string, are
``wasted``. No label comes from a client. Several routers can share a port, and a scrape reaches
any of them: what one router counts carries its ``router`` label, what all see the same does not.
"""

from __future__ import annotations

import contextlib
from http import HTTPStatus
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cluster.errors import Cancelled, ClusterFull, NoWorker, PdserveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from cluster.control.facts import ClusterView, WorkerView
    from router.events import Finish

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_RECEIVED = "Calls that asked for a generation; `router` is the replica that counts: sum over it"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RouterMetrics:
    """The counters of one router, in a registry of their own."""

    def __init__(self, router_id: str) -> None:
        self.num_queued = 0
        """Requests that wait for a grant."""
        self._registry = CollectorRegistry()
        self._shown = CollectorRegistry()
        self._shown.register(_WithRouter(self._registry, router_id))
        self._received = self._counter("requests_received", _RECEIVED)
        self._success = self._counter("requests_success", "Requests that ended well", ["reason"])
        self._aborted = self._counter("requests_aborted", "Requests cancelled", ["phase"])
        self._failed = self._counter("requests_failed", "Requests that ended in an error", ["code"])
        self._rejected = self._counter("requests_rejected", "Calls refused before work", ["code"])
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests that ended well")
        self._generated = self._counter("generated_tokens", "Output tokens of the same")
        self._wasted = self._counter("wasted_tokens", "Output tokens that nobody got")
        self._attempts = self._counter("attempts", "Grants that were served or tried")
        self._resumed = self._counter(
            "requests_resumed", "Requests that went on with other workers after a first token"
        )
        self._redirected = self._counter(
            "attempts_redirected", "Exports that another decode worker took than was meant"
        )
        self._repeats = self._counter("repeated_tokens", "Tokens dropped since they were out")
        self._in_flight = Gauge(
            "pdserve_requests_in_flight", "Requests accepted and not over", registry=self._registry
        )
        self._queued = Gauge(
            "pdserve_requests_queued", "Requests that wait for a grant", registry=self._registry
        )
        self._handoffs_waiting = Gauge(
            "pdserve_handoffs_waiting",
            "Exports that wait for another decode worker",
            registry=self._registry,
        )
        self._first_token = self._histogram("first_token_seconds", "Accept to first token")
        self._total = self._histogram("request_seconds", "Accept to last token")
        self._queue = self._histogram("queue_seconds", "Accept to grant")

    def received(self) -> None:
        """A call arrived at a generating route."""
        self._received.inc()

    def rejected(self, error: PdserveError) -> None:
        """A received call was refused before it became a request."""
        is_lack = isinstance(error, NoWorker | ClusterFull)
        if is_lack or error.http_status < HTTPStatus.INTERNAL_SERVER_ERROR:
            self._rejected.labels(error.code).inc()
        else:
            self._failed.labels(error.code).inc()

    def left(self) -> None:
        """The client of a received call left before it became a request."""
        self._aborted.labels("edge").inc()

    def started(self) -> None:
        """A request was accepted."""
        self._in_flight.inc()

    @contextlib.contextmanager
    def queued(self) -> Iterator[None]:
        """Count a request as waiting for a grant while the context is open."""
        self.num_queued += 1
        try:
            with self._queued.track_inprogress():
                yield
        finally:
            self.num_queued -= 1

    def waiting_handoff(self) -> AbstractContextManager[object]:
        """Count an export as waiting for a decode worker while the context is open."""
        return self._handoffs_waiting.track_inprogress()

    def resumed(self) -> None:
        """A request goes on with another attempt after its first token; told once for each."""
        self._resumed.inc()

    def attempt_ended(self, *, num_repeats: int, num_redirects: int = 0) -> None:
        """One grant was served or failed."""
        self._attempts.inc()
        self._repeats.inc(num_repeats)
        self._redirected.inc(num_redirects)

    def ended(self, end: Finish | PdserveError, *, phase: str, num_output_tokens: int) -> None:
        """An accepted request ended."""
        self._in_flight.dec()
        if isinstance(end, PdserveError):
            self._wasted.inc(num_output_tokens)
            if isinstance(end, Cancelled):
                self._aborted.labels(phase).inc()
            elif phase == "queue":
                self.rejected(end)
            else:
                self._failed.labels(end.code).inc()
            return
        self._success.labels(end.finish_reason.value).inc()
        self._prompt.inc(end.num_prompt_tokens)
        self._generated.inc(end.num_output_tokens)
        self._first_token.observe(end.timeline.first_token_s)
        self._total.observe(end.timeline.total_s)
        self._queue.observe(end.timeline.queue_s)

    def wasted(self, num_tokens: int) -> None:
        """Count output tokens that nobody gets: made after a stop string, or for a lost cause."""
        self._wasted.inc(num_tokens)

    def watch(self, view: Callable[[], ClusterView | None]) -> None:
        """Show the control plane's view too, as it is when somebody asks."""
        self._shown.register(_ViewCollector(view))

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._shown)

    def _counter(self, name: str, what: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"pdserve_{name}", what, labels or [], registry=self._registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"pdserve_{name}", what, registry=self._registry, buckets=_SECONDS)


class _WithRouter:
    """Shows a registry with the router's id as a label of every series."""

    def __init__(self, registry: CollectorRegistry, router_id: str) -> None:
        self._registry = registry
        self._labels = {"router": router_id}

    def describe(self) -> list[Metric]:
        """Promise no names: the inner registry has checked them."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every family with the label."""
        for metric in self._registry.collect():
            metric.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in metric.samples
            ]
            yield metric


class _ViewCollector:
    """Workers and links as the control plane sees them; every router shows the same."""

    def __init__(self, view: Callable[[], ClusterView | None]) -> None:
        self._view = view

    def describe(self) -> list[Metric]:
        """Promise no names: they depend on the workers."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield one family per quantity."""
        view = self._view()
        if view is None:
            return
        waiting = GaugeMetricFamily("pdserve_queue_waiting", "Requests at the control plane")
        waiting.add_metric([], view.num_waiting)
        yield waiting
        yield from _worker_gauges(view.workers)
        yield from _worker_counters(view.workers)
        yield from _link_metrics(view)
        yield from _control_metrics(view)


_WORKER = ("worker", "pool", "role")
_GAUGES = {
    "running": "Sequences that share steps",
    "waiting": "Sequences that wait for a step",
    "swapped": "Sequences that wait with their KV in CPU memory",
    "transferring": "Handoffs offered, being sent or received",
}


def _labels(view: WorkerView) -> list[str]:
    worker = view.worker
    return [worker.worker_id, worker.pool, worker.role.value]


def _worker_gauges(workers: tuple[WorkerView, ...]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "pdserve_worker_blocks", "KV blocks by state", labels=[*_WORKER, "state"]
    )
    for view in workers:
        for state in ("free", "cached", "held", "importing", "fenced"):
            blocks.add_metric([*_labels(view), state], getattr(view.report.blocks, state))
        blocks.add_metric([*_labels(view), "total"], view.worker.num_blocks)
    yield blocks
    for name, what in _GAUGES.items():
        family = GaugeMetricFamily(f"pdserve_worker_{name}", what, labels=_WORKER)
        for view in workers:
            family.add_metric(_labels(view), getattr(view.report, f"num_{name}"))
        yield family
    queued = GaugeMetricFamily(
        "pdserve_worker_queued_tokens", "Prompt tokens not computed yet", labels=_WORKER
    )
    for view in workers:
        queued.add_metric(_labels(view), view.report.queued_tokens)
    yield queued


def _worker_counters(workers: tuple[WorkerView, ...]) -> Iterator[Metric]:
    families: dict[str, CounterMetricFamily] = {}
    for view in workers:
        for name, value in {"steps": view.report.num_steps, **view.report.counters}.items():
            full = "pdserve_worker_" + name.removeprefix("pdserve_").removeprefix("worker_")
            full = full.removesuffix("_total")
            if full not in families:
                families[full] = CounterMetricFamily(full, "A worker's counter", labels=_WORKER)
            families[full].add_metric(_labels(view), value)
    yield from families.values()


def _link_metrics(view: ClusterView) -> Iterator[Metric]:
    labels = ("prefill", "decode")
    transfers = CounterMetricFamily("pdserve_link_transfers", "Handoffs sent", labels=labels)
    sent = CounterMetricFamily("pdserve_link_bytes", "KV bytes sent", labels=labels)
    last = GaugeMetricFamily("pdserve_link_last_seconds", "The last transfer", labels=labels)
    for link in view.links:
        pair = [link.prefill_worker_id, link.decode_worker_id]
        transfers.add_metric(pair, link.num_transfers)
        sent.add_metric(pair, link.num_bytes)
        last.add_metric(pair, link.last_s)
    yield from (transfers, sent, last)


def _control_metrics(view: ClusterView) -> Iterator[Metric]:
    for name, value in sorted(view.counters.items()):
        counter = CounterMetricFamily(f"pdserve_control_{name}", "The control plane's counter")
        counter.add_metric([], value)
        yield counter
    refused = GaugeMetricFamily("pdserve_workers_refused", "Workers that may not join")
    refused.add_metric([], len(view.refused))
    yield refused
