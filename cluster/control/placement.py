"""Where a request runs: what may serve it, what has room now, and what costs least.

A *route* is a prefill worker with a decode worker, a prefill worker alone (the choice ends at its
first token), or one mixed worker that does both (LOCAL). Mixed workers stand in for a role that
has no pool of its own; a decode worker never prefills by itself.

``costs`` prices the routes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cluster.config import Role
from cluster.control.capacity import Capacity
from cluster.control.costs import Choice, CostModel, Route
from cluster.control.facts import Health, Want
from cluster.control.ledger import Charge, WorkerEntry
from cluster.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable

    from cluster.config import DeployConfig
    from cluster.control.ledger import Ledger
    from cluster.control.settings import ControlSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """No route has room now; ``lacking`` are the workers that do not have it."""

    lacking: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoute:
    """No worker of ``role`` is there that could ever serve it."""

    role: str


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
        known = [e.registration.max_model_len for e in self._ledger.workers.values()]
        limit = min(self._capacity.max_model_len, max(known, default=1 << 62))
        capacity = replace(self._capacity, max_model_len=limit)
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
        return want.avoid, self._is_single(want), fits

    # ---- where now

    def choose(self, want: Want, held: Collection[str], now: float) -> Choice | Blocked | NoRoute:
        """Return the cheapest route with room that uses none of the ``held`` workers."""
        prefills = self._fitting(want, self._prefill_role, self._prefill_fits)
        decodes = self._fitting(want, self._decode_role, self._local_fits)
        locals_ = self._fitting(want, Role.MIXED if self._has_local else None, self._local_fits)
        lacking: set[str] = set()
        if self._is_single(want):
            locals_, decodes = [], []
            if not prefills:
                return NoRoute(role="prefill")
        elif not locals_ and not (prefills and decodes):
            return NoRoute(role="prefill" if not prefills else "decode")
        free_prefills = self._with_room(
            prefills, held, lacking, lambda e: self._can_prefill(e, want)
        )
        free_decodes = self._with_room(decodes, held, lacking, lambda e: self._can_decode(e, want))
        free_locals = self._with_room(
            locals_,
            held,
            lacking,
            lambda e: self._can_prefill(e, want) and self._can_decode(e, want),
        )
        routes = [Route(prefill=None, decode=entry) for entry in free_locals]
        if self._is_single(want):
            routes += [Route(prefill=entry, decode=None) for entry in free_prefills]
        routes += [
            Route(prefill=p, decode=d) for p in free_prefills for d in free_decodes if p is not d
        ]
        if not routes:
            return Blocked(lacking=frozenset(lacking))
        return self._costs.cheapest(routes, want, now)

    def charges(self, route: Route, want: Want) -> dict[str, Charge]:
        """Return what a grant of this route takes on each of its workers."""
        charges = {}
        if route.prefill is not None:
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

    # ---- candidates and room

    def _is_single(self, want: Want) -> bool:
        return self._capacity.is_single(want.num_prompt_tokens, want.max_tokens)

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

    def _with_room(
        self,
        entries: Iterable[WorkerEntry],
        held: Collection[str],
        lacking: set[str],
        has_room: Callable[[WorkerEntry], bool],
    ) -> list[WorkerEntry]:
        free = []
        for entry in entries:
            is_open = entry.health is Health.ALIVE and entry.worker_id not in held
            if is_open and has_room(entry):
                free.append(entry)
            else:
                lacking.add(entry.worker_id)
        return free

    def _can_prefill(self, entry: WorkerEntry, want: Want) -> bool:
        ahead, prompt = entry.run_ahead_tokens, want.num_prompt_tokens
        limit = self._config.scheduling.run_ahead_tokens
        if ahead > 0 and ahead + prompt > limit:
            return False
        return entry.blocks_for(prompt) <= entry.num_blocks_free

    def _can_decode(self, entry: WorkerEntry, want: Want) -> bool:
        has_slot = entry.num_slots_used < entry.registration.num_slots
        return has_slot and self._decode_blocks(entry, want) <= entry.num_blocks_free

    def _decode_blocks(self, entry: WorkerEntry, want: Want) -> int:
        most = want.num_prompt_tokens + self._settings.growth_tokens
        return entry.blocks_for(min(_kv_tokens(want), most))


def _kv_tokens(want: Want) -> int:
    """KV of all of it; the last token's is never computed."""
    return want.num_prompt_tokens + want.max_tokens - 1
