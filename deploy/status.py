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
from deploy import commands

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.config import DeployConfig
    from cluster.control.facts import ClusterView

_TIMEOUT_S = 5.0


def show(config: DeployConfig, *, is_json: bool) -> int:
    """Print the view; raises StartupError where no control plane answers."""
    address = f"{config.endpoints.host}:{config.endpoints.control_port}"
    try:
        view = asyncio.run(get_cluster(address, timeout_s=_TIMEOUT_S))
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
    """Return the view as text: workers, links, queue."""
    workers = [
        (
            w.worker.worker_id,
            w.worker.pool,
            w.worker.role.value,
            w.health.value,
            f"{w.report.num_running}/{w.worker.num_slots}",
            f"{w.worker.num_blocks - w.report.blocks.free}/{w.worker.num_blocks}",
            str(w.report.num_waiting),
            str(w.report.queued_tokens),
            str(w.worker.pid),
        )
        for w in view.workers
    ]
    links = [
        (
            f"{link.prefill_worker_id} -> {link.decode_worker_id}",
            f"{link.alpha_s * 1e3:.2f} ms",
            f"{link.beta_bytes_per_s / 2**30:.2f} GiB/s",
            str(link.num_transfers),
            f"{link.num_bytes / 2**20:.1f} MiB",
            f"{link.last_s * 1e3:.2f} ms",
        )
        for link in view.links
    ]
    queue = (
        f"queue: {view.num_waiting}/{view.max_queue_requests} requests, "
        f"{view.waiting_tokens} prompt tokens; granted: {view.num_granted}; "
        f"routers: {view.num_routers}; term: {view.term}"
    )
    head = ("worker", "pool", "role", "health", "slots", "blocks", "waiting", "queued", "pid")
    link_head = ("pair", "alpha", "beta", "transfers", "moved", "last")
    return "\n\n".join([table(head, workers), table(link_head, links), queue])


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows under a head, columns aligned."""
    lines = [head, *rows]
    widths = [max(len(str(line[i])) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(str(cell).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
