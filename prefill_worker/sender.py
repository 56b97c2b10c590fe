"""Handoffs as their sender sees them, one link and one segment at a time.

    begin ──▶ dialled, Offer sent ──Credit──▶ credited ┐
                                                       ├──▶ segments ──Commit──▶ on_committed
    push, whenever blocks were finished ───────────────┘
                                              any of it fails ──▶ on_failed

Whose turn it is, what is kept and for how long is the outbox's business. Bytes that were announced
are sent as they were, also when their handoff is given up meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cluster.errors import HandoffFailed, PdserveError
from cluster.handoff import (
    AbortCause,
    AbortHandoff,
    Commit,
    Credit,
    HandoffState,
    LinkSignal,
    Offer,
)
from cluster.rpc.legs import abort_error
from cluster.transport.base import TransportError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torch import Tensor

    from cluster.clock import Clock
    from cluster.kv.block_pool import BlockPool
    from cluster.kv.layout import KVLayout
    from cluster.request import Peer
    from cluster.rpc.errands import Errands
    from cluster.rpc.link import Link, LinkEvents
    from prefill_worker.exports import Export, Outgoing, Segment

logger = logging.getLogger(__name__)

_FAULTLESS = (AbortCause.REFUSED, AbortCause.LEASE)
"""A receiver that says so has no fault to find with the KV: another one may take it."""


class Dialer(Protocol):
    """Finds the one live link to a decode worker, dialling where there is none."""

    async def link_to(self, peer: Peer, timeout_s: float) -> Link:
        """Return an open link; raises HandoffFailed or WorkerLost."""
        ...


class BlockReader(Protocol):
    """The cache, as the sender needs it; called on link threads."""

    def export_blocks(
        self, block_ids: tuple[int, ...], out_B: Tensor, layers: range | None = None
    ) -> None:
        """Copy these layers of blocks into ``out_B``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a committed handoff cost."""

    peer_worker_id: str
    num_bytes: int
    transfer_s: float
    """Over its segments: from the manifest until the bytes had left, the last one's to COMMIT."""
    moving_s: float
    """The same from each segment's turn on the link: waiting behind others, and for what is not
    computed yet, is no property of the pair."""
    transport: str = ""
    """What moved them (a ``TransportKind`` value); empty where the link is gone already."""


class SenderEvents(Protocol):
    """Who owns the exports."""

    def on_credited(self, export: Export) -> None:
        """The receiver has reserved blocks."""
        ...

    def on_committed(self, export: Export, sent: Sent) -> None:
        """The receiver owns the KV."""
        ...

    def on_failed(
        self, outgoing: Outgoing, cause: AbortCause, error: PdserveError | None, *, is_good: bool
    ) -> None:
        """A handoff was aborted from outside; ``is_good``: another receiver may take its KV."""
        ...


