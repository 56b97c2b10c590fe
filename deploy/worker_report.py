"""What a worker tells the control plane about itself."""

from __future__ import annotations

import os
from collections import Counter
from operator import itemgetter
from typing import TYPE_CHECKING

from cluster.control.facts import BlockCounts, Registration, TransferSample, WorkerReport
from cluster.control.membership import KV_CHECK_FAILURES
from cluster.engine.outsiders import Outsiders
from cluster.engine.victims import freed_in_turn
from cluster.request import FinishReason
from deploy.worker_life import WorkerState

if TYPE_CHECKING:
    from collections.abc import Collection

    from cluster.clock import Clock
    from cluster.config import PoolConfig, Role
    from cluster.engine.loop import EngineLoop
    from cluster.engine.rules import Rules
    from cluster.engine.snapshot import EngineSnapshot
    from cluster.engine.victims import Holdings
    from cluster.kv.block_pool import BlockPool, Holder
    from cluster.request import Leg, LegKey, Peer
    from cluster.rpc.legs import OpenLeg
    from cluster.rpc.link_acceptor import LinkAcceptor
    from cluster.trust import ClusterToken
    from deploy.worker_legs import WorkerLegs
    from deploy.worker_life import WorkerLife
    from deploy.worker_parts import WorkerParts
    from deploy.worker_watch import WorkerWatch


