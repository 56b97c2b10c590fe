"""What a prefill leg has to pass on, to whom it is being passed, and which blocks are on their way.

    export      computing ──▶ whole ─────────────▶ over         the KV of one leg, under one lease
    handoffs      └─ one ──fails──▶ (waiting) ──redirect──▶ another
    segments           └─ blocks 0..8 ─▶ 8..16 ─▶ ..             of one handoff, one at a time,
                          or their layers: 0..10 ─▶ 10..20 ─▶ ..  also out of a running step

Who holds a block on the sender's side::

    the sequence, until it leaves the engine ──▶ ("export", handoff_id), until COMMIT or end
    ("segment", handoff_id, first block, first layer), beside them: while the link's thread may
        read it

So a sequence that is preempted or aborted, and an export that is given up, let go of their blocks
at once, and what is being read goes to nobody before it was read. While a step runs it writes the
later layers of blocks whose first ones are read: other bytes, and the blocks stay where they are.
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
    """Blocks of an export, or some layers of them, that are sent together; held until the link has
    read them."""

    manifest: Manifest
    block_ids: tuple[int, ...]

    @property
    def holder(self) -> tuple[str, str, int, int]:
        """Who holds the blocks beside the export."""
        manifest = self.manifest
        return ("segment", manifest.handoff_id, manifest.first_block, manifest.first_layer)


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
    band: range = range(0)
    """Of the export's blocks: those that went to the link last."""
    num_layers: int = 0
    """Layers of these that did; all of those before them."""
    is_all_sent: bool = False
    """Whether the last segment was given to the link."""
    is_sending: bool = False
    """Whether a segment is with the link."""
    segment_at: float = 0.0
    """When the latest segment was given to the link."""
    turn_at: float | None = None
    """When the link's thread came to the first bytes of that segment; set there."""
    read_at: float | None = None
    """When it came to the latest ones."""
    transfer_s: float = 0.0
    """With the link, over the segments before the last."""
    moving_s: float = 0.0
    """The same without the wait for their turns."""

    @property
    def handoff_id(self) -> str:
        """The handoff's id."""
        return self.handoff.handoff_id

    def is_unanswered(self, now: float, lease_s: float) -> bool:
        """Whether the receiver has let the offer wait for longer than the lease."""
        is_open = self.handoff.state is HandoffState.OFFERED and self.asked_at is not None
        return is_open and now >= (self.asked_at or 0.0) + lease_s

    def is_uncommitted(self, now: float, lease_s: float) -> bool:
        """Whether no COMMIT came within the lease of the last segment's latest bytes."""
        return self.is_all_sent and self.read_at is not None and now >= self.read_at + lease_s

    def begin(self, segment: Segment, now: float) -> None:
        """Note that a segment goes to the link."""
        self.is_sending = True
        manifest = segment.manifest
        self.band, self.num_layers = manifest.blocks, manifest.layers.stop
        self.is_all_sent = manifest.is_last
        self.segment_at = now
        self.turn_at = self.read_at = None if manifest.num_bytes else now

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
    lease_begins: float = 0.0
    """Since when it waits, once it is whole."""
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

    def preempted(self, num_preemptions: int) -> None:
        """Note how often its choice was preempted in all, as its receiver counts; its sequence,
        if it is still computed, goes on from there."""
        self.opened.preempted(num_preemptions)
        sequence = self.sequence
        num_elsewhere = num_preemptions - sequence.num_preemptions
        sequence.num_preemptions_before = max(sequence.num_preemptions_before, num_elsewhere)

    def take_segment(self, pool: BlockPool, layout: KVLayout) -> Segment | None:
        """Hold what is finished and not sent yet as a segment; None where there is nothing.

        The last one goes when the export is whole, with the tokens drawn: what is left then, or
        nothing more.
        """
        outgoing = self.outgoing
        assert outgoing is not None, "a segment belongs to a handoff"
        # The step thread counts a sequence's computed tokens down before it gives its blocks
        # away, and up after it wrote them: under the pool's lock what it says is in these blocks.
        # So is what it says of stored layers.
        with pool.lock:
            held = pool.blocks_of(self.holder)
            part = self._next_part(outgoing, len(held), layout)
            if part is None:
                return None
            blocks, layers = part
            segment = Segment(
                manifest=Manifest.of(
                    outgoing.handoff_id,
                    self.key,
                    layout,
                    num_tokens=self.num_tokens,
                    output_ids=self.output_ids,
                    blocks=blocks,
                    layers=layers,
                    logprobs=self.logprobs,
                    num_preemptions=self.opened.leg.num_preemptions,
                ),
                block_ids=held[blocks.start : blocks.stop],
            )
            pool.share(self.holder, segment.block_ids, segment.holder)
        return segment

    def _next_part(
        self, outgoing: Outgoing, num_held: int, layout: KVLayout
    ) -> tuple[range, range] | None:
        """Return the blocks and layers to send next.

        What is there, and was not sent before, has two steps::

            layer  0 [ finished         | stored by the running step ]
                     [ finished         ]
            block  0                    num_finished                 num_stored

        A band that was begun is ended first. Then all that is finished goes, or else what the
        running step has stored begins a band.
        """
        num_layers = layout.num_layers
        num_finished, num_stored, num_stored_layers = self._progress(num_held, layout)
        band = outgoing.band
        if 0 < outgoing.num_layers < num_layers:
            is_stored = band.stop <= num_stored
            end = num_layers if band.stop <= num_finished else is_stored * num_stored_layers
            return (band, range(outgoing.num_layers, end)) if end > outgoing.num_layers else None
        if num_finished > band.stop:
            return range(band.stop, num_finished), range(num_layers)
        if num_stored > band.stop and num_stored_layers:
            return range(band.stop, num_stored), range(num_stored_layers)
        if self.is_whole and not outgoing.is_all_sent:
            return range(self.num_blocks, self.num_blocks), range(0)
        return None

    def _progress(self, num_held: int, layout: KVLayout) -> tuple[int, int, int]:
        """Return (blocks finished, blocks with stored layers, how many layers these have)."""
        if self.is_whole:
            return self.num_blocks, self.num_blocks, layout.num_layers
        num_computed = self.sequence.num_computed_tokens
        if num_computed >= self.num_tokens:
            # The tokens are drawn as well, and about to be here.
            return 0, 0, 0
        stored = self.sequence.stored
        num_tokens, num_layers = (0, 0) if stored is None else stored.so_far
        is_end = num_tokens >= self.num_tokens
        num_stored = self.num_blocks if is_end else num_tokens // layout.block_size
        num_finished = num_computed // layout.block_size
        return min(num_finished, num_held), min(num_stored, num_held), num_layers

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
