"""One registered worker in the ledger: its last report, and what it was granted beyond that.

A leg of a grant is *unseen* from the grant until a report lists it, *held* while reports list it,
and gone after that. What a leg is charged (a slot, blocks, prompt tokens) counts:

    slots in use   = legs the last report lists + unseen legs
    blocks in use  = max(blocks in use by the report, charges of reserved legs)
                     + charges of unreserved and of unseen legs
    run-ahead      = prompt tokens queued by the report + prompt tokens of unseen legs

A held leg is *unreserved* while the report says that it holds no blocks yet (a decode leg waits for
its offer, a prompt for its first step). The maximum is because the others may still take some of
what they were charged, and may later hold more. Cached blocks are not in use, fenced ones are.

Where higher tiers take from lower ones, a request of a higher tier finds less of this in use
(``taken``): nothing that legs of lower tiers were charged, and no blocks that the worker says these
would give up, in its engine or outside it. Legs that keep what they have (*firm*: the report says
so, or they had aged when they were granted), and those of unknown grants, count for all. A leg that
takes from another is charged as every leg is, so nobody is counted on twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from cluster.control.facts import Health, Placed, Registration, WorkerReport

if TYPE_CHECKING:
    from collections.abc import Iterable


class Charge(NamedTuple):
    """What one leg takes on its worker, beside its slot."""

    blocks: int
    prompt_tokens: int
    """Prompt tokens that it will compute there."""
    tier: int = 0
    """How high its request's tier is; 0 where tiers take nothing from one another."""
    is_firm: bool = False
    """Whether it gives way to nobody from the start: its request has aged."""


class Taken(NamedTuple):
    """What a worker has no room for any more, as requests of one tier see it."""

    slots: int
    blocks: int
    run_ahead_tokens: int


class _Counted(NamedTuple):
    """A leg as it counts now."""

    charge: Charge
    is_pending: bool
    is_unseen: bool
    is_firm: bool


@dataclass(slots=True)
class _Sum:
    """Of legs' charges."""

    num_legs: int = 0
    reserved_blocks: int = 0
    pending_blocks: int = 0
    """Of unseen and of unreserved legs."""
    held_tokens: int = 0
    """Of prompts."""
    unseen_tokens: int = 0

    def add(self, leg: _Counted, sign: int) -> None:
        charge = leg.charge
        self.num_legs += sign
        if leg.is_pending:
            self.pending_blocks += sign * charge.blocks
        else:
            self.reserved_blocks += sign * charge.blocks
        if leg.is_unseen:
            self.unseen_tokens += sign * charge.prompt_tokens
        else:
            self.held_tokens += sign * charge.prompt_tokens


_NOTHING = _Sum()


