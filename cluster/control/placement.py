"""Where a request runs: what may serve it, what has room now, and what costs least.

A *route* is a prefill worker with a decode worker, a prefill worker alone (the choice ends at its
first token), or one worker that does both (LOCAL). Mixed workers stand in for a role that has no
pool of its own. A decode worker prefills by itself only where no prefill worker can: none lives,
or the prompt and output so far of a resumed request are too long for all of them. An export's
prefill worker is given; only its decode worker is chosen.

``costs`` prices the routes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cluster.config import Role
from cluster.control.capacity import Capacity
from cluster.control.costs import Choice, CostModel, Route
from cluster.control.facts import Health, Want
from cluster.control.worker_entry import Charge, WorkerEntry
from cluster.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from cluster.config import DeployConfig
    from cluster.control.facts import ExportRef
    from cluster.control.ledger import Ledger
    from cluster.control.settings import ControlSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """No route has room now; ``lacking`` are the workers that do not have it."""

    lacking: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoute:
    """No worker of ``role`` is there that could ever serve it."""

    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class NoExport:
    """The export's worker is gone, or was replaced: its KV with it."""


@dataclass(slots=True)
class _Search:
    """One look for a route; collects who lacks room."""

    want: Want
    held: Collection[str]
    lacking: set[str] = field(default_factory=set)

    def with_room(
        self, entries: Iterable[WorkerEntry], has_room: Callable[[WorkerEntry, Want], bool]
    ) -> list[WorkerEntry]:
        free = []
        for entry in entries:
            is_open = entry.health is Health.ALIVE and entry.worker_id not in self.held
            if is_open and has_room(entry, self.want):
                free.append(entry)
            else:
                self.lacking.add(entry.worker_id)
        return free


