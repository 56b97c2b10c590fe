"""The control plane's mind, without I/O: facts and ``now`` in, decisions out.

A want's life here:
    1. ``want``: refused at once where it can never be served or the queue is full, else queued by
       the time it has waited in all
    2. ``_place``: after every fact that may have made room, the queue is walked oldest first; a
       want that has no room now holds the workers it lacks, so that nobody younger takes them,
       and blocks none that need other workers
    3. granted: the ledger charges its workers until their reports show the legs, and what these
       leave when they end; or rejected: deadline, no worker of a role
    4. ``done``: the router is through with it, well or not

For ``reconcile_s`` after the start nobody is rejected for want of room or workers: the workers and
the wants of an earlier control plane are still coming back. After that a request is rejected as
soon as no worker of a needed role is alive or suspected.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.control.costs import Choice, CostModel
from cluster.control.decisions import Decision, SendGrant, SendReject
from cluster.control.facts import (
    ClusterView,
    Grant,
    Placed,
    Registration,
    Reject,
    Want,
    WorkerReport,
    WorkerView,
)
from cluster.control.ledger import GrantRecord, Ledger, WorkerEntry
from cluster.control.links import LinkTable
from cluster.control.membership import Membership
from cluster.control.placement import NoRoute, Placement
from cluster.control.waiting import Waiting, WaitingQueue
from cluster.errors import DeadlineExceeded, NoWorker, PdserveError, QueueFull

if TYPE_CHECKING:
    from collections.abc import Hashable

    from cluster.config import DeployConfig
    from cluster.control.settings import ControlSettings

logger = logging.getLogger(__name__)

_NO_WORKER_RETRY_S = 2.0
_GRANTS_FOR_RATE = 64
_RETRY_RANGE_S = (1.0, 60.0)


@dataclass(slots=True)
class _Router:
    incarnation: str
    lost_at: float | None = None


class Planner:
    """Decides who runs where and when. Every method that takes ``now`` returns what to do."""

    def __init__(
        self, config: DeployConfig, *, term: int, settings: ControlSettings, now: float
    ) -> None:
        self.term = term
        self._config = config
        self._settings = settings
        self._started_at = self._ticked_at = now
        self._ledger = Ledger(LinkTable(settings.link_age_s))
        self._members = Membership(config, self._ledger, settings)
        self._costs = CostModel(self._ledger, settings.expected_output_tokens)
        self._placement = Placement(config, self._ledger, self._costs, settings)
        self._queue = WaitingQueue()
        self._routers: dict[str, _Router] = {}
        self._orders = itertools.count(1)
        self._granted_at: deque[float] = deque(maxlen=_GRANTS_FOR_RATE)

    # ---- routers

    def router_joined(self, router_id: str, incarnation: str, now: float) -> list[Decision]:
        """Take a router's stream; another incarnation under its id is gone for good."""
        old = self._routers.get(router_id)
        if old is not None and old.incarnation != incarnation:
            self._drop_router(router_id, now)
        self._queue.remove_router(router_id)
        self._routers[router_id] = _Router(incarnation)
        return self._place(now)

    def router_left(self, router_id: str, incarnation: str, now: float) -> list[Decision]:
        """Take its wants out, which it sends again when it is back; keep its grants for a while."""
        router = self._routers.get(router_id)
        if router is not None and router.incarnation == incarnation:
            router.lost_at = now
            self._queue.remove_router(router_id)
        return self._place(now)

    def want(self, router_id: str, want: Want, now: float) -> list[Decision]:
        """Queue a want, or answer it at once; one that has a live grant gets the same again."""
        key = (want.request_id, want.attempt)
        record = self._ledger.grant_for(key)
        if record is not None and not record.is_taken_back:
            record.router_id = router_id
            return [SendGrant(router_id=router_id, grant=record.grant)]
        if record is not None:
            self._ledger.remove_grant(record)
        error: PdserveError | None = self._placement.objection(want)
        # One that has waited already, or whose workers failed it, was let in before.
        is_known = key in self._queue or want.is_resent or want.attempt > 0
        if error is None and not is_known and self._is_full(now):
            error = QueueFull(
                f"{len(self._queue)} requests wait already",
                stage="queue",
                retry_after_s=self._retry_after_s(now),
            )
        if error is not None:
            return [self._reject(router_id, want, error)]
        self._queue.add(want, router_id, now)
        return self._place(now)

    def cancel_want(self, request_id: str, attempt: int, now: float) -> list[Decision]:
        """Forget a want; a grant that has crossed comes back as ``done``."""
        self._queue.remove((request_id, attempt))
        return self._place(now)

    def done(self, grant_id: str, num_output_tokens: int, now: float) -> list[Decision]:
        """End a grant; what its workers still report of it counts until they don't."""
        record = self._ledger.grants.get(grant_id)
        if record is None:
            return []
        self._costs.note_output(num_output_tokens)
        self._ledger.mark_done(record, now)
        self._ledger.remove_grant(record)
        return self._place(now)

    # ---- workers

    def register(self, registration: Registration, now: float) -> list[Decision]:
        """Let a worker in; raises StartupError, saying why, where it may not join."""
        return [*self._members.register(registration, now), *self._place(now)]

    def report(
        self, worker_id: str, incarnation: str, report: WorkerReport, now: float
    ) -> list[Decision]:
        """Take a report in. One of a worker that was declared dead changes nothing."""
        self._members.report(worker_id, incarnation, report, now)
        return self._place(now)

    def worker_stream_lost(self, worker_id: str, incarnation: str, now: float) -> list[Decision]:
        """Suspect a worker at once; it is dead unless it is back within the grace."""
        self._members.stream_lost(worker_id, incarnation, now)
        return []

    def worker_left(
        self, worker_id: str, incarnation: str, reason: str, now: float
    ) -> list[Decision]:
        """Forget a worker that has taken its leave."""
        return [*self._members.left(worker_id, incarnation, reason), *self._place(now)]

    # ---- time

    def tick(self, now: float) -> list[Decision]:
        """Judge everything that time judges."""
        if now - self._ticked_at > self._settings.gap_s:
            logger.warning("away for %.1f s: timers start again", now - self._ticked_at)
            self._ledger.rearm(now)
            for router in self._routers.values():
                router.lost_at = None if router.lost_at is None else now
        self._ticked_at = now
        decisions = self._members.judge(now)
        self._drop_lost_routers(now)
        for grant_id in self._ledger.take_back_unseen(now - self._settings.unseen_grant_s):
            logger.warning("grant=%s taken back: reported by nobody", grant_id)
        for record in self._ledger.idle_grants(now, 10.0 * self._settings.orphan_s):
            logger.warning("grant=%s forgotten: no worker has it", record.grant.grant_id)
            self._ledger.remove_grant(record)
        return decisions + self._members.orphans(now) + self._place(now)

    def view(self, now: float) -> ClusterView:
        """Show everything."""
        workers = tuple(
            WorkerView(
                worker=entry.registration,
                report=entry.report,
                health=entry.health,
                report_age_s=now - entry.reported_at,
                num_granted=len(entry.unseen),
            )
            for _, entry in sorted(self._ledger.workers.items())
        )
        return ClusterView(
            term=self.term,
            workers=workers,
            links=self._ledger.links.view(now),
            num_waiting=len(self._queue),
            waiting_tokens=self._queue.num_tokens,
            num_granted=len(self._ledger.grants),
            num_routers=sum(router.lost_at is None for router in self._routers.values()),
            max_queue_requests=self._config.scheduling.max_queue_requests,
            retry_after_s=self._retry_after_s(now),
        )

    def check(self) -> None:
        """Prove the ledger's invariants; AssertionError is a bug of ours."""
        self._ledger.check()

    # ---- placing

    def _place(self, now: float) -> list[Decision]:
        """Walk the queue oldest first and grant what has room."""
        decisions: list[Decision] = []
        held: set[str] = set()
        stuck: set[Hashable] = set()
        for waiting in self._queue:
            want = waiting.want
            if now >= waiting.deadline:
                self._queue.remove(waiting.key)
                decisions.append(self._reject(waiting.router_id, want, _deadline_passed()))
                continue
            # Among wants that may use the same workers the first one without room stops the rest.
            kind = self._placement.kind(want)
            if kind in stuck:
                continue
            choice = self._placement.choose(want, held, now)
            if isinstance(choice, Choice):
                self._queue.remove(waiting.key)
                decisions.append(self._grant(waiting, choice, now))
            elif isinstance(choice, NoRoute):
                decisions += self._without_route(waiting, choice, now)
            else:
                stuck.add(kind)
                held |= choice.lacking
        return decisions

    def _grant(self, waiting: Waiting, choice: Choice, now: float) -> SendGrant:
        want, route, order = waiting.want, choice.route, next(self._orders)
        grant_id = f"{self.term:x}-{order}"
        grant = Grant(
            term=self.term,
            grant_id=grant_id,
            request_id=want.request_id,
            attempt=want.attempt,
            prefill=_placed(route.prefill),
            decode=_placed(route.decode),
            handoff_id=f"h-{grant_id}" if route.pools is not None else "",
            reason=choice.reason,
            predicted_s=choice.first_token_s,
        )
        record = GrantRecord(
            grant=grant,
            router_id=waiting.router_id,
            charges=self._placement.charges(route, want),
            pools=route.pools,
            transfer_bytes=self._costs.transfer_bytes(route, want),
        )
        self._ledger.add_grant(record, order, now)
        self._granted_at.append(now)
        logger.info("request=%s/%d grant=%s %s", *waiting.key, grant_id, choice.reason)
        return SendGrant(router_id=waiting.router_id, grant=grant)

    def _without_route(self, waiting: Waiting, missing: NoRoute, now: float) -> list[Decision]:
        if self._is_reconciling(now):
            return []
        self._queue.remove(waiting.key)
        error = NoWorker(
            f"no {missing.role} worker is ready",
            stage="placement",
            retry_after_s=_NO_WORKER_RETRY_S,
        )
        return [self._reject(waiting.router_id, waiting.want, error)]

    def _reject(self, router_id: str, want: Want, error: PdserveError) -> SendReject:
        logger.info("request=%s/%d rejected: %s", want.request_id, want.attempt, error.code)
        reject = Reject(request_id=want.request_id, attempt=want.attempt, error=error)
        return SendReject(router_id=router_id, reject=reject)

    def _is_reconciling(self, now: float) -> bool:
        return now - self._started_at < self._settings.reconcile_s

    def _is_full(self, now: float) -> bool:
        limit = self._config.scheduling.max_queue_requests
        return len(self._queue) >= limit and not self._is_reconciling(now)

    def _retry_after_s(self, now: float) -> float:
        """Estimate when half of the queue will be gone, by the rate of the last grants."""
        low, high = _RETRY_RANGE_S
        if not self._queue:
            return low
        if len(self._granted_at) < 2:
            return _NO_WORKER_RETRY_S
        per_grant_s = (now - self._granted_at[0]) / len(self._granted_at)
        return min(high, max(low, per_grant_s * len(self._queue) / 2))

    # ---- ends

    def _drop_lost_routers(self, now: float) -> None:
        for router_id, router in list(self._routers.items()):
            if router.lost_at is None or now - router.lost_at <= self._settings.router_grace_s:
                continue
            logger.warning("router=%s gone: its stream did not come back", router_id)
            for record in self._grants_of(router_id):
                # Its legs may run on: a router needs no control plane for them.
                self._ledger.remove_grant(record)
            del self._routers[router_id]

    def _drop_router(self, router_id: str, now: float) -> None:
        for record in self._grants_of(router_id):
            self._ledger.mark_done(record, now)
            self._ledger.remove_grant(record)

    def _grants_of(self, router_id: str) -> list[GrantRecord]:
        return [r for r in self._ledger.grants.values() if r.router_id == router_id]


def _placed(entry: WorkerEntry | None) -> Placed | None:
    if entry is None:
        return None
    registration = entry.registration
    return Placed(
        worker_id=registration.worker_id,
        incarnation=registration.incarnation,
        address=registration.address,
        pool=registration.pool,
    )


def _deadline_passed() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed in the queue", stage="queue")
