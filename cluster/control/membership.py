"""Which workers there are, and which of them live: joining, reporting, falling silent, leaving.

    registered (suspected) --report--> ALIVE --silence, or a broken stream--> SUSPECTED --report on
    a live stream--> ALIVE; SUSPECTED for too long, replaced or left: forgotten, with its grants
    ALIVE --a step that takes too long--> STALLED --a report of another step--> ALIVE

A worker that reports that it drains keeps what it has and gets nothing new (``ledger.of_role``,
``fleet``), until it leaves. It alone knows: an order to drain, or to come back in another role, is
checked here and passed on, and who starts anew as a control plane learns it from the next report.

Routers are told of the dead, and drop all they have there. Of a worker that takes its leave in
peace they hear nothing here: its legs may run to their end, and the streams to it say when they do.

A worker that was declared dead and is not may register again, also under the same incarnation; one
that was replaced by another incarnation may not: two processes would take turns.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.control import admission
from cluster.control.admission import Refusals
from cluster.control.decisions import AbortLegs, Decision, SendReject, WorkerDied
from cluster.control.facts import Health, Registration, Reject, WorkerReport
from cluster.errors import InvalidRequest, StartupError, WorkerLost

if TYPE_CHECKING:
    from cluster.config import DeployConfig, Role
    from cluster.control.ledger import Ledger
    from cluster.control.settings import ControlSettings
    from cluster.control.worker_entry import WorkerEntry

logger = logging.getLogger(__name__)

_MAX_REPLACED = 1024
_MAX_SHOWN_CHARS = 64
_ORDER_S = 3.0
"""For a worker to report that it follows an order: one comes each second."""
LEFT_FOR_FAULT = "fault"
"""The reason of a leave that is a death: nothing runs there any more."""
KV_CHECK_FAILURES = "kv_check_failures"
"""A worker's counter of proofs of its pool that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBack:
    """What became of grants that their workers have not reported."""

    num_legs: int
    decisions: list[Decision]