class Placement:
    """Chooses among the workers of a ledger; changes nothing."""

    def __init__(
        self, config: DeployConfig, ledger: Ledger, costs: CostModel, settings: ControlSettings
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._costs = costs
        self._settings = settings
        roles = {pool.role for pool in config.pools}
        self._has_local = Role.MIXED in roles
        has_pairs = bool(roles & {Role.PREFILL, Role.DECODE})
        stand_in = Role.MIXED if has_pairs else None
        self._prefill_role = Role.PREFILL if Role.PREFILL in roles else stand_in
        self._decode_role = Role.DECODE if Role.DECODE in roles else stand_in
        self._capacity = Capacity.of(config.pools, max_model_len=config.model.max_model_len)

    # ---- may it ever be served

    def objection(self, want: Want) -> InvalidRequest | None:
        """Return why no worker of the deploy file could ever serve this; None where one could."""
        if want.export is not None:
            # It was let in with its prompt, and computed.
            return None
        known = [e.registration.max_model_len for e in self._ledger.workers.values()]
        limit = min(self._capacity.max_model_len, max(known, default=1 << 62))
        capacity = replace(self._capacity, max_model_len=limit)
        if want.attempt > 0:
            # A resumed request may be longer by now than any prefill worker can hold.
            longest = max(capacity.local_tokens, capacity.decode_tokens)
            capacity = replace(capacity, local_tokens=longest)
        prompt, room = want.num_prompt_tokens, capacity.max_output_tokens(want.num_prompt_tokens)
        if room == 0:
            longest = capacity.max_prompt_tokens
            return InvalidRequest(
                f"prompt: {prompt} tokens, at most {longest} can be served",
                stage="placement",
                field="prompt",
            )
        if want.max_tokens <= room:
            return None
        return InvalidRequest(
            f"max_tokens: {prompt} prompt tokens leave room for {room} output tokens, "
            f"not {want.max_tokens}",
            stage="placement",
            field="max_tokens",
        )

    def kind(self, want: Want) -> Hashable:
        """Return what decides which workers could serve it: equal for wants that compete."""
        prompt, kv_tokens = want.num_prompt_tokens, _kv_tokens(want)
        fits = tuple((prompt <= p.kv_tokens, kv_tokens <= p.kv_tokens) for p in self._config.pools)
        return want.export, want.avoid, self._is_single(want), fits

    # ---- where now

    def choose(
        self, want: Want, held: Collection[str], now: float, *, may_fall_back: bool
    ) -> Choice | Blocked | NoRoute | NoExport:
        """Return the cheapest route with room that uses none of the ``held`` workers.

        Without ``may_fall_back`` no decode worker prefills: prefill workers may be coming back.
        """
        search = _Search(want, held)
        if want.export is not None:
            return self._choose_for_export(want.export, search, now)
        prefills = self._fitting(want, self._prefill_role, self._prefill_fits)
        decodes = self._fitting(want, self._decode_role, self._local_fits)
        locals_ = self._fitting(want, Role.MIXED if self._has_local else None, self._local_fits)
        is_single = self._is_single(want)
        if is_single and prefills:
            free = search.with_room(prefills, self._can_prefill)
            return self._cheapest([Route(prefill=p, decode=None) for p in free], search, now)
        note = ""
        if not prefills and (is_single or not locals_) and may_fall_back:
            locals_ = [*locals_, *(entry for entry in decodes if entry not in locals_)]
            note = self._fall_back_note()
            if not locals_:
                return NoRoute(role=Role.PREFILL if is_single else Role.DECODE)
        elif is_single or not (locals_ or (prefills and decodes)):
            return NoRoute(role=Role.DECODE if prefills else Role.PREFILL)
        routes = [
            Route(prefill=None, decode=entry)
            for entry in search.with_room(locals_, self._can_local)
        ]
        free_prefills = search.with_room(prefills, self._can_prefill)
        free_decodes = search.with_room(decodes, self._can_decode) if prefills else []
        routes += [
            Route(prefill=p, decode=d) for p in free_prefills for d in free_decodes if p is not d
        ]
        return self._cheapest(routes, search, now, note)

    def charges(self, route: Route, want: Want) -> dict[str, Charge]:
        """Return what a grant of this route takes on each of its workers."""
        charges = {}
        if route.prefill is not None and not route.is_export:
            charges[route.prefill.worker_id] = Charge(
                slots=0,
                blocks=route.prefill.blocks_for(want.num_prompt_tokens),
                prompt_tokens=want.num_prompt_tokens,
            )
        if route.decode is not None:
            is_local = route.prefill is None
            charges[route.decode.worker_id] = Charge(
                slots=1,
                blocks=self._decode_blocks(route.decode, want),
                prompt_tokens=want.num_prompt_tokens if is_local else 0,
            )
        return charges

    def _choose_for_export(
        self, export: ExportRef, search: _Search, now: float
    ) -> Choice | Blocked | NoRoute | NoExport:
        sender = self._ledger.entry(export.worker_id, export.incarnation)
        if sender is None:
            return NoExport()
        decodes = [
            entry
            for entry in self._fitting(search.want, self._decode_role, self._local_fits)
            if entry is not sender
        ]
        if not decodes:
            return NoRoute(role=Role.DECODE)
        if sender.health is not Health.ALIVE:
            return Blocked(lacking=frozenset({sender.worker_id}))
        free = search.with_room(decodes, self._can_decode)
        routes = [Route(prefill=sender, decode=entry, is_export=True) for entry in free]
        return self._cheapest(routes, search, now)

    def _cheapest(
        self, routes: list[Route], search: _Search, now: float, note: str = ""
    ) -> Choice | Blocked:
        if not routes:
            return Blocked(lacking=frozenset(search.lacking))
        choice = self._costs.cheapest(routes, search.want, now)
        return replace(choice, is_fallback=True, reason=note + choice.reason) if note else choice

    def _fall_back_note(self) -> str:
        roles = {entry.registration.role for entry in self._ledger.workers.values()}
        if self._prefill_role in roles:
            return "no prefill worker that this request may use: "
        return "no prefill worker: "

    # ---- candidates and room

    def _is_single(self, want: Want) -> bool:
        return want.export is None and self._capacity.is_single(
            want.num_prompt_tokens, want.max_tokens
        )

    def _fitting(
        self, want: Want, role: Role | None, fits: Callable[[WorkerEntry, Want], bool]
    ) -> list[WorkerEntry]:
        return [
            entry
            for entry in self._ledger.workers.values()
            if entry.registration.role is role
            and entry.registration.incarnation not in want.avoid
            and fits(entry, want)
        ]

    def _prefill_fits(self, entry: WorkerEntry, want: Want) -> bool:
        return entry.blocks_for(want.num_prompt_tokens) <= entry.registration.num_blocks

    def _local_fits(self, entry: WorkerEntry, want: Want) -> bool:
        return entry.blocks_for(_kv_tokens(want)) <= entry.registration.num_blocks

    def _can_prefill(self, entry: WorkerEntry, want: Want) -> bool:
        ahead, prompt = entry.run_ahead_tokens, want.num_prompt_tokens
        limit = self._config.scheduling.run_ahead_tokens
        if ahead > 0 and ahead + prompt > limit:
            return False
        return entry.blocks_for(prompt) <= entry.num_blocks_free

    def _can_decode(self, entry: WorkerEntry, want: Want) -> bool:
        has_slot = entry.num_slots_used < entry.registration.num_slots
        return has_slot and self._decode_blocks(entry, want) <= entry.num_blocks_free

    def _can_local(self, entry: WorkerEntry, want: Want) -> bool:
        return self._can_prefill(entry, want) and self._can_decode(entry, want)

    def _decode_blocks(self, entry: WorkerEntry, want: Want) -> int:
        most = want.num_prompt_tokens + self._settings.growth_tokens
        return entry.blocks_for(min(_kv_tokens(want), most))


def _kv_tokens(want: Want) -> int:
    """KV of all of it; the last token's is never computed."""
    return want.num_prompt_tokens + max(0, want.max_tokens - 1)
