"""Workers whose steps take long, so that streams outlast what is done meanwhile."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tests.e2e.plain_cluster import view_of
from tests.e2e.process_cluster import Faults, fault

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def slow_steps(cluster, pool: str, seconds: float) -> Iterator[dict[str, Faults]]:
    """Those of a pool, for the time of a ``with``: the switches, by worker, proven to have worked.

    Who dies meanwhile is to be taken out.
    """
    workers = [w.worker for w in view_of(cluster).workers if w.worker.pool == pool]
    switches = {each.worker_id: Faults(each.address) for each in workers}
    try:
        for switch in switches.values():
            switch.set(fault("delay", "engine.step", times=0, seconds=seconds))
        yield switches
        for name, switch in switches.items():
            assert switch.clear()[0] > 0, f"{name} made no step"
    finally:
        for switch in switches.values():
            switch.close()
