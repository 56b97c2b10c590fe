"""What each worker proves by itself when it is idle: every block is in exactly one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.plain_cluster import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable


def wait_proven(cluster, serve: Callable[[], object]) -> None:
    """Wait until every worker has proven its pool's books since now, and none was wrong.

    The proof is due a second after a worker's last leg, and ends a worker that fails it. ``serve``:
    a request with a leg on each worker, so that each has something to prove.
    """
    before = _num_checks(cluster)
    serve()

    def is_proven() -> bool:
        now = _num_checks(cluster)
        return all(now.get(incarnation, 0) > number for incarnation, number in before.items())

    wait_until(is_proven, 20, "a worker has not proven its pool's books, or has failed to")
    failures = {
        w.worker.worker_id: w.report.counters["kv_check_failures"] for w in cluster.view().workers
    }
    assert not any(failures.values()), failures


def _num_checks(cluster) -> dict[str, float]:
    """By incarnation: who comes after one that has failed is another."""
    return {w.worker.incarnation: w.report.counters["kv_checks"] for w in cluster.view().workers}
