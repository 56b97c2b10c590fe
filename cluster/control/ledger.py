"""Who holds what: the workers with their legs, and the grants that routers are not through with.

``worker_entry`` counts what a worker has.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from cluster.config import Role
from cluster.control.admission import block_bytes
from cluster.control.facts import BlockCounts, Grant, Health, Registration, WorkerReport
from cluster.control.prefixes import PrefixTable
from cluster.control.shunned import ShunnedLinks
from cluster.control.worker_entry import Charge, WorkerEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cluster.control.facts import ExportRef, LinkView
    from cluster.control.links import LinkTable

WantKey = tuple[str, int]
"""(request_id, attempt)."""

_MAX_REMEMBERED = 1024
_PREFILLED = "prefilled_tokens"


class Counted(NamedTuple):
    """Tokens of one request that count as served."""

    prompt_tokens: int
    output_tokens: float


NOTHING_COUNTED = Counted(0, 0.0)


@dataclass(slots=True, kw_only=True)
class GrantRecord:
    """A grant that its router is not through with."""

    grant: Grant
    router_id: str
    charges: Mapping[str, Charge]
    """By worker."""
    pools: tuple[str, str] | None = None
    """Of the prefill and the decode worker, where KV moves between two."""
    transfer_bytes: int = 0
    export_grant_id: str = ""
    """The grant of the PREFILL leg whose export this one passes on; its worker is not charged."""
    tenant: str = ""
    tier: int = 0
    """In which its tenant is served."""
    counted: Counted = NOTHING_COUNTED
    """As its tenant's, when it was granted."""
    is_in_flight: bool = False
    """Whether ``transfer_bytes`` still count on the link of its pair."""
    is_taken_back: bool = False
    """A worker died, or did not report its leg in time: the same want gets another grant."""
    idle_since: float | None = None
    """Since when no worker has anything of it."""

    @property
    def key(self) -> WantKey:
        """The want that it answers."""
        return (self.grant.request_id, self.grant.attempt)

    @property
    def pair(self) -> tuple[str, str]:
        """Its prefill and its decode worker; where there is one only, it is named alone."""
        prefill, decode = self.grant.prefill, self.grant.decode
        return (prefill.worker_id if prefill else "", decode.worker_id if decode else "")

    @property
    def incarnations(self) -> tuple[str, str]:
        """The same two by their incarnations."""
        prefill, decode = self.grant.prefill, self.grant.decode
        return (prefill.incarnation if prefill else "", decode.incarnation if decode else "")


