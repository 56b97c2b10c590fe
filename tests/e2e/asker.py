"""Asks control planes what their clusters look like, from whatever thread, on one loop that lasts.

grpc.aio shuts its core down with the last channel of a process, and trips then over loops that were
closed while there was another one: threads with a loop of their own for each question do that.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from cluster.control.status import get_cluster

if TYPE_CHECKING:
    from cluster.control.facts import ClusterView
    from tests.e2e.process_cluster import ProcessCluster

_TIMEOUT_S = 5.0


class Asker:
    """``view`` is for any thread; ``close`` when nobody asks any more."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="asker", daemon=True)
        self._thread.start()

    def view(self, cluster: ProcessCluster) -> ClusterView:
        """Return the view; raises NoWorker where no control plane answers."""
        asked = asyncio.run_coroutine_threadsafe(
            get_cluster(cluster.control, timeout_s=_TIMEOUT_S), self._loop
        )
        return asked.result(2 * _TIMEOUT_S)

    def close(self) -> None:
        """End the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