class Membership:
    """Moves the workers of a ledger through their lives; returns who must be told."""

    def __init__(self, config: DeployConfig, ledger: Ledger, settings: ControlSettings) -> None:
        self._config = config
        self._ledger = ledger
        self._settings = settings
        self._replaced: deque[str] = deque(maxlen=_MAX_REPLACED)
        self.refusals = Refusals(config, settings.refused_keep_s)
        self.num_died = 0
        """Workers that were declared dead, and those that were not dead too."""
        self.num_kv_check_failures = 0.0
        """Of workers that are gone: a proof that fails ends its worker, and with it the counter."""

    def register(self, registration: Registration, now: float) -> list[Decision]:
        """Let a worker in; raises StartupError, saying why, where it may not join."""
        worker_id, incarnation = registration.worker_id, registration.incarnation
        if incarnation in self._replaced:
            raise StartupError("another incarnation of this worker has replaced it")
        others = [
            entry.registration
            for entry in self._ledger.workers.values()
            if entry.worker_id != worker_id
        ]
        objection = admission.objection(
            self._config, registration, others, self._settings.model_layout
        )
        if objection is not None:
            self.refusals.add(worker_id, registration.pool, objection, now)
            raise StartupError(objection)
        self.refusals.forget(worker_id)
        decisions: list[Decision] = []
        old = self._ledger.workers.get(worker_id)
        if old is not None and old.registration.incarnation != incarnation:
            self._replaced.append(old.registration.incarnation)
            decisions.append(self._bury(old, "replaced"))
        self._ledger.add_worker(registration, now)
        return decisions

    def report(self, worker_id: str, incarnation: str, report: WorkerReport, now: float) -> None:
        """Take a report in. One of a worker that was declared dead changes nothing."""
        entry = self._ledger.entry(worker_id, incarnation)
        if entry is None:
            return
        self._ledger.take_report(entry, report, now)
        if entry.lost_at is not None:
            return
        if not entry.is_stalled(now):
            self._ledger.judge(entry, Health.ALIVE)
        elif entry.health is not Health.STALLED:
            self._ledger.judge(entry, Health.STALLED)
            logger.warning("worker=%s stalled: no step in %.1f s", worker_id, now - entry.moved_at)

    def stream_lost(self, worker_id: str, incarnation: str, now: float) -> None:
        """Suspect a worker at once; it is dead unless it is back within the grace."""
        entry = self._ledger.entry(worker_id, incarnation)
        if entry is not None and entry.lost_at is None:
            entry.lost_at = now
            self._ledger.judge(entry, Health.SUSPECTED)
            logger.warning("worker=%s suspected: its stream broke", worker_id)

    def left(self, worker_id: str, incarnation: str, reason: str) -> list[Decision]:
        """Forget a worker that has taken its leave; it is dead only where a fault made it go."""
        entry = self._ledger.entry(worker_id, incarnation)
        if entry is None:
            return []
        if reason == LEFT_FOR_FAULT:
            return [self._bury(entry, "fault")]
        self._forget(entry, f"left ({reason})")
        return []

    def take_order(self, worker_id: str, role: Role | None, now: float) -> Registration:
        """Return the worker that is to drain, or with a ``role`` to take that; note that it is.

        Raises InvalidRequest, naming the worker or the role, where it cannot be told to.
        """
        entry = self._who_can(worker_id, role, now)
        entry.ordered_at = now
        return entry.registration

    def _who_can(self, worker_id: str, role: Role | None, now: float) -> WorkerEntry:
        entry = self._ledger.workers.get(worker_id)
        if entry is None:
            known = ", ".join(sorted(self._ledger.workers)) or "nobody"
            reason = f"no worker is called {worker_id[:_MAX_SHOWN_CHARS]!r}: there is {known}"
            raise InvalidRequest(reason, field="worker")
        present = entry.registration
        if entry.lost_at is not None:
            raise InvalidRequest(
                f"worker {worker_id} cannot be told: it is cut off", field="worker"
            )
        # Until its next report says so; one that does not has not heard of it.
        is_told = entry.ordered_at is not None and now - entry.ordered_at < _ORDER_S
        if entry.report.is_draining or is_told:
            raise InvalidRequest(f"worker {worker_id} drains already", field="worker")
        if role is None:
            return entry
        if role is present.role:
            raise InvalidRequest(f"worker {worker_id} is a {role.value} worker", field="role")
        pool = self._config.pool(present.pool)
        if pool.is_scaled:
            raise InvalidRequest(
                f"worker {worker_id} keeps its role: pool {pool.name} has a min and a max",
                field="role",
            )
        obstacle = admission.role_obstacle(self._config, pool, role)
        if obstacle is not None:
            raise InvalidRequest(f"worker {worker_id} cannot take {obstacle}", field="role")
        return entry

    def judge(self, now: float) -> list[Decision]:
        """Suspect the silent, forget those who were silent or cut off for too long."""
        settings, decisions = self._settings, list[Decision]()
        for entry in list(self._ledger.workers.values()):
            silent_s = now - entry.reported_at
            is_cut = entry.lost_at is not None and now - entry.lost_at > settings.stream_grace_s
            if is_cut or silent_s > settings.dead_after_s:
                decisions.append(self._bury(entry, "stream lost" if is_cut else "silent"))
            elif silent_s > settings.suspect_after_s and entry.health is not Health.SUSPECTED:
                self._ledger.judge(entry, Health.SUSPECTED)
                logger.warning("worker=%s suspected: silent for %.1f s", entry.worker_id, silent_s)
        return decisions

    def unseen(self, now: float) -> TakenBack:
        """Take back the legs that workers have not reported in time; routers hear of lost ones."""
        taken = self._ledger.take_back_unseen(now - self._settings.unseen_grant_s)
        missing: dict[str, WorkerEntry] = {}
        for entry, grant_id in taken:
            logger.warning("grant=%s worker=%s taken back: not reported", grant_id, entry.worker_id)
            # A worker that is silent may have the leg.
            if entry.health is Health.ALIVE:
                missing[grant_id] = self._missed_first(grant_id, missing.get(grant_id), entry)
        decisions = [each for item in missing.items() for each in self._lost_start(*item)]
        return TakenBack(num_legs=len(taken), decisions=decisions)

    def _missed_first(
        self, grant_id: str, known: WorkerEntry | None, entry: WorkerEntry
    ) -> WorkerEntry:
        """Of two workers that miss a grant's legs, return the one that was to compute."""
        record = self._ledger.grants.get(grant_id)
        computes = record is not None and entry.worker_id == record.pair[0]
        return entry if known is None or computes else known

    def _lost_start(self, grant_id: str, entry: WorkerEntry) -> list[Decision]:
        """Tell the router of a leg that a living worker has never heard of."""
        record = self._ledger.grants.get(grant_id)
        if record is None:
            return []
        error = WorkerLost(
            "the worker never had the leg", stage="placement", worker_id=entry.worker_id
        )
        request_id, attempt = record.key
        reject = Reject(request_id=request_id, attempt=attempt, error=error)
        return [SendReject(router_id=record.router_id, reject=reject)]

    def orphans(self, now: float) -> list[Decision]:
        """Find legs that workers still report although their routers are through with them."""
        decisions: list[Decision] = []
        for entry in self._ledger.workers.values():
            for grant_id, done_at in entry.done_at.items():
                if now - done_at > self._settings.orphan_s:
                    entry.done_at[grant_id] = now
                    decisions.append(AbortLegs(worker_id=entry.worker_id, grant_id=grant_id))
        return decisions

    def _bury(self, entry: WorkerEntry, why: str) -> WorkerDied:
        self._forget(entry, why)
        self.num_died += 1
        return WorkerDied(worker_id=entry.worker_id, incarnation=entry.registration.incarnation)

    def _forget(self, entry: WorkerEntry, why: str) -> None:
        self.num_kv_check_failures += entry.report.counters.get(KV_CHECK_FAILURES, 0.0)
        num_lost = self._ledger.remove_worker(entry.worker_id)
        logger.warning(
            "worker=%s incarnation=%s gone: %s; grants=%d",
            entry.worker_id, entry.registration.incarnation, why, num_lost,
        )  # fmt: skip
