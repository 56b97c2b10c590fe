"""Receiver's side of a handoff: from the offer or the leg to the COMMIT or the abort.

    leg ───┐
           ├─▶ joined ──▶ waiting for blocks (``reservations``) ──▶ reserved, Credit sent
    Offer ─┘                       └──patience──▶ refused
    manifests ──▶ sending: segments are scattered slice by slice ──the last──▶ committed

Leg and offer come in either order, and neither waits for the other for ever. Before the two are
joined nothing is reserved. An abort, also one for a higher tier (``giving``), frees the reservation
in any state, and waits for one slice's copy at most (``landing``): late bytes are thrown away.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import TYPE_CHECKING

from cluster.errors import DeadlineExceeded, HandoffFailed, InvalidRequest, PdserveError
from cluster.handoff import (
    AbortCause,
    AbortHandoff,
    Commit,
    Credit,
    Handoff,
    HandoffState,
    LinkSignal,
    ManifestBytes,
    Offer,
)
from cluster.rpc.legs import OpenLeg, abort_error
from cluster.transport.manifest import Manifest
from decode_worker import agreement
from decode_worker.giving import GivingImports
from decode_worker.landing import BlockWriter, Landing, discard
from decode_worker.past import PastHandoffs
from decode_worker.reservations import Import, WaitingImports

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.clock import Clock
    from cluster.kv.block_pool import BlockPool
    from cluster.kv.layout import KVLayout
    from cluster.rpc.errands import Errands
    from cluster.rpc.link import Link
    from decode_worker.inbox_events import InboxEvents

logger = logging.getLogger(__name__)

MAX_HANDOFFS = 4096
"""Handoffs that are open at a time, beyond which offers are refused."""

_MOVING = (HandoffState.RESERVED, HandoffState.SENDING)
_SAID_OF_LEGS = {AbortCause.FAULT: AbortCause.REFUSED}
"""What a sender is told where only the leg here ends: there is nothing wrong with its KV, and
another decode worker may take it."""


class Inbox:
    """All handoffs of one decode half. Event loop only, but for the scattering of blocks."""

    def __init__(  # noqa: PLR0913 (what it moves, and whom it works with)
        self,
        *,
        pool: BlockPool,
        cache: BlockWriter,
        layout: KVLayout,
        clock: Clock,
        lease_s: float,
        patience_s: float,
        errands: Errands,
        needs_all: Callable[[int], bool] = lambda _: False,
        tier_of: Callable[[str, float, float], int] = lambda *_: 0,
        gives: bool = True,
    ) -> None:
        """``patience_s``: how long an offer waits for blocks before it is refused.

        ``needs_all``: whether one that was preempted so often reserves for the whole output that
        may follow too, since nobody will give way to it, or it will give way no more.
        ``tier_of``: (tier's name, arrival, now) to how high a leg is, where lower ones give way.
        ``gives``: whether reservations give way too.
        """
        self._pool = pool
        self._cache = cache
        self._layout = layout
        self._clock = clock
        self._lease_s = lease_s
        self._needs_all = needs_all
        self._owner: InboxEvents | None = None
        self._imports: dict[str, Import] = {}
        self._waiting = WaitingImports(patience_s, tier_of)
        self.gives = gives
        self._giving = GivingImports(pool, errands, self._give_way, gives=gives)
        self._past = PastHandoffs()
        self._errands = errands
        self.counts: Counter[str] = Counter()
        """``started`` = ``committed`` + ``failed`` when nothing is under way; ``bytes`` taken;
        offers ``refused``, reservations that ``gave_way``; ``dropped_segments`` for nobody."""
        pool.subscribe(self._on_free)

    def __len__(self) -> int:
        """Return the number of handoffs under way."""
        return len(self._imports)

    @property
    def num_waiting(self) -> int:
        """Handoffs that wait for blocks."""
        return len(self._waiting)

    @property
    def num_transferring(self) -> int:
        """Handoffs with blocks reserved."""
        return sum(entry.state in _MOVING for entry in self._imports.values())

    def report_to(self, owner: InboxEvents) -> None:
        """Name who hears what becomes of handoffs."""
        self._owner = owner

    def leg_arrived(self, opened: OpenLeg) -> None:
        """Take a DECODE leg; its offer has come or will come."""
        handoff_id = opened.leg.handoff_id
        cause = self._past.cause(handoff_id)
        if cause is not None:
            error = abort_error(cause, "handoff", "the handoff was over before its decode leg")
            self._tell_owner(opened, cause, error)
            return
        entry = self._imports.setdefault(
            handoff_id, Import(handoff_id=handoff_id, arrived=self._clock.now())
        )
        if entry.opened is not None:
            error = InvalidRequest("this handoff has its leg", field="handoff_id", stage="handoff")
            self._tell_owner(opened, AbortCause.REFUSED, error)
            return
        entry.opened = opened
        self._join(entry)

    def abort(self, opened: OpenLeg, cause: AbortCause) -> None:
        """Give up a leg's handoff because the leg ends here; tells the sender, not the owner.

        Unless ``cause`` ends the request, the sender may keep its export for another.
        """
        entry = self._imports.get(opened.leg.handoff_id)
        if entry is not None and entry.opened is opened:
            self._close(entry, _SAID_OF_LEGS.get(cause, cause), tells=True)

    def close(self, cause: AbortCause) -> None:
        """Refuse all offers that have no leg; those with one are aborted leg by leg."""
        for entry in list(self._imports.values()):
            if entry.opened is None:
                self._close(entry, _SAID_OF_LEGS.get(cause, cause), tells=True)

    def expire(self, now: float) -> None:
        """End what waited too long, for its other half, for blocks, or for bytes."""
        for entry in list(self._imports.values()):
            if entry.opened is None:
                if now >= entry.arrived + self._lease_s:
                    self._close(entry, AbortCause.LEASE, "no decode leg came", tells=True)
            elif now >= entry.opened.deadline:
                error = DeadlineExceeded("the deadline passed before the KV came", stage="handoff")
                self._end(entry, AbortCause.DEADLINE, error, tells=True)
        if self._waiting.age(now):
            self.reserve_waiting()
        while (overdue := self._waiting.overdue(now)) is not None:
            self._refuse(overdue, f"within {self._waiting.patience_s:g} s")
            self.reserve_waiting()
        self._past.forget(now)

    def reserve_waiting(self) -> None:
        """Give free blocks to those that wait, in their order; who lacks some asks for them."""
        while (entry := self._waiting.first()) is not None:
            handoff_id, handoff = entry.handoff_id, entry.handoff
            assert handoff is not None, "joined before it waits"
            assert entry.link is not None, "offered over a link"
            num_blocks = self._num_blocks(entry)
            if not self._giving.reserve(entry, handoff, num_blocks):
                self._pool.ask(entry.demand(num_blocks))
                return
            self._waiting.remove(entry)
            handoff.advance(HandoffState.RESERVED)
            logger.info("handoff=%s leg=%s reserved blocks=%d", handoff_id, handoff.key, num_blocks)
            self._errands.tell(entry.link, Credit(handoff_id=handoff_id))
        self._pool.ask(None)

    # ---- for the links

    def on_signal(self, link: Link, message: LinkSignal) -> None:
        """Take the sender's word about a handoff; what is late or strange is dropped."""
        if isinstance(message, Offer):
            self._offered(link, message)
        elif isinstance(message, ManifestBytes):
            self._announced(link, message.payload)
        elif isinstance(message, AbortHandoff):
            self._aborted(link, message)
        else:
            logger.warning("peer=%s sent %s", link.peer.worker_id, type(message).__name__)

    def on_link_lost(self, link: Link, reason: str) -> None:
        """End all handoffs that came over this link and are not committed."""
        self._errands.guard(functools.partial(self._link_lost, link, reason))

    def _link_lost(self, link: Link, reason: str) -> None:
        for entry in list(self._imports.values()):
            if entry.link is link:
                error = HandoffFailed(f"link lost: {reason}", stage="handoff")
                self._end(entry, AbortCause.FAULT, error, tells=False)

    # ---- one handoff's way

    def _offered(self, link: Link, offer: Offer) -> None:
        handoff_id = offer.handoff_id
        cause = self._past.cause(handoff_id)
        if cause is None and len(self._imports) >= MAX_HANDOFFS:
            cause = AbortCause.REFUSED
        if cause is not None:
            self._errands.tell(link, AbortHandoff(handoff_id=handoff_id, cause=cause))
            return
        entry = self._imports.setdefault(
            handoff_id, Import(handoff_id=handoff_id, arrived=self._clock.now())
        )
        if entry.offer is not None:
            logger.warning("handoff=%s offered twice", handoff_id)
            return
        entry.offer, entry.link = offer, link
        num_blocks = self._layout.num_blocks_for(offer.num_tokens)
        handoff = Handoff(handoff_id, offer.key, num_blocks)
        entry.landing = Landing(handoff, self._pool, self._cache, self._layout)
        self._join(entry)

    def _join(self, entry: Import) -> None:
        if entry.opened is None or entry.offer is None:
            return
        try:
            agreement.check_offer(
                entry.offer, entry.opened.leg, self._layout, self._pool.num_blocks
            )
        except HandoffFailed as error:
            self._end(entry, AbortCause.REFUSED, error, tells=True)
            return
        entry.opened.preempted(entry.offer.num_preemptions)
        self._waiting.add(entry, self._clock.now())
        self.reserve_waiting()

    def _num_blocks(self, entry: Import) -> int:
        assert entry.opened is not None, "joined before it waits"
        needs_all = self._needs_all(entry.opened.leg.num_preemptions)
        return entry.num_blocks(self._layout, reserves_all=needs_all)

    def _refuse(self, entry: Import, why: str) -> None:
        handoff = entry.handoff
        assert handoff is not None, "joined before it waits"
        self.counts["refused"] += 1
        error = HandoffFailed(f"no room for {handoff.num_blocks} blocks {why}", stage="handoff")
        self._end(entry, AbortCause.REFUSED, error, tells=True)

    def _announced(self, link: Link, payload: bytes) -> None:
        try:
            manifest = Manifest.unpack(payload)
        except HandoffFailed as error:
            # How many bytes follow is unknown, so nothing after them could be told apart.
            link.close(error.message)
            return
        entry = self._expecting(link, manifest)
        self._errands.run(self._receive(link, manifest, entry))

    def _expecting(self, link: Link, manifest: Manifest) -> Import | None:
        """Return the credited handoff that the segment belongs to; None: throw its bytes away."""
        entry = self._imports.get(manifest.handoff_id)
        if entry is None or entry.link is not link or entry.state not in _MOVING:
            logger.info("handoff=%s late or unknown, its bytes are dropped", manifest.handoff_id)
            return None
        assert entry.offer is not None, "only what was offered is credited"
        assert entry.opened is not None, "and only what was joined"
        assert entry.landing is not None, "set with the offer"
        try:
            agreement.check_manifest(manifest, entry.offer, entry.opened.leg, self._layout)
            self._giving.preempted(entry, manifest.num_preemptions)
            if self._num_blocks(entry) > len(self._pool.importing(entry.handoff_id) or ()):
                # Its prefill has just been preempted for the last time.
                self._refuse(entry, "and all that may come")
                return None
            is_first = entry.landing.announce(manifest)
        except HandoffFailed as error:
            self._end(entry, AbortCause.FAULT, error, tells=True)
            return None
        if is_first:
            self.counts["started"] += 1
        return entry

    async def _receive(self, link: Link, manifest: Manifest, entry: Import | None) -> None:
        landing = entry.landing if entry is not None else None
        scatter = functools.partial(landing.write, manifest) if landing is not None else discard
        try:
            await link.recv_import(manifest, scatter, timeout_s=None)
        except PdserveError as error:
            self._receive_failed(entry, error)
            return
        except Exception as error:
            logger.exception("handoff=%s blocks not written", manifest.handoff_id)
            failed = HandoffFailed(f"blocks not written: {type(error).__name__}", stage="handoff")
            self._receive_failed(entry, failed)
            return
        if entry is None or entry.landing is None or entry.state is not HandoffState.SENDING:
            self.counts["dropped_segments"] += 1
            return
        last = entry.landing.landed(manifest)
        if last is not None:
            self._commit(link, entry, last)

    def _receive_failed(self, entry: Import | None, error: PdserveError) -> None:
        if entry is None or entry.state is not HandoffState.SENDING:
            self.counts["dropped_segments"] += 1
            return
        self._end(entry, AbortCause.FAULT, error, tells=True)

    def _commit(self, link: Link, entry: Import, manifest: Manifest) -> None:
        landing, opened = entry.landing, entry.opened
        assert landing is not None, "it was being sent"
        assert opened is not None, "it was joined"
        landing.commit()
        del self._imports[entry.handoff_id]
        self._giving.leave(entry)
        self._past.remember(entry.handoff_id, AbortCause.REFUSED, self._clock.now())
        self._errands.tell(link, Commit(handoff_id=entry.handoff_id))
        self.counts["committed"] += 1
        self.counts["bytes"] += landing.num_bytes
        names = entry.handoff_id, opened.key
        logger.info("handoff=%s leg=%s committed bytes=%d", *names, landing.num_bytes)
        assert self._owner is not None, "report_to comes first"
        self._owner.on_imported(opened, manifest.output_ids, manifest.logprobs)

    def _aborted(self, link: Link, message: AbortHandoff) -> None:
        entry = self._imports.get(message.handoff_id)
        if entry is None:
            # Before its leg and its offer, or long over: remembered for whoever comes late.
            self._past.remember(message.handoff_id, message.cause, self._clock.now())
            return
        if entry.link is not None and entry.link is not link:
            logger.warning("handoff=%s aborted over another link", message.handoff_id)
            return
        error = abort_error(message.cause, "handoff", message.detail)
        self._end(entry, message.cause, error, tells=False)

    # ---- ends

    def _give_way(self, entry: Import, opened: OpenLeg) -> None:
        """Refuse it after all, for a higher tier: its KV is good where it is."""
        self.counts["gave_way"] += 1
        assert self._owner is not None, "report_to comes first"
        self._owner.on_gave_way(opened)
        error = HandoffFailed("its blocks went to a higher tier", stage="handoff")
        self._end(entry, AbortCause.REFUSED, error, tells=True)

    def _end(
        self, entry: Import, cause: AbortCause, error: PdserveError | None, *, tells: bool
    ) -> None:
        self._close(entry, cause, error.message if error is not None else "", tells=tells)
        if entry.opened is not None:
            self._tell_owner(entry.opened, cause, error)

    def _close(self, entry: Import, cause: AbortCause, detail: str = "", *, tells: bool) -> None:
        handoff_id, state = entry.handoff_id, entry.state
        if state is HandoffState.SENDING:
            self.counts["failed"] += 1
        logger.info(
            "handoff=%s aborted cause=%s in=%s",
            handoff_id, cause.value, state.value if state is not None else "waiting for its offer",
        )  # fmt: skip
        del self._imports[handoff_id]
        was_waiting = self._waiting.remove(entry)
        self._past.remember(handoff_id, cause, self._clock.now())
        if entry.landing is not None:
            entry.landing.abort(cause)
        # After that: else whoever it was asked for would ask another.
        self._giving.leave(entry)
        if was_waiting:
            # It held back those behind it, and had no blocks whose return would wake them.
            self._errands.soon(self.reserve_waiting)
        if tells and entry.link is not None:
            count = entry.opened.leg.num_preemptions if entry.opened is not None else 0
            message = AbortHandoff(
                handoff_id=handoff_id, cause=cause, detail=detail, num_preemptions=count
            )
            self._errands.tell(entry.link, message)

    def _tell_owner(self, opened: OpenLeg, cause: AbortCause, error: PdserveError | None) -> None:
        assert self._owner is not None, "report_to comes first"
        self._owner.on_handoff_over(opened, cause, error)

    def _on_free(self) -> None:
        # On whichever thread freed blocks.
        if self._waiting:
            self._errands.soon(self.reserve_waiting)