@dataclass(slots=True, eq=False)
class WorkerEntry:
    """One registered worker."""

    registration: Registration
    report: WorkerReport
    reported_at: float
    changed: set[str]
    """Gets the worker's id whenever something changes that placing depends on."""
    lost_at: float | None = None
    """When its stream broke; None while there is one."""
    ordered_at: float | None = None
    """When an operator's order was last passed on to it."""
    moved_at: float = 0.0
    """When its engine was last known to hang on nothing: it was in no step, or in a new one."""
    health: Health = Health.SUSPECTED
    charges: dict[str, Charge] = field(default_factory=dict)
    """Of unseen and held legs, by grant."""
    unseen: dict[str, float] = field(default_factory=dict)
    """When each unseen leg was granted, or its grant was last sent."""
    done_at: dict[str, float] = field(default_factory=dict)
    """Held legs whose router is through with them, and since when."""
    sending: dict[str, str] = field(default_factory=dict)
    """Exports that go out again: by the new grant, the grant under which their leg is here."""
    last_granted: int = 0
    """Rises with each grant; for ties."""
    held: frozenset[str] = frozenset()
    block_bytes: int = 0
    _counted: dict[str, _Counted] = field(default_factory=dict)
    """What the sums consist of, by grant."""
    _all: _Sum = field(default_factory=_Sum)
    _giving: dict[int, _Sum] = field(default_factory=dict)
    """By tier, of the legs that give way to higher ones."""
    _unreserved: frozenset[str] = frozenset()
    _firm: frozenset[str] = frozenset()
    _begun: set[str] = field(default_factory=set)
    """Legs that have had blocks, even if they have none now: they were preempted."""
    worker_id: str = field(init=False)
    """The same in all its registrations."""
    placed: Placed = field(init=False)
    """As grants name it."""
    num_slots_used: int = field(init=False)
    """Sequences that are there or on their way."""
    num_blocks_free: int = field(init=False)
    """Blocks that nobody holds or was promised; what is cached gives way."""
    run_ahead_tokens: int = field(init=False)
    """Prompt tokens granted to it and not yet computed."""

    def __post_init__(self) -> None:
        """Keep what is asked for most."""
        self.worker_id = self.registration.worker_id
        self.registered(self.registration)

    def registered(self, registration: Registration) -> None:
        """Take in that it has registered, perhaps from another address."""
        self.registration = registration
        self.placed = Placed(
            worker_id=registration.worker_id,
            incarnation=registration.incarnation,
            address=registration.address,
            pool=registration.pool,
        )
        self._sum_up()

    def taken(self, num_tiers: int) -> list[Taken]:
        """Return what is in use for requests of each tier: those below give way to it."""
        num_blocks, slots = self.registration.num_blocks, self.num_slots_used
        takens = [Taken(slots, num_blocks - self.num_blocks_free, self.run_ahead_tokens)]
        if num_tiers == 1:
            return takens
        report, every = self.report, self._all
        in_use = num_blocks - report.blocks.available
        reserved, pending = every.reserved_blocks, every.pending_blocks
        queued, held_tokens, unseen = report.queued_tokens, every.held_tokens, every.unseen_tokens
        # Where all legs are known, no more than all their prompts are of those that stay.
        is_bounded = queued > 0 and self.held <= self.charges.keys()
        takable = report.takable_blocks
        for lower in range(num_tiers - 1):
            giving = self._giving.get(lower, _NOTHING)
            slots -= giving.num_legs
            in_use -= takable[lower] if lower < len(takable) else 0
            reserved -= giving.reserved_blocks
            pending -= giving.pending_blocks
            held_tokens -= giving.held_tokens
            unseen -= giving.unseen_tokens
            left = min(queued, held_tokens) if is_bounded else queued
            takens.append(Taken(slots, max(in_use, reserved) + pending, left + unseen))
        return takens

    def is_stalled(self, now: float) -> bool:
        """Whether its engine has been in one step for longer than that may take."""
        patience_s = self.report.step_patience_s
        return patience_s > 0.0 and now - self.moved_at > patience_s

    def judge(self, health: Health) -> None:
        """Think so of it from now on."""
        self.health = health
        self.changed.add(self.worker_id)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens need here."""
        return -(-num_tokens // self.registration.block_size)

    def charge(self, grant_id: str, charge: Charge, now: float) -> None:
        """Add an unseen leg."""
        self.charges[grant_id] = charge
        self.unseen[grant_id] = now
        self._recount((grant_id,))

    def sent_again(self, grant_id: str, now: float) -> None:
        """Wait for an unseen leg from now on; nothing happens where it is not unseen."""
        if grant_id in self.unseen:
            self.unseen[grant_id] = now

    def drop_unseen(self, grant_id: str) -> bool:
        """Take an unseen leg back; False where it is not unseen."""
        if self.unseen.pop(grant_id, None) is None:
            return False
        del self.charges[grant_id]
        self._recount((grant_id,))
        return True

    def take(self, report: WorkerReport, now: float) -> list[str]:
        """Take a report in; returns the grants whose legs here have ended."""
        if report.num_steps != self.report.num_steps or not report.step_patience_s:
            self.moved_at = now
        self.report, self.reported_at = report, now
        self.held = frozenset(report.held_grants)
        seen = self.held & self.unseen.keys()
        for grant_id in seen:
            del self.unseen[grant_id]
        ended = list(self.charges.keys() - self.held - self.unseen.keys())
        for grant_id in ended:
            del self.charges[grant_id]
        if self.done_at:
            self.done_at = {g: at for g, at in self.done_at.items() if g in self.held}
        unreserved, firm = frozenset(report.unreserved_grants), frozenset(report.firm_grants)
        others = (unreserved ^ self._unreserved) | (firm ^ self._firm)
        self._unreserved, self._firm = unreserved, firm
        self._recount({*ended, *seen, *others})
        return ended

    def has_begun(self, grant_id: str) -> bool:
        """Whether its leg has had blocks, or is not here any more and may have had some."""
        return grant_id in self._begun or grant_id not in self.charges

    def restore(self, grant_id: str, charge: Charge) -> None:
        """Charge a leg again that was taken back before a report listed it after all."""
        self.charges[grant_id] = charge
        self._recount((grant_id,))

    def check(self) -> None:
        """Prove that the sums are of what there is; AssertionError is a bug of ours."""
        assert self._begun <= self.charges.keys(), self.worker_id
        assert self._counted == {g: self._counts_as(g, c) for g, c in self.charges.items()}
        again = WorkerEntry(self.registration, self.report, 0.0, set())
        for leg in self._counted.values():
            again._add(leg, 1)
        assert self._all == again._all, self.worker_id
        for tier, giving in self._giving.items():
            assert giving == again._giving.get(tier, _Sum()), self.worker_id
        again.held, again.unseen = self.held, self.unseen
        again._sum_up()
        assert self._told() == again._told(), self.worker_id

    def _told(self) -> tuple[int, int, int]:
        return self.num_slots_used, self.num_blocks_free, self.run_ahead_tokens

    def _recount(self, grant_ids: Iterable[str]) -> None:
        """Take in what has changed of these legs, if they are there."""
        for grant_id in grant_ids:
            before, charge = self._counted.pop(grant_id, None), self.charges.get(grant_id)
            if before is not None:
                self._add(before, -1)
            if charge is None:
                self._begun.discard(grant_id)
                continue
            leg = self._counted[grant_id] = self._counts_as(grant_id, charge)
            self._add(leg, 1)
            if not leg.is_pending:
                self._begun.add(grant_id)
        self._sum_up()
        self.changed.add(self.worker_id)

    def _sum_up(self) -> None:
        """Keep what follows from the report and the legs, and is asked for most."""
        report, every = self.report, self._all
        num_there = max(report.num_running + report.num_waiting, len(self.held))
        self.num_slots_used = num_there + len(self.unseen)
        unreserved = self.registration.num_blocks - every.reserved_blocks
        self.num_blocks_free = min(report.blocks.available, unreserved) - every.pending_blocks
        self.run_ahead_tokens = report.queued_tokens + every.unseen_tokens

    def _counts_as(self, grant_id: str, charge: Charge) -> _Counted:
        is_unseen = grant_id in self.unseen
        is_pending = is_unseen or grant_id in self._unreserved
        is_firm = charge.is_firm or grant_id in self._firm
        return _Counted(charge, is_pending, is_unseen, is_firm)

    def _add(self, leg: _Counted, sign: int) -> None:
        self._all.add(leg, sign)
        if not leg.is_firm:
            tier = leg.charge.tier
            giving = self._giving.get(tier)
            if giving is None:
                giving = self._giving[tier] = _Sum()
            giving.add(leg, sign)