class Ledger:
    """Workers and grants. Keeps the sums, also of the bytes under way; decides nothing."""

    def __init__(self, links: LinkTable) -> None:
        self.links = links
        self.workers: dict[str, WorkerEntry] = {}
        self.grants: dict[str, GrantRecord] = {}
        self.num_changes = 0
        """How often workers have come or gone, begun to drain, or hung or no longer."""
        self.changed: set[str] = set()
        """Workers that changed in what placing depends on; whoever reads it empties it."""
        self.prefilled_tokens: defaultdict[str, float] = defaultdict(float)
        """By pool, as they were reported: it never falls, whoever comes and goes."""
        self._of_role: dict[Role, dict[str, WorkerEntry]] = {}
        self._num_of: Counter[tuple[str, Role]] = Counter()
        self.prefixes = PrefixTable()
        """Which prompts' beginnings each worker has."""
        self.shunned = ShunnedLinks()
        self.max_model_len: int | None = None
        """Of the worker with the longest context; None without workers."""
        self._by_want: dict[WantKey, str] = {}
        self._route_orders: dict[tuple[str, ...], int] = {}
        self._done: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        """The workers of grants that ended lately."""

    def add_worker(self, registration: Registration, now: float) -> WorkerEntry:
        """Enter a worker, or keep the entry of the same incarnation.

        It is suspected until its first report: only that says what it already holds.
        """
        entry = self.workers.get(registration.worker_id)
        if entry is None or entry.registration.incarnation != registration.incarnation:
            empty = WorkerReport(blocks=BlockCounts(free=registration.num_blocks))
            entry = WorkerEntry(registration, empty, now, self.changed)
            entry.block_bytes = block_bytes(registration.layout)
            self.workers[registration.worker_id] = entry
            self._num_of[registration.pool, registration.role] += 1
            self._list(entry)
        # What an earlier stream had under way was perhaps lost with it: what is gone, too.
        self.prefixes.forget(registration.worker_id)
        entry.registered(registration)
        self.max_model_len = max(self.max_model_len or 0, registration.max_model_len)
        entry.lost_at, entry.reported_at, entry.moved_at = None, now, now
        self.judge(entry, Health.SUSPECTED)
        return entry

    def judge(self, entry: WorkerEntry, health: Health) -> None:
        """Think so of a worker from now on."""
        if health is not entry.health and Health.STALLED in (health, entry.health):
            self.num_changes += 1
        entry.judge(health)

    def of_role(self, role: Role) -> Iterable[WorkerEntry]:
        """Return the workers of a role, but those that drain: they take nothing new."""
        return self._of_role.get(role, {}).values()

    def roles_of(self, pool: str) -> frozenset[Role]:
        """Return the roles in which workers of a pool serve, those that drain too."""
        return frozenset(role for role in Role if self._num_of[pool, role])

    def entry(self, worker_id: str, incarnation: str) -> WorkerEntry | None:
        """Return the entry of exactly this incarnation."""
        entry = self.workers.get(worker_id)
        if entry is None or entry.registration.incarnation != incarnation:
            return None
        return entry

    def remove_worker(self, worker_id: str) -> int:
        """Forget a worker and take back every grant with a leg on it; returns their number.

        Their legs on other workers may be starting: they count until the router is done with the
        grant, or until nobody has reported them in time.
        """
        entry = self.workers.pop(worker_id)
        self._num_of[entry.registration.pool, entry.registration.role] -= 1
        self._unlist(entry)
        lengths = (entry.registration.max_model_len for entry in self.workers.values())
        self.max_model_len = max(lengths, default=None)
        self.changed.add(worker_id)
        orders = self._route_orders.items()
        self._route_orders = {route: order for route, order in orders if worker_id not in route}
        lost = [
            record
            for record in self.grants.values()
            if worker_id in record.charges or worker_id == record.pair[0]
        ]
        for record in lost:
            record.is_taken_back = True
            self._end_transfer(record)
        self.links.forget(worker_id)
        self.prefixes.forget(worker_id)
        self.shunned.learn(entry.registration.incarnation, (), 0.0)
        return len(lost)

    def add_grant(self, record: GrantRecord, order: int, now: float) -> None:
        """Enter a grant; each of its workers is charged at once."""
        self.grants[record.grant.grant_id] = record
        self._by_want[record.key] = record.grant.grant_id
        for worker_id, charge in record.charges.items():
            entry = self.workers[worker_id]
            entry.last_granted = order
            entry.charge(record.grant.grant_id, charge, now)
        self._route_orders[tuple(record.charges)] = order
        if record.pools is not None:
            record.is_in_flight = True
            self.links.started(record.pair, record.pools, record.transfer_bytes)
            self.shunned.tried(record.incarnations, now)
        if record.export_grant_id:
            sender = self.workers[record.pair[0]]
            sender.sending[record.grant.grant_id] = record.export_grant_id

    def sent_again(self, record: GrantRecord, now: float) -> None:
        """Give the workers of a grant their time anew: its router has only now heard of it."""
        for entry in self._entries_of(record):
            entry.sent_again(record.grant.grant_id, now)

    def export_waits(self, export: ExportRef) -> None:
        """Forget the decode legs of all grants that an export had so far: their handoffs failed.

        The prefill leg's charge lives on until the leg ends.
        """
        sender = self.entry(export.worker_id, export.incarnation)
        sent = sender.sending.items() if sender is not None else ()
        failed = [grant_id for grant_id, leg in sent if leg == export.grant_id]
        for grant_id in [export.grant_id, *failed]:
            record = self.grants.get(grant_id)
            if record is None:
                continue
            self._end_transfer(record)
            receiver = self.workers.get(record.pair[1])
            if receiver is not None:
                receiver.drop_unseen(grant_id)

    def last_granted(self, worker_ids: tuple[str, ...]) -> int:
        """Return the order of the last grant to exactly these workers; 0 before the first."""
        return self._route_orders.get(worker_ids, 0)

    def grant_for(self, key: WantKey) -> GrantRecord | None:
        """Return the grant that lives for this want."""
        return self.grants.get(self._by_want.get(key, ""))

    def remove_grant(self, record: GrantRecord) -> None:
        """Forget a grant; its unseen legs are free at once, the others when reported gone."""
        grant_id = record.grant.grant_id
        del self.grants[grant_id]
        if self._by_want.get(record.key) == grant_id:
            del self._by_want[record.key]
        for entry in self._entries_of(record):
            entry.drop_unseen(grant_id)
        self._end_transfer(record)

    def has_begun(self, record: GrantRecord) -> bool:
        """Whether its prompt has had blocks, or may have had some, where it is to be computed."""
        prefill, decode = record.pair
        entry = self.workers.get(prefill or decode)
        return entry is None or entry.has_begun(record.grant.grant_id)

    def mark_done(self, record: GrantRecord, now: float) -> None:
        """Remember since when the legs that are still reported should be gone."""
        grant_id = record.grant.grant_id
        self._done[grant_id] = tuple(record.charges)
        if len(self._done) > _MAX_REMEMBERED:
            self._done.popitem(last=False)
        for entry in self._entries_of(record):
            if grant_id in entry.held:
                entry.done_at.setdefault(grant_id, now)

    def take_report(self, entry: WorkerEntry, report: WorkerReport, now: float) -> None:
        """Take a report in, with its transfer samples."""
        self._note_draining(entry, report)
        self._note_prefilled(entry, report)
        report = self._without_gone(entry, report)
        for grant_id in entry.take(report, now):
            ended = self.grants.get(grant_id)
            if ended is not None and ended.pair[0] == entry.worker_id:
                self._end_transfer(ended)
        for grant_id, leg_grant_id in list(entry.sending.items()):
            if leg_grant_id not in entry.held:
                self._end_transfer(self.grants[grant_id])
        self._learn(entry, report, now)
        self.shunned.learn(entry.registration.incarnation, report.broken_links, now)
        for grant_id in entry.held - entry.charges.keys():
            if entry.worker_id in self._done.get(grant_id, ()):
                # It was on its way when its router was done with it, or its worker was away.
                entry.done_at.setdefault(grant_id, now)
            record = self.grants.get(grant_id)
            charge = record.charges.get(entry.worker_id) if record is not None else None
            if charge is not None:
                entry.restore(grant_id, charge)

    def _note_prefilled(self, entry: WorkerEntry, report: WorkerReport) -> None:
        before = entry.report.counters.get(_PREFILLED)
        # The first report of an entry tells what was computed before anybody here looked.
        if before is not None:
            computed = report.counters.get(_PREFILLED, before) - before
            self.prefilled_tokens[entry.registration.pool] += max(0.0, computed)

    def take_back_unseen(self, granted_before: float) -> list[tuple[WorkerEntry, str]]:
        """Free the unseen legs of grants older than that; returns (worker, grant) of each."""
        taken: list[tuple[WorkerEntry, str]] = []
        for entry in self.workers.values():
            for grant_id, granted_at in list(entry.unseen.items()):
                if granted_at < granted_before:
                    entry.drop_unseen(grant_id)
                    taken.append((entry, grant_id))
                    if grant_id in self.grants:
                        self.grants[grant_id].is_taken_back = True
                        self._end_transfer(self.grants[grant_id])
        return taken

    def idle_grants(self, now: float, idle_s: float) -> list[GrantRecord]:
        """Return the grants that no worker has had anything of for ``idle_s``.

        What was granted for an export after its first grant is that grant's too.
        """
        idle = []
        followed = {record.export_grant_id for record in self.grants.values()}
        for record in self.grants.values():
            grant_id = record.grant.grant_id
            if grant_id in followed or any(
                grant_id in entry.charges for entry in self._entries_of(record)
            ):
                record.idle_since = None
            elif record.idle_since is None:
                record.idle_since = now
            elif now - record.idle_since > idle_s:
                idle.append(record)
        return idle

    def rearm(self, now: float) -> None:
        """Start every timer again: we were the ones who were away."""
        for entry in self.workers.values():
            entry.reported_at = entry.moved_at = now
            entry.lost_at = None if entry.lost_at is None else now
            entry.unseen = dict.fromkeys(entry.unseen, now)
            entry.done_at = dict.fromkeys(entry.done_at, now)

    def links_view(self, now: float) -> tuple[LinkView, ...]:
        """Show the links; one whose samples did not say what moves its bytes has its sender's."""
        return tuple(
            replace(link, transport=sender.registration.transport)
            if not link.transport and (sender := self.workers.get(link.prefill_worker_id))
            else link
            for link in self.links.view(now)
        )

    def check(self) -> None:
        """Prove what must always hold; AssertionError is a bug of ours."""
        for entry in self.workers.values():
            assert entry.unseen.keys() <= entry.charges.keys(), entry.worker_id
            assert not entry.unseen.keys() & entry.held, entry.worker_id
            assert entry.sending.keys() <= self.grants.keys(), entry.worker_id
            entry.check()
        for key, grant_id in self._by_want.items():
            assert self.grants[grant_id].key == key, key

    def _list(self, entry: WorkerEntry) -> None:
        self._of_role.setdefault(entry.registration.role, {})[entry.worker_id] = entry
        self.num_changes += 1

    def _note_draining(self, entry: WorkerEntry, report: WorkerReport) -> None:
        if report.is_draining is not entry.report.is_draining:
            self._unlist(entry)

    def _unlist(self, entry: WorkerEntry) -> None:
        self._of_role[entry.registration.role].pop(entry.worker_id, None)
        self.num_changes += 1

    def _without_gone(self, entry: WorkerEntry, report: WorkerReport) -> WorkerReport:
        """Learn what its cache has no more; returns the report without it, as views show it."""
        if not (report.gone_prefixes or report.has_lost_prefixes):
            return report
        if report.has_lost_prefixes:
            self.prefixes.forget(entry.worker_id)
        self.prefixes.drop(entry.worker_id, report.gone_prefixes)
        return replace(report, gone_prefixes=(), has_lost_prefixes=False)

    def _learn(self, entry: WorkerEntry, report: WorkerReport, now: float) -> None:
        for sample in report.transfers:
            peer = self.workers.get(sample.peer_worker_id)
            if peer is not None:
                pools = (entry.registration.pool, peer.registration.pool)
                pair = (entry.worker_id, peer.worker_id)
                self.links.observe(pair, pools, sample, now)

    def _end_transfer(self, record: GrantRecord) -> None:
        if record.is_in_flight:
            record.is_in_flight = False
            self.links.ended(record.pair, record.transfer_bytes)
        sender = self.workers.get(record.pair[0])
        if sender is not None:
            sender.sending.pop(record.grant.grant_id, None)

    def _entries_of(self, record: GrantRecord) -> Iterator[WorkerEntry]:
        for worker_id in record.charges:
            if worker_id in self.workers:
                yield self.workers[worker_id]
