"""The control plane's mind, without I/O: facts and ``now`` in, decisions out.

A want's life here:
    1. ``want``: refused at once where it can never be served or the queue is full, else queued:
       exports first (in their tier, where tiers take from one another), then in the policy's order,
       by the time it has waited in all
    2. ``_place``: after every fact that may have made room, the queue is walked in the policy's
       order; a want that has no room now is passed by those that do, but holds the workers it
       lacks against all who are younger by more than the aging bound (``blocking``)
    3. granted: the ledger charges its workers until their reports show the legs, and what these
       leave when they end; or rejected: deadline, no worker of a role, an export that is gone
    4. ``done``: the router is through with it, well or not

For ``reconcile_s`` after the start nobody is rejected for want of room or workers: the workers and
the wants of an earlier control plane are still coming back. After that a fresh request is rejected
as soon as no worker of a needed role is alive or suspected; one that was being served waits
``replacement_wait_s`` for another, and one whose KV waits as an export as long as that is kept: its
router withdraws the want when the lease is over.

An export's want names the grant of its PREFILL leg. The grant that answers it charges its decode
worker only; what the first grant was charged for the prefill leg counts until that leg ends.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.control import overload, readiness
from cluster.control.blocking import BlockedWants
from cluster.control.costs import Choice, CostModel
from cluster.control.decisions import Decision, SendGrant, SendReject
from cluster.control.ends import Ends
from cluster.control.entrance import Entrance
from cluster.control.facts import (
    ClusterView,
    Registration,
    Reject,
    Want,
    WorkerReport,
    WorkerView,
)
from cluster.control.granting import Granter
from cluster.control.ledger import Ledger
from cluster.control.links import LinkTable
from cluster.control.load import load_of
from cluster.control.membership import Membership
from cluster.control.placement import Placement
from cluster.control.routers import Routers
from cluster.control.unplaced import Blocked, NoExport, NoRoute
from cluster.control.waiting import Waiting, WaitingQueue
from cluster.errors import (
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NoWorker,
    PdserveError,
)
from cluster.policy.order import Ordering

if TYPE_CHECKING:
    from cluster.config import DeployConfig, Role
    from cluster.control.ledger import GrantRecord
    from cluster.control.settings import ControlSettings
    from cluster.policy.load import Load

logger = logging.getLogger(__name__)

_NO_WORKER_RETRY_S = 2.0


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
        self._costs = CostModel(
            self._ledger,
            settings.expected_output_tokens,
            frozenset(pool.name for pool in config.pools if pool.prefix_cache),
        )
        self._placement = Placement(config, self._ledger, self._costs, settings)
        self._queue = WaitingQueue(config.scheduling, self._placement.rule)
        self._entrance = Entrance(config.scheduling, self._queue, self._ledger, self._costs)
        self._ends = Ends(self._ledger, self._queue, self._costs)
        self._routers = Routers(settings.router_grace_s)
        self._counts: Counter[str] = Counter()
        self._granter = Granter(
            term=term,
            ledger=self._ledger,
            rule=self._placement.rule,
            costs=self._costs,
            counts=self._counts,
            ordering=Ordering.of(config.scheduling),
        )

    # ---- routers

    def router_joined(self, router_id: str, incarnation: str, now: float) -> list[Decision]:
        """Take a router's stream; another incarnation under its id is gone for good."""
        if self._routers.joined(router_id, incarnation):
            self._ends.router_gone(router_id, now)
        self._queue.remove_router(router_id)
        return self._place(now)

    def router_left(self, router_id: str, incarnation: str, now: float) -> list[Decision]:
        """Take its wants out, which it sends again when it is back; keep its grants for a while."""
        if self._routers.left(router_id, incarnation, now):
            self._queue.remove_router(router_id)
        return self._place(now)

    def want(self, router_id: str, want: Want, now: float) -> list[Decision]:
        """Queue a want, or answer it at once; one that has a live grant gets the same again."""
        key = (want.request_id, want.attempt)
        record = self._answer_to(want)
        if record is not None and not record.is_taken_back:
            record.router_id = router_id
            self._ledger.sent_again(record, now)
            return [SendGrant(router_id=router_id, grant=record.grant)]
        if record is not None:
            self._ends.replaced(record)
        if want.export is not None:
            self._ledger.export_waits(want.export)
        error: PdserveError | None = self._objection(want)
        # It has waited already, its workers have failed it, or its call has other choices.
        was_let_in = key in self._queue or want.is_resent or _was_served(want)
        was_let_in |= bool(want.cached_on)
        if error is None and not was_let_in and not self._is_reconciling(now):
            error = self._entrance.refusal(want, now)
        if error is not None:
            self._queue.remove(key)
            return [self._reject(router_id, want, error)]
        self._queue.add(want, router_id, now)
        return self._place(now)

    def _objection(self, want: Want) -> PdserveError | None:
        try:
            self._queue.check(want)
        except InvalidRequest as error:
            return error
        return self._placement.objection(want)

    def _answer_to(self, want: Want) -> GrantRecord | None:
        """Return the grant that a want has got before."""
        record = self._ledger.grant_for((want.request_id, want.attempt))
        if record is None or want.export is None:
            return record
        # The grant that made the export has the same key, and is no answer to its want.
        return None if record.grant.grant_id == want.export.grant_id else record

    def cancel_want(self, request_id: str, attempt: int, now: float) -> list[Decision]:
        """Forget a want that has had no answer, and a grant that crosses this or was lost."""
        key = (request_id, attempt)
        record = self._ledger.grant_for(key)
        if self._queue.remove(key) is None and record is not None:
            return self.done(record.grant.grant_id, 0, now)
        return self._place(now)

    def done(
        self, grant_id: str, num_output_tokens: int, now: float, *, whole_output_tokens: int = 0
    ) -> list[Decision]:
        """End a grant; what its workers still report of it counts until they don't.

        ``whole_output_tokens``: of all its request's grants, if that has ended well.
        """
        record = self._ledger.grants.get(grant_id)
        if record is None:
            return []
        self._ends.done(record, num_output_tokens, whole_output_tokens, now)
        return self._place(now)

    # ---- workers

    def register(self, registration: Registration, now: float) -> list[Decision]:
        """Let a worker in; raises StartupError, saying why, where it may not join."""
        return [*self._members.register(registration, now), *self._place(now)]

    def refused(self, worker_id: str, pool: str, reason: str, now: float) -> None:
        """Keep a registration that could not even be read, for the view."""
        self._members.refusals.add(worker_id, pool, reason, now)

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

    def take_order(self, worker_id: str, role: Role | None, now: float) -> Registration:
        """Return the worker that is to drain, or with a ``role`` to take that; note that it is.

        Raises InvalidRequest, naming the worker or the role, where it cannot be told to.
        """
        return self._members.take_order(worker_id, role, now)

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
            self._routers.rearm(now)
        self._ticked_at = now
        decisions = self._members.judge(now)
        self._drop_lost_routers(now)
        taken_back = self._members.unseen(now)
        self._counts["grants_taken_back"] += taken_back.num_legs
        decisions += taken_back.decisions
        for record in self._ledger.idle_grants(now, 10.0 * self._settings.orphan_s):
            logger.warning("grant=%s forgotten: no worker has it", record.grant.grant_id)
            self._ends.forgotten(record)
        return decisions + self._members.orphans(now) + self._place(now, is_tick=True)

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
        load, bounds = self._entrance.shown(now), self._entrance.bounds
        return ClusterView(
            term=self.term,
            workers=workers,
            links=self._ledger.links_view(now),
            num_waiting=load.num_requests,
            waiting_tokens=load.num_tokens,
            num_granted=len(self._ledger.grants),
            num_routers=self._routers.num_connected,
            max_queue_requests=bounds.max_requests,
            retry_after_s=overload.retry_after_s(load),
            refused=self._members.refusals.view(now),
            is_reconciling=self._is_reconciling(now),
            max_queue_tokens=bounds.max_tokens,
            tenant_queue_share=bounds.tenant_share,
            request_s=load.request_s,
            are_tenants_fair=load.is_fair,
            waiting_tenants=load.tenants,
            waiting_standings=load.standings,
            counters={
                **self._counts,
                "registrations_refused": self._members.refusals.num_refused,
                "workers_died": self._members.num_died,
                "kv_check_failures": self._members.num_kv_check_failures,
            },
        )

    def load(self) -> Load:
        """Return what scaling goes by."""
        return load_of(self._config.pools, self._ledger, self._costs, self._queue)

    def check(self) -> None:
        """Prove the ledger's invariants; AssertionError is a bug of ours."""
        self._ledger.check()

    # ---- placing

    def _place(self, now: float, *, is_tick: bool = False) -> list[Decision]:
        decisions = self._walk(now, is_tick=is_tick)
        self._entrance.pace.looked(now, is_waiting=len(self._queue) > 0)
        return decisions

    def _walk(self, now: float, *, is_tick: bool) -> list[Decision]:
        """Walk the queue in order and grant what has room."""
        decisions: list[Decision] = []
        for waiting in self._queue.take_expired(now):
            decisions.append(self._reject(waiting.router_id, waiting.want, _deadline_passed()))
        blocked = BlockedWants(
            self._queue, self._placement, may_fall_back=not self._is_reconciling(now)
        )
        if not self._may_place(blocked, is_tick=is_tick):
            return decisions
        walk = self._queue.walk(now, blocked)
        for waiting in walk:
            if blocked.stops(waiting):
                walk.close_if(waiting.group, blocked.stops_group(waiting))
                continue
            want = self._effective(waiting, now)
            held = blocked.held_from(waiting)
            outcome = self._placement.choose(
                want, waiting.needs, held, now, may_fall_back=blocked.may_fall_back
            )
            if isinstance(outcome, Choice):
                self._queue.remove(waiting.key)
                counted = self._queue.granted(waiting)
                self._entrance.pace.granted(now, has_waited=now > waiting.entered)
                decisions.append(self._granter.grant(waiting, outcome, now, counted))
                blocked.look_again()
                if blocked.is_hopeless():
                    break
            elif isinstance(outcome, Blocked):
                self._has_no_room(waiting, want, blocked)
                walk.close_if(waiting.group, not held)
            else:
                decisions += self._without_route(waiting, outcome, now)
        return decisions

    def _may_place(self, blocked: BlockedWants, *, is_tick: bool) -> bool:
        """Whether somebody may have room now who had none at the last walk.

        Where nobody has more room than then, and nobody went, only those who came may have some, or
        time has changed something: each tick looks at all.
        """
        has_grown, (has_left, newcomers) = self._placement.take_growth(), self._queue.take_news()
        if has_grown or has_left or is_tick or self._queue.num_special:
            return not blocked.is_hopeless()
        return any(map(blocked.admits, newcomers))

    def _has_no_room(self, waiting: Waiting, want: Want, blocked: BlockedWants) -> None:
        if waiting.routeless_since is not None and want is waiting.want:
            self._queue.note_route(waiting, None)
        blocked.add(waiting, want)

    def _effective(self, waiting: Waiting, now: float) -> Want:
        """Return the want as it is placed now: nobody is avoided when nobody else came."""
        want, since = waiting.want, waiting.routeless_since
        if want.avoid and since is not None and now - since >= self._settings.avoid_s:
            return replace(want, avoid=())
        return want

    def _without_route(
        self, waiting: Waiting, missing: NoRoute | NoExport, now: float
    ) -> list[Decision]:
        if self._is_reconciling(now):
            return []
        if isinstance(missing, NoExport):
            return self._give_up(
                waiting, HandoffFailed("the KV is where nobody gets it from", stage="placement")
            )
        if waiting.routeless_since is None:
            self._queue.note_route(waiting, now)
        if waiting.want.export is not None:
            return []
        wait_s = self._settings.replacement_wait_s if _was_served(waiting.want) else 0.0
        if now - (waiting.routeless_since or now) < wait_s:
            return []
        error = NoWorker(
            readiness.lack([missing.role], self._members.refusals.view(now)),
            stage="placement",
            retry_after_s=_NO_WORKER_RETRY_S,
        )
        return self._give_up(waiting, error)

    def _give_up(self, waiting: Waiting, error: PdserveError) -> list[Decision]:
        self._queue.remove(waiting.key)
        return [self._reject(waiting.router_id, waiting.want, error)]

    def _reject(self, router_id: str, want: Want, error: PdserveError) -> SendReject:
        logger.info("request=%s/%d rejected: %s", want.request_id, want.attempt, error.code)
        reject = Reject(request_id=want.request_id, attempt=want.attempt, error=error)
        return SendReject(router_id=router_id, reject=reject)

    def _is_reconciling(self, now: float) -> bool:
        return now - self._started_at < self._settings.reconcile_s

    # ---- ends

    def _drop_lost_routers(self, now: float) -> None:
        for router_id in self._routers.take_lost(now):
            logger.warning("router=%s gone: its stream did not come back", router_id)
            self._ends.router_lost(router_id)


def _was_served(want: Want) -> bool:
    """Tell a request that has had a grant from a fresh one."""
    return want.attempt > 0 or want.export is not None


def _deadline_passed() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed in the queue", stage="queue")
