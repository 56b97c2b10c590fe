"""Who holds what: each worker's last report plus the grants that it has not shown yet.

A leg of a grant is *unseen* from the grant until a report lists it, *held* while reports list it,
and gone after that. What a leg is charged (a slot, blocks, prompt tokens) counts:

    slots in use   = legs the last report lists + unseen legs
    blocks in use  = max(blocks in use by the report, charges of reserved legs)
                     + charges of unreserved and of unseen legs
    run-ahead      = prompt tokens queued by the report + prompt tokens of unseen legs

A held leg is *unreserved* while the report says that it holds no blocks yet (a decode leg waits for
its offer, a prompt for its first step). The maximum is because the others may still take some of
what they were charged, and may later hold more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.control.admission import block_bytes
from cluster.control.facts import BlockCounts, Grant, Health, Registration, WorkerReport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.control.links import LinkTable

WantKey = tuple[str, int]
"""(request_id, attempt)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What one leg takes on its worker."""

    slots: int
    blocks: int
    prompt_tokens: int
    """Prompt tokens that it will compute there."""


@dataclass(slots=True)
class WorkerEntry:
    """One registered worker."""

    registration: Registration
    report: WorkerReport
    reported_at: float
    lost_at: float | None = None
    """When its stream broke; None while there is one."""
    health: Health = Health.SUSPECTED
    charges: dict[str, Charge] = field(default_factory=dict)
    """Of unseen and held legs, by grant."""
    unseen: dict[str, float] = field(default_factory=dict)
    """When each unseen leg was granted."""
    done_at: dict[str, float] = field(default_factory=dict)
    """Held legs whose router is through with them, and since when."""
    last_granted: int = 0
    """Rises with each grant; for ties."""
    held: frozenset[str] = frozenset()
    block_bytes: int = 0
    _pending_blocks: int = 0
    _unseen_tokens: int = 0
    _reserved_blocks: int = 0

    @property
    def worker_id(self) -> str:
        """The worker's id."""
        return self.registration.worker_id

    @property
    def num_slots_used(self) -> int:
        """Sequences that are there or on their way."""
        report = self.report
        return max(len(self.held), report.num_running + report.num_waiting) + len(self.unseen)

    @property
    def num_blocks_free(self) -> int:
        """Blocks that nobody holds or was promised."""
        num_blocks = self.registration.num_blocks
        used = max(num_blocks - self.report.blocks.free, self._reserved_blocks)
        return num_blocks - used - self._pending_blocks

    @property
    def run_ahead_tokens(self) -> int:
        """Prompt tokens granted to it and not yet computed."""
        return self.report.queued_tokens + self._unseen_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens need here."""
        return -(-num_tokens // self.registration.block_size)

    def charge(self, grant_id: str, charge: Charge, now: float) -> None:
        """Add an unseen leg."""
        self.charges[grant_id] = charge
        self.unseen[grant_id] = now
        self._recount()

    def drop_unseen(self, grant_id: str) -> bool:
        """Take an unseen leg back; False where it is not unseen."""
        if self.unseen.pop(grant_id, None) is None:
            return False
        del self.charges[grant_id]
        self._recount()
        return True

    def take(self, report: WorkerReport, now: float) -> list[str]:
        """Take a report in; returns the grants whose legs here have ended."""
        self.report, self.reported_at = report, now
        self.held = frozenset(report.held_grants)
        for grant_id in self.held & self.unseen.keys():
            del self.unseen[grant_id]
        ended = [g for g in self.charges if g not in self.held and g not in self.unseen]
        for grant_id in ended:
            del self.charges[grant_id]
        self.done_at = {g: at for g, at in self.done_at.items() if g in self.held}
        self._recount()
        return ended

    def restore(self, grant_id: str, charge: Charge) -> None:
        """Charge a leg again that was taken back before a report listed it after all."""
        self.charges[grant_id] = charge
        self._recount()

    def _recount(self) -> None:
        unseen = [self.charges[grant_id] for grant_id in self.unseen]
        self._unseen_tokens = sum(charge.prompt_tokens for charge in unseen)
        unreserved = self.charges.keys() & set(self.report.unreserved_grants)
        pending = unreserved | self.unseen.keys()
        self._pending_blocks = sum(self.charges[grant_id].blocks for grant_id in pending)
        total = sum(charge.blocks for charge in self.charges.values())
        self._reserved_blocks = total - self._pending_blocks


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


class Ledger:
    """Workers and grants. Keeps the sums, also of the bytes under way; decides nothing."""

    def __init__(self, links: LinkTable) -> None:
        self.links = links
        self.workers: dict[str, WorkerEntry] = {}
        self.grants: dict[str, GrantRecord] = {}
        self._by_want: dict[WantKey, str] = {}
        self._route_orders: dict[tuple[str, ...], int] = {}

    def add_worker(self, registration: Registration, now: float) -> WorkerEntry:
        """Enter a worker, or keep the entry of the same incarnation.

        It is suspected until its first report: only that says what it already holds.
        """
        entry = self.workers.get(registration.worker_id)
        if entry is None or entry.registration.incarnation != registration.incarnation:
            empty = WorkerReport(blocks=BlockCounts(free=registration.num_blocks))
            entry = WorkerEntry(registration=registration, report=empty, reported_at=now)
            entry.block_bytes = block_bytes(registration.layout)
            self.workers[registration.worker_id] = entry
        entry.registration = registration
        entry.lost_at, entry.reported_at, entry.health = None, now, Health.SUSPECTED
        return entry

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
        del self.workers[worker_id]
        orders = self._route_orders.items()
        self._route_orders = {route: order for route, order in orders if worker_id not in route}
        lost = [record for record in self.grants.values() if worker_id in record.charges]
        for record in lost:
            record.is_taken_back = True
            self._end_transfer(record)
        self.links.forget(worker_id)
        return len(lost)

    def add_grant(self, record: GrantRecord, order: int, now: float) -> None:
        """Enter a grant; each of its workers is charged at once."""
        self.grants[record.grant.grant_id] = record
        self._by_want[record.key] = record.grant.grant_id
        for worker_id, charge in record.charges.items():
            entry = self.workers[worker_id]
            entry.charge(record.grant.grant_id, charge, now)
            entry.last_granted = order
        self._route_orders[tuple(record.charges)] = order
        if record.pools is not None:
            record.is_in_flight = True
            self.links.started(record.pair, record.pools, record.transfer_bytes)

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

    def mark_done(self, record: GrantRecord, now: float) -> None:
        """Remember since when the legs that are still reported should be gone."""
        for entry in self._entries_of(record):
            if record.grant.grant_id in entry.held:
                entry.done_at.setdefault(record.grant.grant_id, now)

    def take_report(self, entry: WorkerEntry, report: WorkerReport, now: float) -> None:
        """Take a report in, with its transfer samples."""
        for grant_id in entry.take(report, now):
            ended = self.grants.get(grant_id)
            if ended is not None and ended.pair[0] == entry.worker_id:
                self._end_transfer(ended)
        self._learn(entry, report, now)
        for grant_id in entry.held - entry.charges.keys():
            record = self.grants.get(grant_id)
            charge = record.charges.get(entry.worker_id) if record is not None else None
            if charge is not None:
                entry.restore(grant_id, charge)

    def take_back_unseen(self, granted_before: float) -> list[str]:
        """Free the unseen legs of grants older than that; returns the grants."""
        taken: list[str] = []
        for entry in self.workers.values():
            for grant_id, granted_at in list(entry.unseen.items()):
                if granted_at < granted_before:
                    entry.drop_unseen(grant_id)
                    taken.append(grant_id)
                    if grant_id in self.grants:
                        self.grants[grant_id].is_taken_back = True
                        self._end_transfer(self.grants[grant_id])
        return taken

    def idle_grants(self, now: float, idle_s: float) -> list[GrantRecord]:
        """Return the grants that no worker has had anything of for ``idle_s``."""
        idle = []
        for record in self.grants.values():
            grant_id = record.grant.grant_id
            if any(grant_id in entry.charges for entry in self._entries_of(record)):
                record.idle_since = None
            elif record.idle_since is None:
                record.idle_since = now
            elif now - record.idle_since > idle_s:
                idle.append(record)
        return idle

    def rearm(self, now: float) -> None:
        """Start every timer again: we were the ones who were away."""
        for entry in self.workers.values():
            entry.reported_at = now
            entry.lost_at = None if entry.lost_at is None else now
            entry.unseen = dict.fromkeys(entry.unseen, now)
            entry.done_at = dict.fromkeys(entry.done_at, now)

    def check(self) -> None:
        """Prove what must always hold; AssertionError is a bug of ours."""
        for entry in self.workers.values():
            assert entry.unseen.keys() <= entry.charges.keys(), entry.worker_id
            assert not entry.unseen.keys() & entry.held, entry.worker_id
        for key, grant_id in self._by_want.items():
            assert self.grants[grant_id].key == key, key

    def _learn(self, entry: WorkerEntry, report: WorkerReport, now: float) -> None:
        for sample in report.transfers:
            peer = self.workers.get(sample.peer_worker_id)
            if peer is not None:
                pools = (entry.registration.pool, peer.registration.pool)
                self.links.observe((entry.worker_id, peer.worker_id), pools, sample, now)

    def _end_transfer(self, record: GrantRecord) -> None:
        if record.is_in_flight:
            record.is_in_flight = False
            self.links.ended(record.pair, record.transfer_bytes)

    def _entries_of(self, record: GrantRecord) -> Iterator[WorkerEntry]:
        for worker_id in record.charges:
            if worker_id in self.workers:
                yield self.workers[worker_id]
