"""Do a decode leg, the offer for it and the manifests after it speak of the same KV?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.errors import HandoffFailed

if TYPE_CHECKING:
    from cluster.handoff import Offer
    from cluster.kv.layout import KVLayout
    from cluster.request import Leg
    from cluster.transport.manifest import Manifest


def check_offer(offer: Offer, leg: Leg, layout: KVLayout, pool_blocks: int) -> None:
    """Raise HandoffFailed unless the offer is what the leg needs and can fit at all.

    Its blocks are the sender's, and may be of another size: what they are is known by the first
    manifest.
    """
    num_tokens = len(leg.prompt_ids) + len(leg.output_ids)
    pairs = (
        ("key", str(offer.key), str(leg.key)),
        ("num_tokens", offer.num_tokens, num_tokens),
    )
    for name, offered, expected in pairs:
        if offered != expected:
            raise HandoffFailed(
                f"offer.{name}: {offered}, expected {expected}", stage="handoff", field=name
            )
    num_blocks = layout.num_blocks_for(num_tokens)
    if num_blocks > pool_blocks:
        raise HandoffFailed(
            f"offer.num_tokens: {num_blocks} blocks never fit into {pool_blocks}",
            stage="handoff",
            field="num_tokens",
        )


def check_manifest(manifest: Manifest, offer: Offer, leg: Leg, layout: KVLayout) -> None:
    """Raise HandoffFailed unless the segment that follows is part of what was offered."""
    expected_ids = leg.output_ids if manifest.is_last else ()
    pairs: tuple[tuple[str, object, object], ...] = (
        ("request_id", manifest.request_id, offer.key.request_id),
        ("attempt", manifest.attempt, offer.key.attempt),
        ("choice", manifest.choice, offer.key.choice),
        ("num_tokens", manifest.num_tokens, offer.num_tokens),
        ("output_ids", manifest.output_ids[:-1], expected_ids),
    )
    for name, sent, expected in pairs:
        if sent != expected:
            raise _not_offered(name)
    manifest.check_layout(layout)
    if manifest.sender_layout().num_blocks_for(manifest.num_tokens) != offer.num_blocks:
        raise _not_offered("num_blocks")


def _not_offered(name: str) -> HandoffFailed:
    return HandoffFailed(f"manifest.{name}: not what was offered", stage="handoff", field=name)
