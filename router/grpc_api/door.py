"""One gRPC server of a router: Inference, health that follows readiness, and reflection."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]
from grpc_reflection.v1alpha import reflection

from cluster.errors import StartupError
from cluster.grpc_server import StandingServer, make_server
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from router.grpc_api.caps import GrpcCaps
from router.grpc_api.connections import Connections
from router.grpc_api.inference import Inference
from router.grpc_api.keys import KeyGuard
from router.grpc_api.malformed import MessageGuard
from router.ports import listen_no_more

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import grpc.aio

    from cluster.tls import DoorTls
    from router.service import Readiness, Service

_SERVICE = "pdserve.v1.Inference"
_ROLES = ("prefill", "decode")
"""Each is a service of its own to those who ask after its health."""
_MIN_PING_INTERVAL_MS = 900
"""Clients may ping once a second, whether they have calls open or not."""
_LAST_WORDS_S = 0.25
"""For the status of a call that has just ended to go out: else its client hears UNAVAILABLE."""
_MIN_AGE_S = 1.0
_AGE_SPREAD = 1.1
"""gRPC lets connections get up to so much older than they were to get."""
_GOING_S = 0.5
"""From being asked to connect again to doing it."""


class GrpcDoor:
    """One gRPC server. Several routers on a host share a port: the kernel spreads connections."""

    def __init__(  # noqa: PLR0913 (whose it is, where, within which bounds, and what is beside it)
        self,
        service: Service,
        *,
        host: str,
        port: int,
        caps: GrpcCaps | None = None,
        tls: DoorTls | None = None,
        services: Sequence[Callable[[grpc.aio.Server], None]] = (),
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),  # type: ignore[type-arg]
    ) -> None:
        """With ``tls``, nothing else is spoken. ``services`` add themselves to the server.

        ``interceptors`` see each call before our own do.
        """
        self._service = service
        self._host = host
        self.port = port
        """Once it is open, where."""
        self._caps = caps or GrpcCaps()
        self._tls = tls
        self._services = services
        self._interceptors = interceptors
        self._server = StandingServer(self._make)
        self._health = _Health()
        self._beats: list[asyncio.Task[None]] = []
        self._age_s = max(_MIN_AGE_S, min(self._caps.connection_age_s, service.limits.drain_s / 2))
        self.connections: Connections | None = None

    @property
    def is_serving(self) -> bool:
        """Whether calls are taken and health is told."""
        is_beating = bool(self._beats) and not any(beat.done() for beat in self._beats)
        return self._server.is_serving and is_beating

    async def start(self) -> int:
        """Listen and return the port; raises StartupError where the address can't be had."""
        await self._tell_health(self._service.readiness())
        self.port = port = await self._server.start(self.port)
        self.connections = connections = Connections(port, self._caps.max_per_address)
        self._beats = [
            asyncio.create_task(self._keep_health()),
            asyncio.create_task(self._keep_shares(connections)),
        ]
        return port

    async def tell_health(self) -> None:
        """Tell it now to those who watch, and not with the next beat."""
        await self._tell_health(self._service.readiness())

    @property
    def going_s(self) -> float:
        """So long after its last newcomer each client has been asked to connect again, and has.

        Calls that come before that are served. A server that stops would end as CANCELLED those
        that cross its asking.
        """
        return _AGE_SPREAD * self._age_s + _GOING_S

    @property
    def has_clients(self) -> bool:
        """Whether anybody is connected."""
        return self.connections is not None and self.connections.num_open() > 0

    def listen_no_more(self) -> None:
        """Let nobody new in; whoever is connected is served."""
        listen_no_more(self.port)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls and end those that run after ``grace_s``, or a moment; idempotent."""
        beats, self._beats = self._beats, []
        for beat in beats:
            beat.cancel()
        if beats:
            await asyncio.wait(beats)
            await self._health.enter_graceful_shutdown()
            self._health.end_watches()
            await self._server.stop(max(grace_s, _LAST_WORDS_S))

    def _make(self, port: int) -> tuple[grpc.aio.Server, int]:
        server = make_server(
            interceptors=(*self._interceptors, KeyGuard(self._service.keys), MessageGuard()),
            options=self._options(),
        )
        pb_grpc.add_InferenceServicer_to_server(Inference(self._service, self._caps), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        for add_to in self._services:
            add_to(server)
        address = f"{self._host}:{port}"
        try:
            if self._tls is None:
                return server, int(server.add_insecure_port(address))
            return server, int(server.add_secure_port(address, self._tls.server_credentials))
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {address} for gRPC") from error

    def _options(self) -> tuple[tuple[str, int], ...]:
        caps, limits = self._caps, self._service.limits
        last_words_s = limits.max_deadline_s + caps.write_grace_s
        return (
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", limits.max_body_bytes),
            ("grpc.max_metadata_size", limits.max_header_bytes),
            ("grpc.absolute_max_metadata_size", limits.max_header_bytes),
            ("grpc.max_concurrent_streams", caps.max_streams),
            ("grpc.max_allowed_incoming_connections", caps.max_connections),
            ("grpc.server_handshake_timeout_ms", _ms(caps.handshake_timeout_s)),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.ping_timeout_ms", _ms(caps.ping_timeout_s)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", _ms(caps.keepalive_s)),
            ("grpc.keepalive_timeout_ms", _ms(caps.ping_timeout_s)),
            ("grpc.max_connection_age_ms", _ms(self._age_s)),
            ("grpc.max_connection_age_grace_ms", _ms(last_words_s)),
        )

    async def _keep_shares(self, connections: Connections) -> None:
        while True:
            await asyncio.sleep(self._caps.look_beat_s)
            connections.look()

    async def _keep_health(self) -> None:
        told: Readiness | None = None
        while True:
            readiness = self._service.readiness()
            if readiness != told:
                await self._tell_health(readiness)
                told = readiness
            await asyncio.sleep(self._caps.health_beat_s)

    async def _tell_health(self, readiness: Readiness) -> None:
        """Say whether a request could be placed, as /health/ready does, and which role is there."""
        statuses = health_pb2.HealthCheckResponse
        are_well = {"": readiness.is_ready, _SERVICE: readiness.is_ready}
        are_well |= {role: readiness.has(role) for role in _ROLES}
        for name, is_well in are_well.items():
            await self._health.set(name, statuses.SERVING if is_well else statuses.NOT_SERVING)


class _Health(health_aio.HealthServicer):  # type: ignore[misc]  # untyped
    """Health whose watchers don't keep a server from its end."""

    def __init__(self) -> None:
        super().__init__()
        self._is_over = asyncio.Event()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Tell the health now and whenever it changes, to the server's end."""
        watching = asyncio.ensure_future(super().Watch(request, context))
        over = asyncio.ensure_future(self._is_over.wait())
        try:
            await asyncio.wait({watching, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (watching, over):
                task.cancel()
            await asyncio.gather(watching, over, return_exceptions=True)

    def end_watches(self) -> None:
        """End those of now and all that come."""
        self._is_over.set()


def _ms(seconds: float) -> int:
    return math.ceil(1000.0 * seconds)
