"""The exports of a prefill half: offered while computed, sent as they grow, kept while they wait.

    offer ──▶ handoff ──COMMIT──▶ over
                │  ▲
         failed ▼  │ redirect, under the lease
               waiting ──lease, deadline, abort──▶ over

A handoff that fails for a reason which leaves the KV good (refused, receiver or link lost) leaves
an export that waits for a redirect; whatever else ends a handoff ends the export with it. An abort
ends an export in any state at once. How one handoff goes is told in ``sender``, who holds the
blocks in ``exports``.

While a whole export waits, for a redirect or for its receiver's credit, a request of a higher tier
may have its blocks: it is over then, as by its lease, and its request is computed again. One that
has its credit is let go on: it needs nothing any more to end by itself, and soon.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from cluster.errors import HandoffFailed
from cluster.handoff import AbortCause, HandoffState
from cluster.kv.outside import Outsider
from cluster.request import ExportWaiting
from cluster.rpc.legs import OpenLeg, abort_error
from prefill_worker.broken_links import BrokenLinks
from prefill_worker.exports import Export, Outgoing, export_holder
from prefill_worker.sender import BlockReader, Dialer, Sender, Sent

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from cluster.clock import Clock
    from cluster.engine.sequence import Sequence
    from cluster.errors import PdserveError
    from cluster.kv.block_pool import BlockPool
    from cluster.kv.layout import KVLayout
    from cluster.lifetime import LegTimes
    from cluster.request import LegKey, Redirect, TokenLogprobs
    from cluster.rpc.errands import Errands
    from cluster.rpc.link import LinkEvents

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One committed handoff, as the cost of its pair is learned from it."""

    peer_worker_id: str
    num_bytes: int
    seconds: float
    """That its bytes were moving: neither waiting for their turn nor for what was not computed."""
    transport: str = ""
    """What moved them: a ``TransportKind`` value."""


class OutboxEvents(Protocol):
    """Who owns the legs."""

    def on_handoff_over(
        self, opened: OpenLeg, cause: AbortCause | None, error: PdserveError | None, times: LegTimes
    ) -> None:
        """An export is over: committed where ``cause`` is None, else aborted from outside."""
        ...

    def on_gave_way(self, opened: OpenLeg) -> None:
        """A leg loses its KV to a higher tier; its handoff is over next."""
        ...

    def on_export_waiting(self, opened: OpenLeg, waiting: ExportWaiting) -> None:
        """A handoff failed, and its export waits for a redirect."""
        ...


