"""What a prefill leg has to pass on, to whom it is being passed, and which blocks are on their way.

    export      computing ──▶ whole ─────────────▶ over         the KV of one leg, under one lease
    handoffs      └─ one ──fails──▶ (waiting) ──redirect──▶ another
    segments           └─ blocks 0..8 ─▶ 8..16 ─▶ ..             of one handoff, one at a time

Who holds a block on the sender's side::

    the sequence, until it leaves the engine ──▶ ("export", handoff_id), until COMMIT or end
    ("segment", handoff_id, first block), beside them: while the link's thread may read it

So a sequence that is preempted or aborted, and an export that is given up, let go of their blocks
at once, and what is being read goes to nobody before it was read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.engine.sequence import Sequence
from cluster.handoff import Handoff, HandoffState
from cluster.lifetime import LegTimes
from cluster.request import Peer, TokenLogprobs
from cluster.rpc.legs import OpenLeg
from cluster.rpc.link import Link
from cluster.transport.manifest import Manifest

if TYPE_CHECKING:
    from cluster.kv.block_pool import BlockPool, Holder
    from cluster.kv.layout import KVLayout
    from cluster.request import LegKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Blocks of an export that are sent together, held until the link has read them."""

    manifest: Manifest
    block_ids: tuple[int, ...]

    @property
    def holder(self) -> tuple[str, str, int]:
        """Who holds the blocks beside the export."""
        return ("segment", self.manifest.handoff_id, self.manifest.first_block)


@dataclass(slots=True, kw_only=True, eq=False)
class Outgoing:
    """One handoff as its sender sees it."""

    handoff: Handoff
    export: Export
    peer: Peer
    is_redirected: bool
    link: Link | None = None
    asked_at: float | None = None
    """When the offer left."""
    num_sent: int = 0
    """Blocks in segments that were given to the link."""
    is_sending: bool = False
    """Whether a segment is with the link."""
    segment_at: float = 0.0
    """When the latest segment was given to the link."""
    turn_at: float | None = None
    """When the link's thread came to the first bytes of that segment; set there."""
    transfer_s: float = 0.0
    """With the link, over the segments before the last."""
    moving_s: float = 0.0
    """The same without the wait for their turns."""

    @property
    def handoff_id(self) -> str:
        """The handoff's id."""
        return self.handoff.handoff_id

    @property
    def is_all_sent(self) -> bool:
        """Whether the last segment was given to the link."""
        return self.num_sent == self.handoff.num_blocks

    def is_unanswered(self, now: float, lease_s: float) -> bool:
        """Whether the receiver has let the offer wait for longer than the lease."""
        is_open = self.handoff.state is HandoffState.OFFERED and self.asked_at is not None
        return is_open and now >= (self.asked_at or 0.0) + lease_s

    def is_uncommitted(self, now: float, lease_s: float) -> bool:
        """Whether no COMMIT came within the lease of the last segment's turn."""
        return self.is_all_sent and self.turn_at is not None and now >= self.turn_at + lease_s

    def begin(self, segment: Segment, now: float) -> None:
        """Note that a segment goes to the link."""
        self.is_sending = True
        self.num_sent += segment.manifest.num_blocks
        self.segment_at, self.turn_at = now, None

    def spent(self, now: float) -> tuple[float, float]:
        """Return (with the link, moving), seconds, with the latest segment ending now."""
        turn_at = self.segment_at if self.turn_at is None else self.turn_at
        return self.transfer_s + now - self.segment_at, self.moving_s + now - turn_at


@dataclass(slots=True, kw_only=True, eq=False)
class Export:
    """The KV of one leg, from the start of its first chunk on."""

    opened: OpenLeg
    sequence: Sequence
    num_tokens: int
    num_blocks: int
    offered_at: float
    """When it was first offered to anyone."""
    outgoing: Outgoing | None = None
    """The handoff under way; without one the export waits for a redirect."""
    lease_ends: float = 0.0
    """Until when it waits."""
    output_ids: tuple[int, ...] = ()
    """The tokens drawn so far, once the KV is whole and the export holds its blocks."""
    logprobs: TokenLogprobs | None = None
    times: LegTimes = field(default_factory=LegTimes)
    first_token_at: float = 0.0

    @property
    def key(self) -> LegKey:
        """The leg's key."""
        return self.opened.key

    @property
    def is_whole(self) -> bool:
        """Whether all of it is computed, and its blocks are the export's own."""
        return bool(self.output_ids)

    @property
    def holder(self) -> Holder:
        """Who holds its blocks."""
        return export_holder(self.opened.leg.handoff_id) if self.is_whole else self.key

    def take_segment(self, pool: BlockPool, layout: KVLayout) -> Segment | None:
        """Hold what is finished and not sent yet as a segment; None where there is nothing.

        The last block waits until the export is whole, for it goes with the tokens drawn.
        """
        outgoing = self.outgoing
        assert outgoing is not None, "a segment belongs to a handoff"
        # The step thread counts a sequence's computed tokens down before it gives its blocks
        # away, and up after it wrote them: under the pool's lock what it says is in these blocks.
        with pool.lock:
            held = pool.blocks_of(self.holder)
            num_finished = self.num_blocks
            if not self.is_whole:
                num_finished = self.sequence.num_computed_tokens // layout.block_size
                num_finished = min(num_finished, self.num_blocks - 1, len(held))
            blocks = range(outgoing.num_sent, num_finished)
            if not blocks:
                return None
            segment = Segment(
                manifest=Manifest.of(
                    outgoing.handoff_id,
                    self.key,
                    layout,
                    num_tokens=self.num_tokens,
                    output_ids=self.output_ids,
                    blocks=blocks,
                    logprobs=self.logprobs,
                ),
                block_ids=held[blocks.start : blocks.stop],
            )
            pool.share(self.holder, segment.block_ids, segment.holder)
        return segment

    def begin(self, *, is_redirected: bool) -> Outgoing:
        """Start a handoff to the leg's decode worker."""
        leg = self.opened.leg
        assert leg.peer is not None, "the leg was checked"
        self.outgoing = Outgoing(
            handoff=Handoff(leg.handoff_id, leg.key, self.num_blocks),
            export=self,
            peer=leg.peer,
            is_redirected=is_redirected,
        )
        return self.outgoing


def export_holder(handoff_id: str) -> tuple[str, str]:
    """Return the pool's name for the holder of an export."""
    return ("export", handoff_id)
