"""Sender's side of a handoff: from the offer to the COMMIT or the abort, whichever comes first.

    offer ──▶ dialled, Offer sent ──Credit──▶ credited ┐
                                                       ├──▶ sending ──Commit──▶ over
    export ──▶ blocks belong to ("export", handoff_id) ┘

Offer and export come from the engine's events, credit and commit from the link, in either order.
An abort ends a handoff in any state at once; only its blocks wait until the link thread has
stopped reading them, since bytes that were announced are sent as they were.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from cluster.errors import HandoffFailed, PdserveError
from cluster.handoff import (
    AbortCause,
    AbortHandoff,
    Commit,
    Credit,
    Handoff,
    HandoffState,
    LinkSignal,
    Offer,
)
from cluster.lifetime import LegTimes
from cluster.rpc.legs import OpenLeg, abort_error
from cluster.rpc.link import Link
from cluster.transport.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from cluster.clock import Clock
    from cluster.kv.block_pool import BlockPool
    from cluster.kv.layout import KVLayout
    from cluster.request import Peer
    from cluster.rpc.errands import Errands
    from cluster.rpc.link import LinkEvents

logger = logging.getLogger(__name__)


class Dialer(Protocol):
    """Finds the one live link to a decode worker, dialling where there is none."""

    async def link_to(self, peer: Peer, timeout_s: float) -> Link:
        """Return an open link; raises HandoffFailed or WorkerLost."""
        ...


class BlockReader(Protocol):
    """The cache, as the sender needs it; called on link threads."""

    def export_blocks(self, block_ids: tuple[int, ...], out_B: Tensor) -> None:
        """Copy whole blocks into ``out_B``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One committed handoff, as the cost of its pair is learned from it."""

    peer_worker_id: str
    num_bytes: int
    seconds: float
    """From its turn on the link to the COMMIT: waiting behind others is no property of the pair."""


class OutboxEvents(Protocol):
    """Who owns the legs."""

    def on_handoff_over(
        self, opened: OpenLeg, cause: AbortCause | None, error: PdserveError | None, times: LegTimes
    ) -> None:
        """A handoff ended: committed where ``cause`` is None, else aborted from outside."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Export:
    handoff: Handoff
    opened: OpenLeg
    num_tokens: int
    offered_at: float
    link: Link | None = None
    manifest: Manifest | None = None
    """Set once the KV is whole and its blocks are the export's."""
    times: LegTimes = field(default_factory=LegTimes)
    first_token_at: float = 0.0
    sent_at: float = 0.0
    turn_at: float | None = None
    """When the link thread came to its first bytes; set there."""
    block_ids: tuple[int, ...] = ()
    is_sending: bool = False
    reading: threading.Lock = field(default_factory=threading.Lock)
    """Held by the link thread while it reads blocks."""

    @property
    def holder(self) -> tuple[str, str]:
        return ("export", self.handoff.handoff_id)


