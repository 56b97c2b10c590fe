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
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.control.facts import Health, Registration, WorkerReport


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
    """When each unseen leg was granted."""
    done_at: dict[str, float] = field(default_factory=dict)
    """Held legs whose router is through with them, and since when."""
    sending: dict[str, str] = field(default_factory=dict)
    """Exports that go out again: by the new grant, the grant under which their leg is here."""
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
        """Blocks that nobody holds or was promised; what is cached gives way."""
        num_blocks = self.registration.num_blocks
        used = max(num_blocks - self.report.blocks.available, self._reserved_blocks)
        return num_blocks - used - self._pending_blocks

    @property
    def run_ahead_tokens(self) -> int:
        """Prompt tokens granted to it and not yet computed."""
        return self.report.queued_tokens + self._unseen_tokens

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
        if report.num_steps != self.report.num_steps or not report.step_patience_s:
            self.moved_at = now
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
        self.changed.add(self.worker_id)
