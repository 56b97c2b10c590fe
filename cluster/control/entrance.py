"""The control plane's own answer to whether a want may wait, and what it tells routers of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cluster.control import overload
from cluster.control.overload import Newcomer, QueueBounds, QueueLoad
from cluster.control.pace import Pace

if TYPE_CHECKING:
    from cluster.config import SchedulingConfig
    from cluster.control.costs import CostModel
    from cluster.control.facts import Want
    from cluster.control.ledger import Ledger
    from cluster.control.waiting import WaitingQueue
    from cluster.errors import QueueFull


class Entrance:
    """Stands before a ``WaitingQueue``."""

    def __init__(
        self, scheduling: SchedulingConfig, queue: WaitingQueue, ledger: Ledger, costs: CostModel
    ) -> None:
        self.bounds = QueueBounds(
            max_requests=scheduling.max_queue_requests,
            max_tokens=scheduling.max_queue_tokens,
            tenant_share=scheduling.tenant_queue_share,
        )
        self.pace = Pace(ledger, costs)
        self._queue = queue

    def refusal(self, want: Want, now: float) -> QueueFull | None:
        """Return why a fresh want may not wait; None where it may."""
        if not self._queue:
            return None
        who = Newcomer(
            tenant=want.tenant,
            standing=self._queue.standing(want),
            num_tokens=want.num_prompt_tokens,
            remaining_s=want.remaining_s,
        )
        return overload.refusal(self._load(now), who, self.bounds)

    def shown(self, now: float) -> QueueLoad:
        """Return what routers need to know."""
        load = self._load(now)
        tenants = dict(Counter(load.tenants).most_common(overload.MAX_TENANTS_SHOWN))
        return QueueLoad(
            num_requests=load.num_requests,
            num_tokens=load.num_tokens,
            request_s=load.request_s,
            is_fair=load.is_fair,
            tenants=tenants,
            standings=dict(load.standings),
        )

    def _load(self, now: float) -> QueueLoad:
        queue = self._queue
        num_requests = len(queue)
        mean_tokens = queue.num_tokens / num_requests if num_requests else 0.0
        return QueueLoad(
            num_requests=num_requests,
            num_tokens=queue.num_tokens,
            request_s=self.pace.request_s(now, mean_tokens),
            is_fair=queue.is_fair,
            tenants=queue.tenants,
            standings=queue.standings(now),
        )