class Outbox:
    """All exports of one prefill half; event loop only."""

    def __init__(  # noqa: PLR0913 (what it moves, and whom it works with)
        self,
        *,
        pool: BlockPool,
        cache: BlockReader,
        layout: KVLayout,
        clock: Clock,
        lease_s: float,
        make_dialer: Callable[[LinkEvents], Dialer],
        errands: Errands,
        streams: bool = True,
        tier_of: Callable[[str], int] | None = None,
    ) -> None:
        """With ``streams`` finished layers and blocks go out before their export is whole.

        ``tier_of``: tier's name to how high it is, where exports give way to higher ones.
        """
        self.streams = streams
        self._tier_of = tier_of
        self._errands = errands
        self._pool = pool
        self._layout = layout
        self._clock = clock
        self._lease_s = lease_s
        self._owner: OutboxEvents | None = None
        self._exports: dict[LegKey, Export] = {}
        self._givers: dict[tuple[str, str], Export] = {}
        """Those that the pool was told would give way."""
        self._transfers: list[Transfer] = []
        self._broken = BrokenLinks()
        self.sender = Sender(
            pool=pool,
            cache=cache,
            layout=layout,
            clock=clock,
            dial_s=lease_s,
            make_dialer=make_dialer,
            errands=errands,
            events=self,
            streams=streams,
        )
        pool.subscribe(self._on_told)

    def __contains__(self, key: LegKey) -> bool:
        """Whether the leg has an export."""
        return key in self._exports

    def __len__(self) -> int:
        """Return the number of exports."""
        return len(self._exports)

    @property
    def num_waiting(self) -> int:
        """Exports that wait for a redirect."""
        return sum(export.outgoing is None for export in self._exports.values())

    @property
    def counts(self) -> Counter[str]:
        """The sender's counts of handoffs; and exports that ``waited``, were ``redirected``, each
        time; that ``gave_way``."""
        return self.sender.counts

    @property
    def broken_links(self) -> tuple[str, ...]:
        """Incarnations of the decode workers to whom handoffs go on failing."""
        return self._broken.names(self._clock.now())

    def report_to(self, owner: OutboxEvents) -> None:
        """Name who hears how exports end."""
        self._owner = owner

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Return the transfers that ended since the last call."""
        transfers, self._transfers = self._transfers, []
        return tuple(transfers)

    def offer(self, opened: OpenLeg, sequence: Sequence) -> None:
        """Tell the decode worker what will come; the prompt is only now being computed."""
        leg = opened.leg
        num_tokens = len(leg.prompt_ids) + len(leg.output_ids)
        export = Export(
            opened=opened,
            sequence=sequence,
            num_tokens=num_tokens,
            num_blocks=self._layout.num_blocks_for(num_tokens),
            offered_at=self._clock.now(),
        )
        self._exports[opened.key] = export
        self.sender.begin(export.begin(is_redirected=False))

    def computed(self, key: LegKey) -> None:
        """Send what a step has finished, or stored so far, if the receiver has room for it."""
        export = self._exports.get(key)
        if export is not None:
            self.sender.push(export)

    def export(
        self,
        opened: OpenLeg,
        output_ids: tuple[int, ...],
        logprobs: TokenLogprobs | None,
        times: LegTimes,
    ) -> None:
        """Take the blocks of a prefilled sequence over from the engine, and send what is left.

        ``logprobs`` are those of the last of ``output_ids``.
        """
        export = self._exports[opened.key]
        self._pool.rename(opened.key, export_holder(opened.leg.handoff_id))
        export.output_ids, export.logprobs = output_ids, logprobs
        export.times = replace(times, reserve_wait_s=export.times.reserve_wait_s)
        export.first_token_at = export.lease_begins = self._clock.now()
        self.sender.push(export)
        self._may_give(export)

    def redirect(self, opened: OpenLeg, redirect: Redirect) -> None:
        """Pass the leg's export to another decode worker, whatever became of the last handoff.

        Its lease begins anew with every handoff that fails; the leg's deadline bounds them all.
        """
        old_id = opened.leg.handoff_id
        if redirect.handoff_id == old_id:
            logger.info("handoff=%s redirected twice", old_id)
            return
        export = self._exports.get(opened.key)
        if export is not None and export.outgoing is not None:
            self.sender.drop(
                export.outgoing, AbortCause.LEASE, "the export goes elsewhere", tells=True
            )
        if export is not None:
            self._gives_no_more(export)
        opened.leg = replace(opened.leg, handoff_id=redirect.handoff_id, peer=redirect.peer)
        if export is None:
            opened.preempted(redirect.num_preemptions)
            return  # nothing of it is computed yet: it will be offered there
        export.preempted(redirect.num_preemptions)
        if export.is_whole:
            self._pool.rename(export_holder(old_id), export.holder)
        self.counts["redirected"] += 1
        self.sender.begin(export.begin(is_redirected=True))
        self._may_give(export)

    def abort(self, key: LegKey, cause: AbortCause, detail: str = "") -> None:
        """End an export because its leg ended here; tells the receiver, not the owner."""
        export = self._exports.get(key)
        if export is None:
            return
        if export.outgoing is not None:
            self.sender.drop(export.outgoing, cause, detail, tells=True)
        else:
            logger.info("leg=%s its waiting export ends cause=%s", key, cause.value)
        self._forget(export)

    def expire(self, now: float) -> None:
        """End or fail what outlived its deadline or its lease, or got no answer in that time."""
        for export in list(self._exports.values()):
            outgoing = export.outgoing
            if export.is_whole and now >= export.opened.deadline:
                # Until it is whole the engine keeps the deadline.
                self._fail(export, AbortCause.DEADLINE, "the deadline passed before the COMMIT")
            elif outgoing is None:
                # While it is computed it takes nothing that its engine does not need anyway.
                if export.is_whole and now >= export.lease_begins + self._lease_s:
                    self._fail(export, AbortCause.LEASE, "no decode worker within the lease")
            elif outgoing.is_uncommitted(now, self._lease_s):
                self._fail(export, AbortCause.LEASE, "no COMMIT within the export's lease")
            elif outgoing.is_unanswered(now, self._lease_s):
                error = HandoffFailed("the offer got no answer", stage="handoff")
                self.sender.drop(outgoing, AbortCause.LEASE, error.message, tells=True)
                self._broken.failed(outgoing.peer.incarnation, now)
                self._wait(outgoing, error)

    # ---- for the sender

    def on_credited(self, export: Export) -> None:
        """Note how long the receiver took to reserve, refusals included."""
        waited_s = self._clock.now() - export.offered_at
        export.times = replace(export.times, reserve_wait_s=waited_s)
        self._gives_no_more(export)

    def on_committed(self, export: Export, sent: Sent) -> None:
        """Give the blocks back and end the leg well."""
        export.times = replace(
            export.times,
            transfer_s=sent.transfer_s,
            exposed_s=self._clock.now() - export.first_token_at,
            transfer_bytes=sent.num_bytes,
        )
        self._transfers.append(
            Transfer(
                peer_worker_id=sent.peer_worker_id,
                num_bytes=sent.num_bytes,
                seconds=sent.moving_s,
                transport=sent.transport,
            )
        )
        assert export.outgoing is not None, "it was committed"
        self._broken.worked(export.outgoing.peer.incarnation)
        self._forget(export)
        self._tell_over(export, None, None)

    def on_failed(
        self, outgoing: Outgoing, cause: AbortCause, error: PdserveError | None, *, is_good: bool
    ) -> None:
        """Keep an export whose KV is good; else end its leg."""
        if is_good and error is not None:
            if cause is AbortCause.FAULT:
                self._broken.failed(outgoing.peer.incarnation, self._clock.now())
            self._wait(outgoing, error)
            return
        self._forget(outgoing.export)
        self._tell_over(outgoing.export, cause, error)

    # ---- for higher tiers

    def give_way(self) -> None:
        """End the exports that the engine asks for; what others are asked is theirs to do."""
        for holder in self._pool.outside.asked():
            export = self._givers.get(holder)
            if export is not None:
                self.counts["gave_way"] += 1
                assert self._owner is not None, "report_to comes first"
                self._owner.on_gave_way(export.opened)
                self._fail(export, AbortCause.LEASE, "its blocks went to a higher tier")

    def _on_told(self) -> None:
        # On whichever thread changed something in the pool.
        if self._givers and self._pool.outside.asked():
            self._errands.soon(self.give_way)

    def _may_give(self, export: Export) -> None:
        """Let it be asked from now on, if it is whole, and waits."""
        outgoing = export.outgoing
        waits = outgoing is None or outgoing.handoff.state is HandoffState.OFFERED
        if self._tier_of is None or not (export.is_whole and waits):
            return
        holder = export_holder(export.opened.leg.handoff_id)
        self._givers[holder] = export
        self._pool.outside.enter(
            Outsider(
                holder=holder,
                tier=self._tier_of(export.opened.leg.priority),
                arrived=export.opened.arrived,
                order=export.sequence.order,
                num_preemptions=export.opened.leg.num_preemptions,
            )
        )

    def _gives_no_more(self, export: Export) -> None:
        holder = export_holder(export.opened.leg.handoff_id)
        if self._givers.pop(holder, None) is not None:
            self._pool.outside.leave(holder)

    # ---- ends

    def _wait(self, outgoing: Outgoing, error: PdserveError) -> None:
        export = outgoing.export
        export.outgoing = None
        export.lease_begins = self._clock.now()
        self.counts["waited"] += 1
        self._may_give(export)
        waiting = ExportWaiting(
            key=export.key, handoff_id=outgoing.handoff_id, error=error, lease_s=self._lease_s
        )
        assert self._owner is not None, "report_to comes first"
        self._owner.on_export_waiting(export.opened, waiting)

    def _fail(self, export: Export, cause: AbortCause, detail: str) -> None:
        self.abort(export.key, cause, detail)
        self._tell_over(export, cause, abort_error(cause, "handoff", detail))

    def _forget(self, export: Export) -> None:
        del self._exports[export.key]
        if export.is_whole:
            self._pool.release(export.holder)
        # After that: else whoever it was asked for would ask another.
        self._gives_no_more(export)

    def _tell_over(
        self, export: Export, cause: AbortCause | None, error: PdserveError | None
    ) -> None:
        assert self._owner is not None, "report_to comes first"
        self._owner.on_handoff_over(export.opened, cause, error, export.times)