class Outbox:
    """All handoffs of one prefill half. Event loop only, but for the reading of blocks."""

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
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._layout = layout
        self._clock = clock
        self._lease_s = lease_s
        self._dialer = make_dialer(self)
        self._owner: OutboxEvents | None = None
        self._exports: dict[str, _Export] = {}
        self._errands = errands
        self._transfers: list[Transfer] = []
        self.counts: Counter[str] = Counter()
        """``started`` = ``committed`` + ``failed`` when nothing is under way; ``bytes`` sent."""

    def __contains__(self, handoff_id: str) -> bool:
        """Whether the handoff is under way."""
        return handoff_id in self._exports

    def __len__(self) -> int:
        """Return the number of handoffs under way."""
        return len(self._exports)

    def report_to(self, owner: OutboxEvents) -> None:
        """Name who hears how handoffs end."""
        self._owner = owner

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Return the transfers that ended since the last call."""
        transfers, self._transfers = self._transfers, []
        return tuple(transfers)

    def offer(self, opened: OpenLeg) -> None:
        """Tell the decode worker what will come; the prompt is only now being computed."""
        leg = opened.leg
        num_tokens = len(leg.prompt_ids) + len(leg.output_ids)
        num_blocks = self._layout.num_blocks_for(num_tokens)
        export = _Export(
            handoff=Handoff(leg.handoff_id, leg.key, num_blocks),
            opened=opened,
            num_tokens=num_tokens,
            offered_at=self._clock.now(),
        )
        self._exports[leg.handoff_id] = export
        self._errands.run(self._dial(export))

    def export(self, opened: OpenLeg, output_ids: tuple[int, ...], times: LegTimes) -> None:
        """Take the blocks of a prefilled sequence over from the engine; send once credited."""
        export = self._exports[opened.leg.handoff_id]
        self._pool.rename(opened.key, export.holder)
        block_ids = self._pool.blocks_of(export.holder)
        export.block_ids = block_ids[: export.handoff.num_blocks]
        export.times = replace(times, reserve_wait_s=export.times.reserve_wait_s)
        export.first_token_at = self._clock.now()
        export.manifest = Manifest.of(
            export.handoff.handoff_id,
            opened.key,
            self._layout,
            num_tokens=export.num_tokens,
            output_ids=output_ids,
        )
        self._send_if_ready(export)

    def abort(self, handoff_id: str, cause: AbortCause, detail: str = "") -> None:
        """End a handoff because its leg ended here; tells the receiver, not the owner."""
        export = self._exports.get(handoff_id)
        if export is None:
            return
        self._close(export, cause)
        self._tell_abort(export, cause, detail)

    def expire(self, now: float) -> None:
        """End what waited beyond its deadline, or was not answered within the lease of its turn."""
        for export in list(self._exports.values()):
            if export.manifest is None:
                continue  # the engine keeps the deadline of what it computes
            if now >= export.opened.deadline:
                self._fail(export, AbortCause.DEADLINE, "the deadline passed before the COMMIT")
            elif (
                export.handoff.state is HandoffState.SENDING
                and export.turn_at is not None
                and now >= export.turn_at + self._lease_s
            ):
                self._fail(export, AbortCause.LEASE, "no COMMIT within the export's lease")

    # ---- for the links

    def on_signal(self, link: Link, message: LinkSignal) -> None:
        """Take the receiver's word about a handoff; what is late or strange is dropped."""
        if not isinstance(message, Credit | Commit | AbortHandoff):
            logger.warning("peer=%s sent %s", link.peer.worker_id, type(message).__name__)
            return
        export = self._exports.get(message.handoff_id)
        if export is None or export.link is not link:
            logger.debug("handoff=%s late %s", message.handoff_id, type(message).__name__)
            return
        if isinstance(message, AbortHandoff):
            error = abort_error(message.cause, "handoff", message.detail)
            self._end(export, message.cause, error)
        elif isinstance(message, Credit):
            self._credited(export)
        else:
            self._committed(export)

    def on_link_lost(self, link: Link, reason: str) -> None:
        """End all handoffs that went over this link."""
        self._errands.guard(functools.partial(self._link_lost, link, reason))

    def _link_lost(self, link: Link, reason: str) -> None:
        for export in list(self._exports.values()):
            if export.link is link:
                error = HandoffFailed(f"link lost: {reason}", stage="handoff")
                self._end(export, AbortCause.FAULT, error)

    # ---- one handoff's way

    async def _dial(self, export: _Export) -> None:
        handoff, peer = export.handoff, export.opened.leg.peer
        assert peer is not None, "the leg was checked"
        patience_s = min(self._lease_s, export.opened.deadline - self._clock.now())
        try:
            link = await self._dialer.link_to(peer, patience_s)
        except PdserveError as error:
            if not handoff.is_over:
                self._end(export, AbortCause.FAULT, error)
            return
        if handoff.is_over:
            # The decode worker may already have the leg, and waits for an offer.
            assert handoff.cause is not None
            self._errands.tell(
                link, AbortHandoff(handoff_id=handoff.handoff_id, cause=handoff.cause)
            )
            return
        if not link.is_open:
            broken = HandoffFailed("the link broke before the offer", stage="handoff")
            self._end(export, AbortCause.FAULT, broken)
            return
        export.link = link
        logger.info(
            "handoff=%s leg=%s to=%s offered blocks=%d",
            handoff.handoff_id, handoff.key, peer.worker_id, handoff.num_blocks,
        )  # fmt: skip
        offer = Offer(
            handoff_id=handoff.handoff_id,
            key=handoff.key,
            num_blocks=handoff.num_blocks,
            num_tokens=export.num_tokens,
        )
        self._errands.tell(link, offer)

    def _credited(self, export: _Export) -> None:
        if export.handoff.state is not HandoffState.OFFERED:
            logger.warning("handoff=%s credited twice", export.handoff.handoff_id)
            return
        export.handoff.advance(HandoffState.RESERVED)
        waited_s = self._clock.now() - export.offered_at
        export.times = replace(export.times, reserve_wait_s=waited_s)
        self._send_if_ready(export)

    def _send_if_ready(self, export: _Export) -> None:
        if export.manifest is not None and export.handoff.state is HandoffState.RESERVED:
            export.handoff.advance(HandoffState.SENDING)
            export.sent_at = self._clock.now()
            export.is_sending = True
            self.counts["started"] += 1
            self._errands.run(self._send(export, export.manifest))

    async def _send(self, export: _Export, manifest: Manifest) -> None:
        assert export.link is not None, "credited over a link"
        try:
            # Given up before this ran: the abort is on its way, and no manifest shall follow it.
            if not export.handoff.is_over:
                await export.link.send_export(
                    manifest, functools.partial(self._read, export), timeout_s=None
                )
        except PdserveError as error:
            if not export.handoff.is_over:
                # The manifest may not even have left, so that the receiver waits for it.
                self._tell_abort(export, AbortCause.FAULT, error.message)
                self._end(export, AbortCause.FAULT, error)
        finally:
            export.is_sending = False
            if export.handoff.is_over:
                self._release(export)

    def _read(self, export: _Export, start: int, num_blocks: int, out_B: Tensor) -> None:
        # On the link's thread.
        if start == 0:
            export.turn_at = self._clock.now()
        with export.reading:
            if not export.block_ids:
                raise HandoffFailed("the export's blocks were given back", stage="transfer")
            self._cache.export_blocks(export.block_ids[start : start + num_blocks], out_B)

    def _committed(self, export: _Export) -> None:
        handoff, manifest = export.handoff, export.manifest
        if handoff.state is not HandoffState.SENDING or manifest is None:
            logger.warning("handoff=%s committed in %s", handoff.handoff_id, handoff.state)
            return
        now = self._clock.now()
        handoff.advance(HandoffState.COMMITTED)
        times = replace(
            export.times,
            transfer_s=now - export.sent_at,
            exposed_s=now - export.first_token_at,
            transfer_bytes=manifest.num_bytes,
        )
        assert export.link is not None, "sent over a link"
        peer_worker_id = export.link.peer.worker_id
        self._transfers.append(
            Transfer(
                peer_worker_id=peer_worker_id,
                num_bytes=manifest.num_bytes,
                seconds=now - (export.sent_at if export.turn_at is None else export.turn_at),
            )
        )
        self.counts["committed"] += 1
        self.counts["bytes"] += manifest.num_bytes
        logger.info(
            "handoff=%s leg=%s to=%s committed bytes=%d transfer_s=%.4f",
            handoff.handoff_id, handoff.key, peer_worker_id, manifest.num_bytes, times.transfer_s,
        )  # fmt: skip
        self._forget(export)
        self._tell_owner(export, None, None, times)

    # ---- ends

    def _fail(self, export: _Export, cause: AbortCause, detail: str) -> None:
        self._tell_abort(export, cause, detail)
        self._end(export, cause, abort_error(cause, "handoff", detail))

    def _tell_abort(self, export: _Export, cause: AbortCause, detail: str) -> None:
        if export.link is not None:
            message = AbortHandoff(handoff_id=export.handoff.handoff_id, cause=cause, detail=detail)
            self._errands.tell(export.link, message)

    def _end(self, export: _Export, cause: AbortCause, error: PdserveError | None) -> None:
        self._close(export, cause)
        self._tell_owner(export, cause, error, export.times)

    def _close(self, export: _Export, cause: AbortCause) -> None:
        handoff = export.handoff
        if handoff.state is HandoffState.SENDING:
            self.counts["failed"] += 1
        logger.info(
            "handoff=%s leg=%s aborted cause=%s in=%s",
            handoff.handoff_id, handoff.key, cause.value, handoff.state.value,
        )  # fmt: skip
        handoff.advance(HandoffState.ABORTED, cause)
        self._forget(export)

    def _forget(self, export: _Export) -> None:
        del self._exports[export.handoff.handoff_id]
        if not export.is_sending:
            self._release(export)

    def _release(self, export: _Export) -> None:
        with export.reading:
            export.block_ids = ()
        self._pool.release(export.holder)

    def _tell_owner(
        self,
        export: _Export,
        cause: AbortCause | None,
        error: PdserveError | None,
        times: LegTimes,
    ) -> None:
        assert self._owner is not None, "report_to comes first"
        self._owner.on_handoff_over(export.opened, cause, error, times)
