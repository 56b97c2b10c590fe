"""Whom a request may use for which part: the roles that serve now, and when decode workers prefill.

All requests of a kind go the same ways until workers come or go. Mixed workers stand in for a role
that has no workers of its own, and no pool that waits for its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.config import Role
from cluster.control.facts import Health
from cluster.control.local_prefill import Why
from cluster.control.needs import Kind, kv_tokens
from cluster.control.open_workers import Part
from cluster.control.unplaced import NoRoute

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from cluster.config import PoolConfig
    from cluster.control.facts import Want
    from cluster.control.ledger import Ledger
    from cluster.control.local_prefill import LocalPrefillRule
    from cluster.control.needs import NeedsRule
    from cluster.control.worker_entry import WorkerEntry


@dataclass(frozen=True, slots=True)
class Ways:
    """Which roles may do which part of a want now."""

    prefill: Role | None = None
    decode: Role | None = None
    local: tuple[Role, ...] = ()
    extra: Role | None = None
    """Decode workers, who may prefill too where that costs less."""
    why_local: str = ""
    note: str = ""
    """Why decode workers prefill, in words."""

    def parts(self) -> Iterator[tuple[Role, Part]]:
        """Iterate over whom it may use for what."""
        if self.prefill is not None:
            yield self.prefill, Part.PREFILL
        if self.decode is not None:
            yield self.decode, Part.DECODE
        for role in self.all_local:
            yield role, Part.LOCAL

    @property
    def all_local(self) -> tuple[Role, ...]:
        """Who may do both parts, if perhaps for more."""
        return self.local if self.extra is None else (*self.local, self.extra)


class WaysTable:
    """The ways of the kinds that were asked for, by the workers that are there."""

    def __init__(
        self,
        pools: Sequence[PoolConfig],
        ledger: Ledger,
        rule: NeedsRule,
        local: LocalPrefillRule,
    ) -> None:
        self._pools = pools
        self._ledger = ledger
        self._rule = rule
        self._local = local
        self._prefill: Role | None = None
        self._known: dict[tuple[Hashable, bool, bool], Ways | NoRoute] = {}
        self.decode: Role | None = None
        """Who decodes in pairs."""

    def find_roles(self) -> None:
        """Find who does which part in pairs; workers may serve in other roles than their pool's.

        What was known of ways is forgotten: it followed from who was there.
        """
        self._known.clear()
        roles: set[Role] = set()
        for pool in self._pools:
            # One without workers waits for its own.
            roles |= self._ledger.roles_of(pool.name) or {pool.role}
        stand_in = Role.MIXED if roles & {Role.PREFILL, Role.DECODE} else None
        self._prefill = Role.PREFILL if Role.PREFILL in roles else stand_in
        self.decode = Role.DECODE if Role.DECODE in roles else stand_in

    def find(self, want: Want, kind: Hashable, *, may_fall_back: bool) -> Ways | NoRoute:
        """Return whom a want of a kind may use.

        Without ``may_fall_back`` no decode worker prefills for want of others.
        """
        if not isinstance(kind, Kind):
            # A special one's own, for which there will be no other.
            return self._find(want, may_be_local=False, may_fall_back=may_fall_back)
        place = (kind.rivals, kind.may_be_local, may_fall_back)
        ways = self._known.get(place)
        if ways is None:
            ways = self._known[place] = self._find(
                want, may_be_local=kind.may_be_local, may_fall_back=may_fall_back
            )
        return ways

    def fitting(self, want: Want, role: Role, part: Part) -> Iterable[WorkerEntry]:
        """Iterate over the workers of a role that could ever do that part."""
        return (entry for entry in self._ledger.of_role(role) if fits(entry, part, want))

    def _find(self, want: Want, *, may_be_local: bool, may_fall_back: bool) -> Ways | NoRoute:
        if self._local.is_forced and (role := self._if_any(want, self.decode, Part.LOCAL)):
            return Ways(local=(role,), why_local=Why.FORCED.value, note="local prefill is set: ")
        ways: Ways | NoRoute = NoRoute(role=Role.PREFILL)
        # Nobody waits for an engine that hangs while there is a way without it.
        for may_hang in (False, True):
            ways = self._among(
                want, may_be_local=may_be_local, may_fall_back=may_fall_back, may_hang=may_hang
            )
            if isinstance(ways, Ways):
                break
        return ways

    def _among(
        self, want: Want, *, may_be_local: bool, may_fall_back: bool, may_hang: bool
    ) -> Ways | NoRoute:
        """Return its ways among those whose engine goes on, or also those that hang."""
        prefill = self._if_any(want, self._prefill, Part.PREFILL, may_hang=may_hang)
        is_single = self._rule.is_single(want)
        if is_single and prefill is not None:
            return Ways(prefill=prefill)
        decode = self._if_any(want, self.decode, Part.DECODE, may_hang=may_hang)
        local_role = self._if_any(want, Role.MIXED, Part.LOCAL, may_hang=may_hang)
        local = () if local_role is None else (local_role,)
        if prefill is None and (is_single or not local) and may_fall_back:
            if decode is not None and decode not in local:
                local = (*local, decode)
            if not local:
                return NoRoute(role=Role.PREFILL if is_single else Role.DECODE)
            return Ways(local=local, why_local=Why.FALLBACK.value, note=self._fall_back_note())
        if is_single or not (local or (prefill is not None and decode is not None)):
            return NoRoute(role=Role.DECODE if prefill is not None else Role.PREFILL)
        if prefill is None or decode is None:
            return Ways(local=local)
        extra = decode if may_be_local and decode not in local else None
        return Ways(prefill=prefill, decode=decode, local=local, extra=extra)

    def _fall_back_note(self) -> str:
        roles = {entry.registration.role for entry in self._ledger.workers.values()}
        if self._prefill in roles:
            return "no prefill worker that this request may use: "
        return "no prefill worker: "

    def _if_any(
        self, want: Want, role: Role | None, part: Part, *, may_hang: bool = True
    ) -> Role | None:
        """Return the role, if a worker of it could ever do that part."""
        fitting = () if role is None else self.fitting(want, role, part)
        can_do = (may_hang or entry.health is not Health.STALLED for entry in fitting)
        return role if any(can_do) else None


def fits(entry: WorkerEntry, part: Part, want: Want) -> bool:
    """Whether a worker could ever do that part of a want, and it does not avoid it."""
    registration = entry.registration
    num_tokens = want.num_prompt_tokens if part is Part.PREFILL else kv_tokens(want)
    is_avoided = bool(want.avoid) and registration.incarnation in want.avoid
    return not is_avoided and entry.blocks_for(num_tokens) <= registration.num_blocks
