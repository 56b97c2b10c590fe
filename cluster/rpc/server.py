"""A worker's one gRPC server: legs from routers (Attach), links from prefill workers, health.

What an attached router is, ``attach`` and ``session`` say.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]

from cluster.errors import StartupError
from cluster.grpc_server import StandingServer, make_server
from cluster.rpc.attach import Attachments
from cluster.rpc.options import INCARNATION_METADATA, SERVER_OPTIONS
from cluster.trust import ClusterToken
from cluster.wire import worker_pb2 as wire
from cluster.wire import worker_pb2_grpc as wire_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from cluster.request import Beat
    from cluster.rpc.legs import LegHandler

    AddService = Callable[[grpc.aio.Server], None]

    AttachContext = grpc.aio.ServicerContext[wire.RouterMessage, wire.TokenBatch]
    LinkContext = grpc.aio.ServicerContext[wire.LinkMessage, wire.LinkMessage]

logger = logging.getLogger(__name__)

_HEALTH_BEAT_S = 0.1
"""How late health may be told."""


class LinkServer(Protocol):
    """Serves the Link calls of prefill workers; ``link_acceptor.LinkAcceptor`` is one."""

    async def serve(self, request_iterator: AsyncIterator[wire.LinkMessage], context: Any) -> None:
        """Run one link until it breaks."""
        ...


class WorkerServer:
    """Binds, serves and stops; ``address`` is known once ``start`` has returned."""

    def __init__(  # noqa: PLR0913 (what it serves, and where)
        self,
        legs: LegHandler,
        links: LinkServer | None,
        *,
        incarnation: str,
        host: str,
        port: int = 0,
        services: Sequence[AddService] = (),
        beat: Callable[[], Beat] | None = None,
        is_well: Callable[[], bool] = lambda: True,
        token: ClusterToken | None = None,
    ) -> None:
        """``services`` are served besides; ``beat`` says how far the engine is.

        ``is_well`` says whether work may be placed here: it is looked at ten times a second.
        With a ``token``, whoever calls has to show it, and what else shows who belongs here.
        """
        self._host, self._port = host, port
        self._services = services
        self._token = token or ClusterToken()
        self._servicer = _Servicer(Attachments(legs, beat), links, incarnation)
        self._health = health_aio.HealthServicer()
        self._is_well = is_well
        self._told_well = False
        self._telling: asyncio.Task[None] | None = None
        self._server: StandingServer | None = None

    async def start(self) -> str:
        """Listen, and return the address; raises StartupError where the port is taken."""
        await self.tell_health()
        server = StandingServer(self._make)
        port = await server.start(self._port)
        self._server = server
        self._telling = asyncio.create_task(self._keep_health())
        return f"{self._host}:{port}"

    async def tell_health(self) -> None:
        """Tell it now, and not with the next beat."""
        statuses, self._told_well = health_pb2.HealthCheckResponse, self._is_well()
        status = statuses.SERVING if self._told_well else statuses.NOT_SERVING
        await self._health.set("", status)

    async def _keep_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_BEAT_S)
            if self._is_well() != self._told_well:
                await self.tell_health()

    def _make(self, port: int) -> tuple[grpc.aio.Server, int]:
        server = make_server(interceptors=self._token.guards, options=SERVER_OPTIONS)
        wire_grpc.add_WorkerServicer_to_server(self._servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        for add_to in self._services:
            add_to(server)
        try:
            return server, self._token.open_port(server, f"{self._host}:{port}")
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {self._host}:{port}") from error

    async def stop(self, grace_s: float) -> None:
        """Send what is queued, close every stream, and stop listening; idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait([self._telling])
        await self._health.enter_graceful_shutdown()
        self._servicer.close()
        await server.stop(grace_s)


class _Servicer(wire_grpc.WorkerServicer):
    def __init__(
        self, attachments: Attachments, links: LinkServer | None, incarnation: str
    ) -> None:
        self._attachments = attachments
        self._links = links
        self._incarnation = incarnation
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        self._attachments.close()

    async def Attach(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[wire.RouterMessage],
        context: AttachContext,
    ) -> None:
        # A coroutine, not a generator: its ``finally`` runs the moment that the call is cancelled.
        await context.send_initial_metadata(((INCARNATION_METADATA, self._incarnation),))
        await self._refuse_strangers(context)
        await self._attachments.serve(request_iterator, context)

    async def Link(  # type: ignore[override]
        self, request_iterator: AsyncIterator[wire.LinkMessage], context: LinkContext
    ) -> None:
        if self._links is None or self._is_closed:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this worker imports no KV")
        await self._links.serve(request_iterator, context)

    async def _refuse_strangers(self, context: AttachContext) -> None:
        meant = dict(context.invocation_metadata() or ()).get(INCARNATION_METADATA)
        if self._is_closed or meant != self._incarnation:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"incarnation {meant} is not here" if not self._is_closed else "stopping",
            )
