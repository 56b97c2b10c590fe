"""What the tests of links share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from cluster.request import Peer
from cluster.rpc.link_acceptor import LinkAcceptor
from cluster.rpc.options import SERVER_OPTIONS
from cluster.rpc.server import WorkerServer
from cluster.wire import worker_pb2_grpc
from tests.factories_attach import Attached, Handler
from tests.factories_link import LAYOUT, LIMITS, Half, MakeWorld, Servicer, World, loopback

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cluster.transport.base import Transport


@pytest.fixture
async def make_world() -> AsyncIterator[MakeWorld]:
    worlds, servers = [], []

    async def make(transports: tuple[Transport, Transport] | None = None, **changes) -> World:
        transports = transports or loopback()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        receiver = Half()
        peer = Peer(worker_id="d", incarnation="d-1", address=address)
        settings = {
            "me": peer,
            "layout": LAYOUT,
            "transport": transports[1],
            "events": receiver,
            "limits": LIMITS,
        }
        acceptor = LinkAcceptor(**{**settings, **changes})
        worker_pb2_grpc.add_WorkerServicer_to_server(Servicer(acceptor), server)
        await server.start()
        world = World(transports, acceptor, receiver, peer, [])
        worlds.append(world)
        servers.append(server)
        return world

    yield make
    for world in worlds:
        for dialer in world.dialers:
            await dialer.close()
        await world.acceptor.close()
    for server in servers:
        await server.stop(None)


@pytest.fixture
async def attached() -> AsyncIterator[Attached]:
    """A worker's server whose handler the test plays."""
    handler = Handler()
    worker_server = WorkerServer(
        handler, None, incarnation="w1", host="127.0.0.1", beat=lambda: handler.beat
    )
    world = Attached(worker_server, await worker_server.start(), handler)
    yield world
    for client in world.clients:
        await client.close()
    for wire in world.wires:
        await wire.stop()
    await worker_server.stop(0.5)
