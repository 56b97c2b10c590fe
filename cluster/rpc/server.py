"""A worker's one gRPC server: legs from routers (Attach), links from prefill workers, health.

An attached router is one stream: its legs and aborts come up, and whatever its legs emit between
two writes goes down as one message. A router that stops reading is cut off when its queue is
full or a write takes too long; a stream that ends takes its legs with it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]

from cluster.errors import InvalidRequest, PdserveError, StartupError
from cluster.request import LegEnd, Token
from cluster.rpc import convert
from cluster.rpc.options import INCARNATION_METADATA, SERVER_OPTIONS
from cluster.wire import worker_pb2 as wire
from cluster.wire import worker_pb2_grpc as wire_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from cluster.rpc.legs import LegHandler

    AttachContext = grpc.aio.ServicerContext[wire.RouterMessage, wire.TokenBatch]
    LinkContext = grpc.aio.ServicerContext[wire.LinkMessage, wire.LinkMessage]

logger = logging.getLogger(__name__)

MAX_QUEUED_ITEMS = 16384
"""Tokens and ends that wait for one router before it is cut off."""
MAX_ITEMS_PER_MESSAGE = 8192
"""Keeps a message under the size cap whatever the length of request ids."""
WRITE_TIMEOUT_S = 10.0
"""A router that takes nothing for so long is cut off, however little waits for it."""


class LinkServer(Protocol):
    """Serves the Link calls of prefill workers; ``link_acceptor.LinkAcceptor`` is one."""

    async def serve(self, request_iterator: AsyncIterator[wire.LinkMessage], context: Any) -> None:
        """Run one link until it breaks."""
        ...


class WorkerServer:
    """Binds, serves and stops; ``address`` is known once ``start`` has returned."""

    def __init__(
        self,
        legs: LegHandler,
        links: LinkServer | None,
        *,
        incarnation: str,
        host: str,
        port: int = 0,
    ) -> None:
        self._host, self._port = host, port
        self._servicer = _Servicer(legs, links, incarnation)
        self._health = health_aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        """Listen, and return the address; raises StartupError where the port is taken."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        wire_grpc.add_WorkerServicer_to_server(self._servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            port = server.add_insecure_port(f"{self._host}:{self._port}")
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {self._host}:{self._port}") from error
        await server.start()
        self._server = server
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        return f"{self._host}:{port}"

    async def stop(self, grace_s: float) -> None:
        """Send what is queued, close every stream, and stop listening; idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        await self._health.enter_graceful_shutdown()
        self._servicer.close()
        await server.stop(grace_s)


class _Servicer(wire_grpc.WorkerServicer):
    def __init__(self, legs: LegHandler, links: LinkServer | None, incarnation: str) -> None:
        self._legs = legs
        self._links = links
        self._incarnation = incarnation
        self._attached: set[_Outgoing] = set()
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        for outgoing in self._attached:
            outgoing.close()

    async def Attach(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[wire.RouterMessage],
        context: AttachContext,
    ) -> None:
        # A coroutine, not a generator: its ``finally`` runs the moment that the call is cancelled.
        await context.send_initial_metadata(((INCARNATION_METADATA, self._incarnation),))
        await self._refuse_strangers(context)
        outgoing = _Outgoing()
        self._attached.add(outgoing)
        reader = asyncio.ensure_future(self._read(request_iterator, outgoing))
        reader.add_done_callback(lambda _: outgoing.close())
        try:
            while await outgoing.has_news():
                await outgoing.write_to(context)
        finally:
            outgoing.close()
            self._attached.discard(outgoing)
            self._legs.router_lost(outgoing)
            reader.cancel()
            (result,) = await asyncio.gather(reader, return_exceptions=True)
        if outgoing.is_overrun:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the router reads too slowly")
        if isinstance(result, PdserveError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, result.message)
        if isinstance(result, Exception):
            logger.error("an attach failed", exc_info=result)
            await context.abort(grpc.StatusCode.INTERNAL, "the worker failed on a message")

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

    async def _read(self, messages: AsyncIterator[wire.RouterMessage], outgoing: _Outgoing) -> None:
        router = "?"
        async for message in messages:
            kind = message.WhichOneof("kind")
            if (kind == "hello") != (router == "?"):
                raise InvalidRequest("an attach begins with its one hello", field="hello")
            if kind == "hello":
                router = f"{message.hello.router_id}/{message.hello.incarnation}"
                logger.info("router=%s attached", router)
            elif kind == "start":
                self._start(message.start, outgoing)
            elif kind == "abort":
                cause = convert.cause_from_wire(message.abort.cause)
                self._legs.abort_leg(convert.key_from_wire(message.abort.key), cause)
        logger.info("router=%s detached", router)

    def _start(self, message: wire.Leg, outgoing: _Outgoing) -> None:
        try:
            leg = convert.leg_from_wire(message)
        except PdserveError as error:
            key = convert.key_from_wire(message.key)
            outgoing.emit((), (LegEnd(key=key, error=error),))
            return
        self._legs.start_leg(leg, outgoing)


class _Outgoing:
    """What waits for one router; everything that is emitted between two writes is one message."""

    def __init__(self) -> None:
        self._tokens: list[Token] = []
        self._ends: list[LegEnd] = []
        self._wake = asyncio.Event()
        self._is_closed = False
        self._patience: asyncio.Timeout | None = None
        self.is_overrun = False

    def emit(self, tokens: Sequence[Token], ends: Sequence[LegEnd]) -> None:
        if self._is_closed:
            return
        self._tokens.extend(tokens)
        self._ends.extend(ends)
        if len(self._tokens) + len(self._ends) > MAX_QUEUED_ITEMS:
            self.cut()
        self._wake.set()

    def cut(self) -> None:
        """Give the router up, also in the middle of a write that it does not take."""
        self._tokens, self._ends = [], []
        self.is_overrun = True
        self.close()
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(0.0)

    async def write_to(self, context: AttachContext) -> None:
        """Write what waits as one message; returns also when the router is cut off meanwhile."""
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S) as self._patience:
                await context.write(self.take())
        except TimeoutError:
            if not self.is_overrun:
                self.cut()
        finally:
            self._patience = None

    def close(self) -> None:
        """Take no more; what is queued is still sent."""
        self._is_closed = True
        self._wake.set()

    async def has_news(self) -> bool:
        """Wait for something to send; False once closed and all of it taken."""
        while not (self._tokens or self._ends or self._is_closed):
            self._wake.clear()
            await self._wake.wait()
        return bool(self._tokens or self._ends)

    def take(self) -> wire.TokenBatch:
        """Return what waits, as one message; more than fits in one stays for the next."""
        tokens = self._tokens[:MAX_ITEMS_PER_MESSAGE]
        # A leg's end must not overtake its tokens.
        ends = [] if len(tokens) < len(self._tokens) else self._ends[:MAX_ITEMS_PER_MESSAGE]
        del self._tokens[: len(tokens)]
        del self._ends[: len(ends)]
        return wire.TokenBatch(
            tokens=[convert.token_to_wire(token) for token in tokens],
            ends=[convert.end_to_wire(end) for end in ends],
        )
