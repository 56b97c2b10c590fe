"""Where a request runs: what may serve it, what has room now, and what costs least.

A *route* is a prefill worker with a decode worker, a prefill worker alone (the choice ends at its
first token), or one worker that does both (LOCAL). A decode worker prefills by itself where no
prefill worker can (none lives, all hang, or the prompt and output so far of a resumed request are
too long for all of them), where it is configured, and where there is little to compute and it costs
less than by the best pair (``local_prefill``). An export's prefill worker is given; only its decode
worker is chosen.

Of those with room the cheapest few are looked at (``fleet``), in all combinations (``costs``).
Where nobody has room, a request of a higher tier goes where lower ones hold what it needs: the
worker's engine takes it from the lowest tier's youngest (``cluster.engine.victims``).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.config import Role
from cluster.control.capacity import Capacity
from cluster.control.costs import Choice, CostModel, Route
from cluster.control.facts import Health, Want
from cluster.control.fleet import Fleet
from cluster.control.local_prefill import LocalPrefillRule, Why
from cluster.control.needs import Kind, Needs, NeedsRule
from cluster.control.open_workers import Openings, Part
from cluster.control.unplaced import Blocked, NoExport, NoRoute
from cluster.control.ways import Ways, WaysTable, fits

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable

    from cluster.config import DeployConfig
    from cluster.control.facts import ExportRef
    from cluster.control.ledger import Ledger
    from cluster.control.settings import ControlSettings
    from cluster.control.worker_entry import WorkerEntry
    from cluster.errors import InvalidRequest

SHORTLIST = 8
"""Workers of each part that are priced for one request."""
_NO_LINK = "no link that works: "


class Placement:
    """Chooses among the workers of a ledger; changes nothing."""

    def __init__(
        self, config: DeployConfig, ledger: Ledger, costs: CostModel, settings: ControlSettings
    ) -> None:
        self._ledger = ledger
        self._costs = costs
        self._known_at = -1
        """``Ledger.num_changes`` up to which roles and ways are known."""
        self._capacity = Capacity.of(config.pools, max_model_len=config.model.max_model_len)
        self._local = LocalPrefillRule(config.scheduling, ledger, costs)
        self.rule = NeedsRule(config, self._capacity, self._local, settings.growth_tokens)
        self._ways = WaysTable(config.pools, ledger, self.rule, self._local)
        self._openings: dict[tuple[Hashable, bool, bool], Openings | None] = {}
        self._grown_at = 0
        self._fleet = Fleet(config, ledger, costs, self.rule.most_tokens)

    # ---- may it ever be served

    def objection(self, want: Want) -> InvalidRequest | None:
        """Return why no worker of the deploy file could ever serve this; None where one could."""
        if want.export is not None:
            # It was let in with its prompt, and computed.
            return None
        known, capacity = self._ledger.max_model_len, self._capacity
        if known and known < capacity.max_model_len:
            capacity = replace(capacity, max_model_len=known)
        if want.attempt > 0:
            # A resumed request may be longer by now than any prefill worker can hold.
            longest = max(capacity.local_tokens, capacity.decode_tokens)
            capacity = replace(capacity, local_tokens=longest)
        return capacity.objection(want.num_prompt_tokens, want.max_tokens)

    # ---- where now

    def choose(
        self,
        want: Want,
        needs: Needs,
        held: Collection[str],
        now: float,
        *,
        may_fall_back: bool,
    ) -> Choice | Blocked | NoRoute | NoExport:
        """Return the cheapest route with room that uses none of the ``held`` workers.

        Without ``may_fall_back`` no decode worker prefills: prefill workers may be coming back.
        """
        self.refresh()
        for tier in self._lower_tiers(want, needs, may_fall_back=may_fall_back):
            # As if it were lower: nothing is taken from a tier while there is room in one below.
            less = needs._replace(tier=tier)
            choice = self._choose(want, less, held, now, may_fall_back=may_fall_back)
            if not isinstance(choice, Blocked):
                return choice
        return self._choose(want, needs, held, now, may_fall_back=may_fall_back)

    def _lower_tiers(self, want: Want, needs: Needs, *, may_fall_back: bool) -> Iterable[int]:
        """Return as which lower tiers it may find room, the lowest first."""
        kind, tiers = needs.kind, range(needs.tier)
        if not tiers or not isinstance(kind, Kind):
            return tiers
        openings = self.openings(want, kind, may_fall_back=may_fall_back)
        sizes = (needs.prefill_tokens, needs.decode_tokens)
        return [tier for tier in tiers if openings is not None and openings.admit(tier, *sizes)]

    def _choose(
        self,
        want: Want,
        needs: Needs,
        held: Collection[str],
        now: float,
        *,
        may_fall_back: bool,
    ) -> Choice | Blocked | NoRoute | NoExport:
        if want.export is not None:
            return self._choose_for_export(want.export, want, needs, held, now)
        ways = self._ways.find(want, needs.kind, may_fall_back=may_fall_back)
        if isinstance(ways, NoRoute):
            return ways
        found = self._routes(ways, want, needs, held)
        routes = self._ledger.shunned.working(found, now)
        lacks_link = bool(found) and not routes and may_fall_back
        # As if it were lower it only looks for room: there may be some over a link that works.
        if lacks_link and ways.decode is not None and needs.tier == self.rule.tier(want):
            ways = Ways(local=(ways.decode,), why_local=Why.FALLBACK.value, note=_NO_LINK)
            routes = self._routes(ways, want, needs, held)
        choice = self._costs.cheapest(routes, want, now) if routes else None
        if ways.extra is not None and ways.prefill is not None:
            decodes = self._shortlist(ways.extra, Part.LOCAL, want, needs, held)
            choice = self._local.cheaper(choice, decodes, want, ways.prefill)
        if choice is None:
            return Blocked()
        if ways.note:
            reason = ways.note + choice.reason
            return choice._replace(why_local=ways.why_local, reason=reason)
        return choice

    def take_growth(self) -> bool:
        """Whether there is room that was not there at the last call, or workers came or went."""
        self.refresh()
        before, self._grown_at = self._grown_at, self._ledger.num_changes
        return self._fleet.take_growth() or before != self._grown_at

    def openings(self, want: Want, kind: Kind, *, may_fall_back: bool) -> Openings | None:
        """Return who may have room for wants that go the ways of a kind, as at the last
        ``refresh``; None where they have no route.

        ``want`` is one of the kind.
        """
        place = (kind.rivals, kind.may_be_local, may_fall_back)
        if place not in self._openings:
            ways = self._ways.find(want, kind, may_fall_back=may_fall_back)
            self._openings[place] = (
                None
                if isinstance(ways, NoRoute)
                else self._fleet.openings(ways.prefill, ways.decode, ways.all_local)
            )
        return self._openings[place]

    def lacking(self, want: Want, needs: Needs, *, may_fall_back: bool) -> frozenset[str]:
        """Return whom it may use and who had no room for it at the last ``refresh``."""
        if want.export is not None:
            ways: Ways | NoRoute = Ways(decode=self._ways.decode)
        else:
            ways = self._ways.find(want, needs.kind, may_fall_back=may_fall_back)
        if isinstance(ways, NoRoute):
            return frozenset()
        return frozenset(
            entry.worker_id
            for role, part in ways.parts()
            for entry in self._ways.fitting(want, role, part)
            if not self._fleet.has_room(entry, part, needs)
        )

    def refresh(self) -> None:
        """Take in what has changed in the ledger, and forget what followed from the old."""
        if self._ledger.changed:
            self._fleet.refresh()
        if self._known_at != self._ledger.num_changes:
            self._known_at = self._ledger.num_changes
            self._ways.find_roles()
            self._openings.clear()

    def _routes(
        self, ways: Ways, want: Want, needs: Needs, held: Collection[str], most: int = SHORTLIST
    ) -> list[Route]:
        routes = [
            Route(prefill=None, decode=entry)
            for role in ways.local
            for entry in self._shortlist(role, Part.LOCAL, want, needs, held, most)
        ]
        if ways.prefill is None:
            return routes
        # With mixed workers on both sides one more of each, for a pair is of two.
        most = max(2, most)
        prefills = self._shortlist(ways.prefill, Part.PREFILL, want, needs, held, most)
        if ways.decode is None:
            return [Route(prefill=entry, decode=None) for entry in prefills]
        if not prefills:
            return routes
        decodes = self._shortlist(ways.decode, Part.DECODE, want, needs, held, most)
        return routes + [
            Route(prefill=p, decode=d) for p in prefills for d in decodes if p is not d
        ]

    def _choose_for_export(
        self, export: ExportRef, want: Want, needs: Needs, held: Collection[str], now: float
    ) -> Choice | Blocked | NoRoute | NoExport:
        sender = self._ledger.entry(export.worker_id, export.incarnation)
        role = self._ways.decode
        if sender is None:
            return NoExport()
        if role is None or all(e is sender for e in self._ways.fitting(want, role, Part.DECODE)):
            return NoRoute(role=Role.DECODE)
        if sender.health is not Health.ALIVE:
            return Blocked()
        decodes = self._shortlist(role, Part.DECODE, want, needs, held)
        routes = [
            Route(prefill=sender, decode=entry, is_export=True)
            for entry in decodes
            if entry is not sender
        ]
        working = self._ledger.shunned.working(routes, now)
        if routes and not working:
            everybody = [
                Route(prefill=sender, decode=entry, is_export=True)
                for entry in self._ways.fitting(want, role, Part.DECODE)
                if entry is not sender
            ]
            # Whose link works may have room soon.
            return Blocked() if self._ledger.shunned.working(everybody, now) else NoExport()
        return self._costs.cheapest(working, want, now) if working else Blocked()

    # ---- candidates and room

    def _shortlist(
        self,
        role: Role,
        part: Part,
        want: Want,
        needs: Needs,
        held: Collection[str],
        most: int = SHORTLIST,
    ) -> list[WorkerEntry]:
        free = self._fleet.with_room(role, part, needs)
        if held or want.avoid or part is not Part.PREFILL:
            # Who has room for all of a prompt can hold it.
            free = (e for e in free if e.worker_id not in held and fits(e, part, want))
        listed = list(itertools.islice(free, most))
        if part is Part.DECODE:
            return listed
        # Who has the prompt may be dearer than these before that is counted.
        if want.cached_on:
            listed += [e for e in free if e.registration.incarnation == want.cached_on]
        for worker_id in self._ledger.prefixes.holders(want.prefix):
            holder = self._ledger.workers.get(worker_id)
            if (
                holder is not None
                and holder.registration.role is role
                and holder not in listed
                and worker_id not in held
                and fits(holder, part, want)
                and self._fleet.has_room(holder, part, needs)
            ):
                listed.append(holder)
        return listed
