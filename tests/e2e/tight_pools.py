"""Pairs of workers with few blocks, and what is seen of them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from cluster.config import Role
from tests.e2e.plain_cluster import make_config, with_pool
from tests.e2e.process_cluster import fault

if TYPE_CHECKING:
    from tests.e2e.streams import Prompts, Stream


def slow_steps(seconds: float, *, nth: int = 1):
    """Each step from the ``nth`` on takes longer."""
    return fault("delay", "engine.step", nth=nth, times=0, seconds=seconds)


def pair(model, *, prefill_blocks: int, decode_blocks: int, **options):
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    config = make_config(model, pools, **options)
    config = with_pool(config, "prefill", kv_tokens=16 * prefill_blocks, chunk_tokens=64)
    return with_pool(config, "decode", kv_tokens=16 * decode_blocks)


def check_progress(served: list[tuple[Prompts, int, Stream]], patience_s: float = 5.0) -> None:
    """Some token within any five seconds while there is work, and everything ends right."""
    for prompts, number, stream in served:
        stream.wait_end(60)
        prompts.check(number, stream)
    streams = [stream for _, _, stream in served]
    instants = [min(s.started_at for s in streams), *sorted(t for s in streams for t in s.times)]
    gaps = [b - a for a, b in itertools.pairwise(instants)]
    assert max(gaps) < patience_s


def is_pinned(cluster) -> bool:
    """Whether two exports wait where they were computed, and hold 20 blocks there."""
    report = report_of(cluster, "prefill-0")
    return report.counters["exports_waited"] >= 2 and report.blocks.held >= 20


def report_of(cluster, worker_id: str):
    return next(w.report for w in cluster.view().workers if w.worker.worker_id == worker_id)