class Sender:
    """All handoffs of one prefill half. Event loop only, but for the reading of blocks."""

    def __init__(  # noqa: PLR0913 (what it moves, and whom it works with)
        self,
        *,
        pool: BlockPool,
        cache: BlockReader,
        layout: KVLayout,
        clock: Clock,
        dial_s: float,
        make_dialer: Callable[[LinkEvents], Dialer],
        errands: Errands,
        events: SenderEvents,
        streams: bool,
    ) -> None:
        """With ``streams`` finished layers and blocks go out before their export is whole."""
        self._pool = pool
        self._cache = cache
        self._layout = layout
        self._clock = clock
        self._dial_s = dial_s
        self._dialer = make_dialer(self)
        self._errands = errands
        self._events = events
        self._streams = streams
        self._outgoing: dict[str, Outgoing] = {}
        self.counts: Counter[str] = Counter()
        """``started`` = ``committed`` + ``failed`` when nothing is under way; ``segments`` sent,
        ``bytes`` committed."""

    def begin(self, outgoing: Outgoing) -> None:
        """Offer an export to a decode worker."""
        self._outgoing[outgoing.handoff_id] = outgoing
        self._errands.run(self._dial(outgoing))

    def push(self, export: Export) -> None:
        """Give the next segment to the link, unless one is there or nothing is finished."""
        outgoing = export.outgoing
        if outgoing is None or outgoing.is_sending or not (self._streams or export.is_whole):
            return
        handoff = outgoing.handoff
        if handoff.state not in (HandoffState.RESERVED, HandoffState.SENDING):
            return
        segment = export.take_segment(self._pool, self._layout)
        if segment is None:
            return
        if handoff.state is HandoffState.RESERVED:
            handoff.advance(HandoffState.SENDING)
            self.counts["started"] += 1
        self.counts["segments"] += 1
        outgoing.begin(segment, self._clock.now())
        self._errands.run(self._send(outgoing, segment, self._start(outgoing, segment)))

    def drop(
        self, outgoing: Outgoing, cause: AbortCause, detail: str = "", *, tells: bool = False
    ) -> None:
        """Abort a handoff; ``tells`` the receiver."""
        handoff = outgoing.handoff
        if handoff.state is HandoffState.SENDING:
            self.counts["failed"] += 1
        logger.info(
            "handoff=%s leg=%s aborted cause=%s in=%s",
            handoff.handoff_id, handoff.key, cause.value, handoff.state.value,
        )  # fmt: skip
        handoff.advance(HandoffState.ABORTED, cause)
        del self._outgoing[handoff.handoff_id]
        if tells:
            self._tell_abort(outgoing, cause, detail)

    # ---- for the links

    def on_signal(self, link: Link, message: LinkSignal) -> None:
        """Take the receiver's word about a handoff; what is late or strange is dropped."""
        if not isinstance(message, Credit | Commit | AbortHandoff):
            logger.warning("peer=%s sent %s", link.peer.worker_id, type(message).__name__)
            return
        outgoing = self._outgoing.get(message.handoff_id)
        if outgoing is None or outgoing.link is not link:
            logger.debug("handoff=%s late %s", message.handoff_id, type(message).__name__)
            return
        if isinstance(message, AbortHandoff):
            error = abort_error(message.cause, "handoff", message.detail)
            outgoing.export.preempted(message.num_preemptions)
            self._failed(outgoing, message.cause, error, is_good=message.cause in _FAULTLESS)
        elif isinstance(message, Credit):
            self._credited(outgoing)
        else:
            self._committed(outgoing)

    def on_link_lost(self, link: Link, reason: str) -> None:
        """Fail all handoffs that went over this link."""
        self._errands.guard(functools.partial(self._link_lost, link, reason))

    def _link_lost(self, link: Link, reason: str) -> None:
        for outgoing in list(self._outgoing.values()):
            if outgoing.link is link:
                error = HandoffFailed(f"link lost: {reason}", stage="handoff")
                self._failed(outgoing, AbortCause.FAULT, error, is_good=True)

    # ---- one handoff's way

    async def _dial(self, outgoing: Outgoing) -> None:
        handoff, export = outgoing.handoff, outgoing.export
        patience_s = min(self._dial_s, export.opened.deadline - self._clock.now())
        try:
            link = await self._dialer.link_to(outgoing.peer, patience_s)
        except PdserveError as error:
            if not handoff.is_over:
                self._failed(outgoing, AbortCause.FAULT, error, is_good=True)
            return
        outgoing.link = link
        if handoff.is_over:
            # The decode worker may already have the leg, and waits for an offer.
            assert handoff.cause is not None
            self._tell_abort(outgoing, handoff.cause, "")
            return
        if not link.is_open:
            broken = HandoffFailed("the link broke before the offer", stage="handoff")
            self._failed(outgoing, AbortCause.FAULT, broken, is_good=True)
            return
        logger.info(
            "handoff=%s leg=%s to=%s offered blocks=%d",
            handoff.handoff_id, handoff.key, outgoing.peer.worker_id, handoff.num_blocks,
        )  # fmt: skip
        outgoing.asked_at = self._clock.now()
        offer = Offer(
            handoff_id=handoff.handoff_id,
            key=handoff.key,
            num_blocks=handoff.num_blocks,
            num_tokens=export.num_tokens,
            is_redirected=outgoing.is_redirected,
            num_preemptions=export.opened.leg.num_preemptions,
        )
        self._errands.tell(link, offer)

    def _credited(self, outgoing: Outgoing) -> None:
        if outgoing.handoff.state is not HandoffState.OFFERED:
            logger.warning("handoff=%s credited twice", outgoing.handoff_id)
            return
        outgoing.handoff.advance(HandoffState.RESERVED)
        self._events.on_credited(outgoing.export)
        self.push(outgoing.export)

    def _start(self, outgoing: Outgoing, segment: Segment) -> Awaitable[None]:
        """Give a segment to the link; its manifest leaves before anything that is said later."""
        assert outgoing.link is not None, "credited over a link"
        read = functools.partial(self._read, outgoing, segment)
        try:
            return outgoing.link.send_export(segment.manifest, read, timeout_s=None)
        except PdserveError as error:
            failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed

    async def _send(self, outgoing: Outgoing, segment: Segment, sending: Awaitable[None]) -> None:
        try:
            await sending
        except PdserveError as error:
            if not outgoing.handoff.is_over:
                # The manifest may not even have left, so that the receiver waits for it.
                self._tell_abort(outgoing, AbortCause.FAULT, error.message)
                is_good = isinstance(error, TransportError)
                self._failed(outgoing, AbortCause.FAULT, error, is_good=is_good)
        finally:
            # The link's thread reads it no more, whatever happened.
            self._pool.release(segment.holder)
            outgoing.is_sending = False
        if not (outgoing.handoff.is_over or segment.manifest.is_last):
            outgoing.transfer_s, outgoing.moving_s = outgoing.spent(self._clock.now())
            self.push(outgoing.export)

    def _read(
        self, outgoing: Outgoing, segment: Segment, start: int, num_blocks: int, out_B: Tensor
    ) -> None:
        # On the link's thread.
        outgoing.read_at = now = self._clock.now()
        if start == 0:
            outgoing.turn_at = now
        block_ids = segment.block_ids[start : start + num_blocks]
        self._cache.export_blocks(block_ids, out_B, segment.manifest.layers)

    def _committed(self, outgoing: Outgoing) -> None:
        handoff, export = outgoing.handoff, outgoing.export
        if handoff.state is not HandoffState.SENDING or not outgoing.is_all_sent:
            logger.warning("handoff=%s committed in %s", handoff.handoff_id, handoff.state)
            return
        transfer_s, moving_s = outgoing.spent(self._clock.now())
        link = outgoing.link
        sent = Sent(
            peer_worker_id=outgoing.peer.worker_id,
            num_bytes=handoff.num_blocks * self._layout.block_bytes,
            transfer_s=transfer_s,
            moving_s=moving_s,
            transport=link.state.transport.value if link is not None and link.is_open else "",
        )
        handoff.advance(HandoffState.COMMITTED)
        del self._outgoing[handoff.handoff_id]
        self.counts["committed"] += 1
        self.counts["bytes"] += sent.num_bytes
        logger.info(
            "handoff=%s leg=%s to=%s committed bytes=%d transfer_s=%.4f",
            handoff.handoff_id, handoff.key, sent.peer_worker_id, sent.num_bytes, transfer_s,
        )  # fmt: skip
        self._events.on_committed(export, sent)

    def _failed(
        self, outgoing: Outgoing, cause: AbortCause, error: PdserveError | None, *, is_good: bool
    ) -> None:
        self.drop(outgoing, cause)
        self._events.on_failed(outgoing, cause, error, is_good=is_good)

    def _tell_abort(self, outgoing: Outgoing, cause: AbortCause, detail: str) -> None:
        if outgoing.link is not None:
            message = AbortHandoff(handoff_id=outgoing.handoff_id, cause=cause, detail=detail)
            self._errands.tell(outgoing.link, message)
