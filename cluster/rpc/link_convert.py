"""Link messages between the wire and the domain; what comes in is checked field by field."""

from __future__ import annotations

from cluster.errors import HandoffFailed
from cluster.handoff import (
    AbortCause,
    AbortHandoff,
    Commit,
    Credit,
    LinkSignal,
    ManifestBytes,
    Offer,
)
from cluster.kv.layout import ELEMENT_BYTES, KVLayout
from cluster.request import MAX_PREEMPTIONS, LegKey, Peer
from cluster.rpc.convert import key_to_wire, peer_to_wire
from cluster.transport.manifest import MAX_PACKED_BYTES
from cluster.wire import worker_pb2 as pb

_MAX_ID_CHARS = 256
_MAX_DETAIL_CHARS = 1024
_MAX_COUNT = 1 << 24
_LAYOUT_FIELDS = ("num_layers", "num_kv_heads", "head_dim", "block_size", "num_shards")

_CAUSE_TO_WIRE = {cause: pb.AbortCause.Value(f"ABORT_CAUSE_{cause.name}") for cause in AbortCause}
_CAUSE_FROM_WIRE = {number: cause for cause, number in _CAUSE_TO_WIRE.items()}


def hello_to_wire(sender: Peer, receiver_incarnation: str, layout: KVLayout) -> pb.LinkMessage:
    """Return the sender's first message."""
    return pb.LinkMessage(
        hello=pb.LinkHello(
            sender=peer_to_wire(sender),
            receiver_incarnation=receiver_incarnation,
            layout=pb.KVLayout(
                num_layers=layout.num_layers,
                num_kv_heads=layout.num_kv_heads,
                head_dim=layout.head_dim,
                block_size=layout.block_size,
                dtype=layout.dtype,
                model_fingerprint=layout.model_fingerprint,
                shard_index=layout.shard_index,
                num_shards=layout.num_shards,
            ),
        )
    )


def peer_from_wire(wire: pb.Peer) -> Peer:
    """Return the other worker; its address may be empty: only the sender dials."""
    return Peer(
        worker_id=_text("sender.worker_id", wire.worker_id),
        incarnation=_text("sender.incarnation", wire.incarnation),
        address=_text("sender.address", wire.address, low=0),
    )


def layout_from_wire(wire: pb.KVLayout) -> KVLayout:
    """Return the peer's KV layout."""
    for name in _LAYOUT_FIELDS:
        _count(f"layout.{name}", getattr(wire, name))
    if wire.dtype not in ELEMENT_BYTES:
        raise _bad("layout.dtype", "is none that is known")
    return KVLayout(
        num_layers=wire.num_layers,
        num_kv_heads=wire.num_kv_heads,
        head_dim=wire.head_dim,
        block_size=wire.block_size,
        dtype=wire.dtype,
        model_fingerprint=_text("layout.model_fingerprint", wire.model_fingerprint, low=0),
        shard_index=_count("layout.shard_index", wire.shard_index, low=0),
        num_shards=wire.num_shards,
    )


def signal_to_wire(signal: LinkSignal) -> pb.LinkMessage:
    """Return one signal as the stream carries it."""
    match signal:
        case Offer(handoff_id=handoff_id, key=key):
            return pb.LinkMessage(
                offer=pb.Offer(
                    handoff_id=handoff_id,
                    key=key_to_wire(key),
                    num_blocks=signal.num_blocks,
                    num_tokens=signal.num_tokens,
                    is_redirected=signal.is_redirected,
                    num_preemptions=signal.num_preemptions,
                )
            )
        case Credit(handoff_id=handoff_id):
            return pb.LinkMessage(credit=pb.Credit(handoff_id=handoff_id))
        case ManifestBytes(payload=payload):
            return pb.LinkMessage(manifest=payload)
        case Commit(handoff_id=handoff_id):
            return pb.LinkMessage(commit=pb.Commit(handoff_id=handoff_id))
        case AbortHandoff(handoff_id=handoff_id, cause=cause, detail=detail):
            return pb.LinkMessage(
                abort=pb.AbortHandoff(
                    handoff_id=handoff_id,
                    cause=_CAUSE_TO_WIRE[cause],
                    detail=detail[:_MAX_DETAIL_CHARS],
                    num_preemptions=signal.num_preemptions,
                )
            )


def signal_from_wire(wire: pb.LinkMessage) -> LinkSignal:
    """Return one signal of the peer's; raises HandoffFailed naming the field that is wrong."""
    match wire.WhichOneof("kind"):
        case "offer":
            return _offer_from_wire(wire.offer)
        case "credit":
            return Credit(handoff_id=_text("credit.handoff_id", wire.credit.handoff_id))
        case "manifest":
            if not 0 < len(wire.manifest) <= MAX_PACKED_BYTES:
                raise _bad("manifest", f"has {len(wire.manifest)} bytes")
            return ManifestBytes(payload=wire.manifest)
        case "commit":
            return Commit(handoff_id=_text("commit.handoff_id", wire.commit.handoff_id))
        case "abort":
            return _abort_from_wire(wire.abort)
        case other:
            raise _bad("kind", f"{other} has no place here")


def _offer_from_wire(wire: pb.Offer) -> Offer:
    key = LegKey(
        _text("offer.key.request_id", wire.key.request_id),
        _count("offer.key.attempt", wire.key.attempt, low=0),
        _count("offer.key.choice", wire.key.choice, low=0),
    )
    return Offer(
        handoff_id=_text("offer.handoff_id", wire.handoff_id),
        key=key,
        num_blocks=_count("offer.num_blocks", wire.num_blocks),
        num_tokens=_count("offer.num_tokens", wire.num_tokens),
        is_redirected=wire.is_redirected,
        num_preemptions=min(wire.num_preemptions, MAX_PREEMPTIONS),
    )


def _abort_from_wire(wire: pb.AbortHandoff) -> AbortHandoff:
    cause = _CAUSE_FROM_WIRE.get(wire.cause)
    if cause is None:
        raise _bad("abort.cause", f"{wire.cause} is unknown")
    return AbortHandoff(
        handoff_id=_text("abort.handoff_id", wire.handoff_id),
        cause=cause,
        detail=_text("abort.detail", wire.detail, low=0, high=_MAX_DETAIL_CHARS),
        num_preemptions=min(wire.num_preemptions, MAX_PREEMPTIONS),
    )


def _text(name: str, value: str, low: int = 1, high: int = _MAX_ID_CHARS) -> str:
    if not low <= len(value) <= high:
        raise _bad(name, f"has {len(value)} characters, {low}..{high} are allowed")
    return value


def _count(name: str, value: int, low: int = 1) -> int:
    if not low <= value <= _MAX_COUNT:
        raise _bad(name, f"{value} is outside {low}..{_MAX_COUNT}")
    return value


def _bad(name: str, what: str) -> HandoffFailed:
    return HandoffFailed(f"link message, {name}: {what}", stage="link", field=name)