class WorkerReporter:
    """Reads the parts of one worker; event loop only."""

    def __init__(  # noqa: PLR0913 (what it reads)
        self,
        *,
        pool: PoolConfig,
        parts: WorkerParts,
        blocks: BlockPool,
        engine: EngineLoop,
        legs: WorkerLegs,
        acceptor: LinkAcceptor | None,
        token: ClusterToken,
        watch: WorkerWatch,
        life: WorkerLife,
        pool_role: Role,
        rules: Rules,
        clock: Clock,
    ) -> None:
        """``pool_role``: what the deploy file has for its pool."""
        self._config = pool
        self._parts = parts
        self._blocks = blocks
        self._engine = engine
        self._legs = legs
        self._prefill, self._decode = legs.prefill, legs.decode
        self._acceptor = acceptor
        self._token = token
        self._watch = watch
        self._life = life
        self._pool_role = pool_role
        self._rules = rules
        self._outsiders = Outsiders(blocks, rules)
        self._clock = clock

    def is_well(self) -> bool:
        """Whether it takes work: accepted, not about to go, and in no step that hangs."""
        return self._life.state is WorkerState.SERVING and not self._watch.is_hanging

    def registration(self, me: Peer) -> Registration:
        """Return who this worker is."""
        parts, pool = self._parts, self._config
        return Registration(
            worker_id=me.worker_id,
            incarnation=me.incarnation,
            pool=pool.name,
            role=pool.role,
            address=me.address,
            num_slots=pool.max_num_seqs,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            max_model_len=parts.max_model_len,
            layout=parts.layout.describe(),
            step_base_s=parts.speed.base_s,
            step_per_seq_s=parts.speed.per_seq_s,
            prefill_per_token_s=parts.speed.prefill_per_token_s,
            pid=os.getpid(),
            transport=parts.transport.kind.value,
            tokenizer=parts.tokenizer,
            pool_role=self._pool_role,
        )

    def report(self) -> WorkerReport:
        """Return the load now; takes the transfers since the last report with it."""
        snapshot = self._engine.snapshot()
        firm = self._firm(snapshot)
        with self._blocks.lock:
            counts = self._blocks.counts()
            takable = self._takable(snapshot.holdings, {opened.key for opened in firm})
        prefill, decode = self._prefill, self._decode
        grants: set[str] = set()
        for half in (prefill, decode):
            if half is not None:
                grants.update(half.book.grants())
        transfers = prefill.outbox.take_transfers() if prefill is not None else ()
        gone, has_lost = self._gone()
        swap = self._blocks.swap
        return WorkerReport(
            blocks=BlockCounts(
                free=counts.free,
                held=counts.held,
                importing=counts.importing,
                cached=counts.cached,
                fenced=counts.fenced,
            ),
            num_running=snapshot.num_running,
            num_waiting=snapshot.num_waiting
            + (decode.inbox.num_waiting if decode is not None else 0),
            num_transferring=(len(prefill.outbox) if prefill is not None else 0)
            + (decode.inbox.num_transferring if decode is not None else 0),
            queued_tokens=snapshot.queued_tokens,
            held_grants=tuple(sorted(grants)),
            unreserved_grants=self._unreserved(),
            num_swapped=swap.num_holders if swap is not None else 0,
            gone_prefixes=gone,
            has_lost_prefixes=has_lost,
            num_steps=snapshot.num_steps,
            step_patience_s=self._engine.beat().patience_s,
            broken_links=prefill.outbox.broken_links if prefill is not None else (),
            step_base_s=snapshot.step_base_s,
            step_per_seq_s=snapshot.step_per_seq_s,
            prefill_per_token_s=snapshot.prefill_per_token_s,
            transfers=tuple(
                TransferSample(
                    peer_worker_id=transfer.peer_worker_id,
                    num_bytes=transfer.num_bytes,
                    seconds=transfer.seconds,
                    transport=transfer.transport,
                )
                for transfer in transfers
            ),
            counters=self._counters(snapshot),
            is_draining=self._life.is_draining,
            takable_blocks=takable,
            firm_grants=tuple(sorted({o.leg.grant_id for o in firm if o.leg.grant_id})),
        )

    def _takable(self, holdings: Holdings, firm: Collection[LegKey]) -> tuple[int, ...]:
        """Count what sequences, exports and imports would give up, the lower tiers first; with the
        pool's lock, as of ``counts``."""
        giving: list[tuple[int, Holder, int]] = [
            (tier, key, 0) for tier, key in holdings.giving if key not in firm
        ]
        outside = self._outsiders.giving(self._clock.now())
        giving += [(other.tier, other.holder, other.num_importing) for other in outside]
        giving.sort(key=itemgetter(0))
        freed = freed_in_turn(self._blocks, (holder for _, holder, _ in giving))
        takable: Counter[int] = Counter()
        for (tier, _, num_importing), num_held in zip(giving, freed, strict=True):
            takable[tier] += num_held + num_importing
        return tuple(takable[tier] for tier in range(max(takable, default=-1) + 1))

    def _firm(self, snapshot: EngineSnapshot) -> list[OpenLeg]:
        """Return the legs that the engine keeps from higher tiers, those outside it that keep their
        blocks since they gave way so often, and all that have aged: they may wait for blocks."""
        firm, rules, now = snapshot.holdings.firm, self._rules, self._clock.now()
        legs = [opened for half in self._legs.halves for opened in half.book]
        return [
            o
            for o in legs
            if o.key in firm or rules.is_firm(o.arrived, now) or self._is_spared(o.leg)
        ]

    def _is_spared(self, leg: Leg) -> bool:
        rules = self._rules
        is_over = rules.takes_from_below and rules.needs_all(leg.num_preemptions)
        return is_over and not self._is_bare(leg)

    def _gone(self) -> tuple[tuple[int, ...], bool]:
        """What the control plane believes to be cached and is not, by its names."""
        index = self._blocks.prefix
        ended = [prefix for half in self._legs.halves for prefix in half.book.take_ended()]
        if index is None:
            return (), False
        with self._blocks.lock:
            for prefix in ended:
                index.miss(prefix.names)
            return index.take_gone()

    def _unreserved(self) -> tuple[str, ...]:
        """Grants whose legs hold no blocks yet: the ledger adds their charge to what is used."""
        legs = [opened.leg for half in self._legs.halves for opened in half.book]
        return tuple(sorted({leg.grant_id for leg in legs if leg.grant_id and self._is_bare(leg)}))

    def _is_bare(self, leg: Leg) -> bool:
        blocks = self._blocks
        is_holding = blocks.blocks_of(leg.key) or blocks.blocks_of(("export", leg.handoff_id))
        return not is_holding and blocks.importing(leg.handoff_id) is None

    def _counters(self, snapshot: EngineSnapshot) -> dict[str, float]:
        """Count legs, handoffs and tokens since the start; all only ever rise.

        Requests are counted by routers: one has a leg on each of two workers. When nothing is
        open, ``legs_received`` is the sum of the other ``legs_``. A transfer is counted where it
        was sent, what arrived beside it as ``imports_``; a token where it was drawn.
        """
        legs: Counter[str] = Counter()
        for half in (self._prefill, self._decode):
            if half is not None:
                legs.update(half.book.counts)
        counters: dict[str, float] = {
            "legs_received": legs["received"] + self._legs.num_rejected,
            "legs_rejected": self._legs.num_rejected,
            "legs_aborted": legs["aborted"],
            "legs_failed": legs["failed"],
            "legs_handed_over": legs["handed_over"],
            "legs_finished_at_prefill": legs["finished_at_prefill"],
            "prefilled_tokens": snapshot.prefilled_tokens,
            "cached_tokens": snapshot.cached_tokens,
            "generated_tokens": snapshot.generated_tokens,
            "preemptions": snapshot.num_preemptions,
            "preemptions_swapped": snapshot.num_swapped,
            "swaps_refused": snapshot.num_swaps_refused,
            "swapped_blocks": snapshot.num_blocks_swapped,
            "kv_checks": self._watch.num_pool_checks,
            KV_CHECK_FAILURES: self._watch.num_pool_faults,
        }
        for reason in FinishReason:
            counters[f"legs_finished_{reason.value}"] = legs[reason.value]
        if self._prefill is not None:
            sent = self._prefill.outbox.counts
            counters["transfers_started"] = sent["started"]
            counters["transfers_ok"] = sent["committed"]
            counters["transfers_failed"] = sent["failed"]
            counters["transfer_bytes"] = sent["bytes"]
            counters["exports_waited"] = sent["waited"]
            counters["exports_redirected"] = sent["redirected"]
            counters["exports_gave_way"] = sent["gave_way"]
        if self._decode is not None:
            taken = self._decode.inbox.counts
            counters["imports_ok"] = taken["committed"]
            counters["imports_failed"] = taken["failed"]
            counters["import_bytes"] = taken["bytes"]
            counters["offers_refused"] = taken["refused"]
            counters["imports_gave_way"] = taken["gave_way"]
            counters["segments_dropped"] = taken["dropped_segments"]
        counters["strangers_refused"] = self._token.num_refused
        if self._acceptor is not None:
            counters["links_refused"] = self._acceptor.num_refused
        return counters
