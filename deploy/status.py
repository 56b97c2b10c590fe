"""``pdserve status``: the control plane's view as tables or JSON."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import json
import sys
from typing import TYPE_CHECKING, Any

from cluster.control.status import get_cluster
from cluster.errors import NoWorker, StartupError
from cluster.trust import ClusterToken
from deploy import commands

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.config import DeployConfig
    from cluster.control.facts import ClusterView, WorkerView

_TIMEOUT_S = 5.0


def show(config: DeployConfig, *, is_json: bool) -> int:
    """Print the view; raises StartupError where no control plane answers."""
    address = f"{config.endpoints.host}:{config.endpoints.control_port}"
    try:
        token = ClusterToken.load(config.security)
        view = asyncio.run(get_cluster(address, timeout_s=_TIMEOUT_S, token=token))
    except NoWorker as error:
        raise StartupError(f"{error.message}; {commands.START_REMEDY}") from error
    if is_json:
        text = json.dumps(dataclasses.asdict(view), default=_plain, indent=2)
    else:
        text = render(view)
    sys.stdout.write(text + "\n")
    return 0


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} is not JSON")


def render(view: ClusterView) -> str:
    """Return the view as text: workers, links, refused workers where there are any, queue."""
    queue = (
        f"queue: {view.num_waiting}/{view.max_queue_requests} requests, "
        f"{view.waiting_tokens} prompt tokens; granted: {view.num_granted}; "
        f"routers: {view.num_routers}; term: {view.term}"
    )
    parts = [_workers(view), _links(view)]
    if view.refused:
        parts.append(_refused(view))
    return "\n\n".join([*parts, queue])


def _workers(view: ClusterView) -> str:
    head = (
        "worker", "pool", "role", "health", "transport", "slots",
        "free", "cached", "held", "importing", "fenced", "waiting", "queued", "pid",
    )  # fmt: skip
    return table(head, [_worker(worker) for worker in view.workers])


def _worker(view: WorkerView) -> tuple[str, ...]:
    worker, report, blocks = view.worker, view.report, view.report.blocks
    counts = (blocks.free, blocks.cached, blocks.held, blocks.importing, blocks.fenced)
    return (
        worker.worker_id,
        worker.pool,
        worker.role.value,
        "draining" if report.is_draining else view.health.value,
        worker.transport,
        f"{report.num_running}/{worker.num_slots}",
        *(str(count) for count in counts),
        str(report.num_waiting),
        str(report.queued_tokens),
        str(worker.pid),
    )


def _links(view: ClusterView) -> str:
    links = [
        (
            f"{link.prefill_worker_id} -> {link.decode_worker_id}",
            link.transport or "-",
            f"{link.alpha_s * 1e3:.2f} ms",
            f"{link.beta_bytes_per_s / 2**30:.2f} GiB/s",
            _mib(link.in_flight_bytes),
            str(link.num_transfers),
            _mib(link.num_bytes),
            f"{link.last_s * 1e3:.2f} ms",
        )
        for link in view.links
    ]
    head = ("pair", "transport", "alpha", "beta", "in flight", "transfers", "moved", "last")
    return table(head, links)


def _refused(view: ClusterView) -> str:
    refused = [
        (refusal.worker_id, refusal.pool, f"{refusal.age_s:.0f} s ago", refusal.reason)
        for refusal in view.refused
    ]
    return table(("refused", "pool", "tried", "reason"), refused)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows under a head, columns aligned."""
    lines = [head, *rows]
    widths = [max(len(str(line[i])) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(str(cell).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
