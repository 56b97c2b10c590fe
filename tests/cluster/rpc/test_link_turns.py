"""Manifests that are lost, repeated or out of order: other bytes would follow than they say."""

from __future__ import annotations

import asyncio

import pytest

from cluster.handoff import ManifestBytes
from cluster.transport.base import TransportError
from cluster.transport.manifest import Manifest
from tests.factories_link import LONG_S, Half, Importer, gather_from, make_export, make_manifest


@pytest.mark.parametrize("fault", ["repeated", "lost"])
async def test_a_manifest_out_of_turn_loses_the_link(make_world, fault):
    """CASES P-21: a message that is longer than its buffer would end the process."""
    world = await make_world()
    sender = Half()
    link = await world.dialer(sender).link_to(world.peer, LONG_S)
    importer = Importer(world.receiver)
    take, seen = world.receiver.on_message, []

    def disturbed(link, message) -> None:
        if isinstance(message, ManifestBytes):
            seen.append(message)
        if fault == "lost" and len(seen) == 1:
            return
        take(link, message)
        if fault == "repeated" and len(seen) == 1:
            take(link, message)

    world.receiver.on_message = disturbed
    exports = [
        asyncio.create_task(
            link.send_export(
                make_manifest(16 * blocks, f"h{blocks}"), gather_from(make_export(blocks))
            )
        )
        for blocks in (1, 2)
    ]
    await asyncio.gather(*exports, return_exceptions=True)
    await sender.until(lambda: bool(sender.lost))
    results = await asyncio.gather(*importer.tasks, return_exceptions=True)
    assert any(isinstance(result, TransportError) for result in results)
    assert [Manifest.unpack(message.payload).turn for message in seen[:1]] == [1]
