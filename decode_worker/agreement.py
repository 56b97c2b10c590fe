"""Do a decode leg, the offer for it and the manifest after it speak of the same KV?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.errors import HandoffFailed

if TYPE_CHECKING:
    from cluster.handoff import Offer
    from cluster.kv.layout import KVLayout
    from cluster.request import Leg
    from cluster.transport.manifest import Manifest


def check_offer(offer: Offer, leg: Leg, layout: KVLayout, pool_blocks: int) -> None:
    """Raise HandoffFailed unless the offer is what the leg needs and can fit at all."""
    num_tokens = len(leg.prompt_ids) + len(leg.output_ids)
    pairs = (
        ("key", str(offer.key), str(leg.key)),
        ("num_tokens", offer.num_tokens, num_tokens),
        ("num_blocks", offer.num_blocks, layout.num_blocks_for(num_tokens)),
    )
    for name, offered, expected in pairs:
        if offered != expected:
            raise HandoffFailed(
                f"offer.{name}: {offered}, expected {expected}", stage="handoff", field=name
            )
    if offer.num_blocks > pool_blocks:
        raise HandoffFailed(
            f"offer.num_blocks: {offer.num_blocks} never fit into {pool_blocks}",
            stage="handoff",
            field="num_blocks",
        )


def check_manifest(manifest: Manifest, offer: Offer, leg: Leg, layout: KVLayout) -> None:
    """Raise HandoffFailed unless the bytes that follow are those that were offered."""
    pairs: tuple[tuple[str, object, object], ...] = (
        ("request_id", manifest.request_id, offer.key.request_id),
        ("attempt", manifest.attempt, offer.key.attempt),
        ("choice", manifest.choice, offer.key.choice),
        ("num_tokens", manifest.num_tokens, offer.num_tokens),
        ("num_blocks", manifest.num_blocks, offer.num_blocks),
        ("output_ids", manifest.output_ids[:-1], leg.output_ids),
    )
    for name, sent, expected in pairs:
        if sent != expected:
            raise HandoffFailed(
                f"manifest.{name}: not what was offered", stage="handoff", field=name
            )
    manifest.check_layout(layout)
