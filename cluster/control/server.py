"""The control plane's process: one gRPC server and a clock.

It binds, keeps time, pushes views and tells its health; ``desk`` serves the streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.control.connection import MAX_MESSAGE_BYTES
from cluster.control.desk import Desk
from cluster.control.settings import ControlSettings
from cluster.errors import EngineFault, StartupError
from cluster.grpc_server import StandingServer, make_server
from cluster.trust import ClusterToken
from cluster.wire import control_pb2 as pb
from cluster.wire import control_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    import grpc.aio

    from cluster.clock import Clock
    from cluster.config import DeployConfig
    from cluster.policy.load import Load

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Control"].full_name
_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 1024),
    # A second server on a taken port must fail, not share it.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
)
_BIND_RETRY_S = 0.1
_FAILING_S = 2.0
"""Whoever hosts a control plane whose every tick has failed for so long starts another."""


class ControlServer:
    """Serves one cluster; ``term`` is minted from the wall clock: a later start is newer."""

    def __init__(
        self,
        config: DeployConfig,
        clock: Clock,
        *,
        settings: ControlSettings | None = None,
        term: int | None = None,
    ) -> None:
        """Raises StartupError where the cluster token cannot be read."""
        self._clock = clock
        self._settings = settings or ControlSettings()
        self._token = ClusterToken.load(config.security)
        self.term = time.time_ns() // 1_000_000 if term is None else term
        self._desk = Desk(config, clock, settings=self._settings, term=self.term)
        self._server: StandingServer | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._tasks: list[asyncio.Task[None]] = []
        self._failing_s = 0.0
        """For how long every tick has failed, while this process ran."""

    async def start(self, host: str, port: int, bind_timeout_s: float = 10.0) -> str:
        """Bind, serve, and return the address; port 0 takes a free one.

        A taken port is tried for ``bind_timeout_s``, since in a rolling update the old control
        plane may still be closing; then StartupError.
        """
        server = StandingServer(functools.partial(self._make, host))
        bound = await self._bind(server, port, bind_timeout_s)
        self._server = server
        await self._tell_health(is_well=True)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._tick()), loop.create_task(self._push_views())]
        logger.info("control=%s:%d term=%d serves", host, bound, self.term)
        return f"{host}:{bound}"

    async def stop(self, grace_s: float = 0.5) -> None:
        """Close the port and every stream; idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        await self._health.enter_graceful_shutdown()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._desk.close()
        await server.stop(grace_s)

    def check_health(self) -> None:
        """Raise EngineFault where calls are not taken, or time or views stand still."""
        is_serving = self._server is not None and self._server.is_serving
        if not is_serving or any(task.done() for task in self._tasks):
            raise EngineFault("the control plane does not serve", stage="control")
        if self._is_failing:
            raise EngineFault(
                f"the control plane's ticks have failed for {self._failing_s:.1f} s",
                stage="control",
            )

    def load(self) -> Load:
        """Return what scaling goes by."""
        return self._desk.load()

    def _make(self, host: str, port: int) -> tuple[grpc.aio.Server, int]:
        server = make_server(interceptors=self._token.guards, options=_SERVER_OPTIONS)
        pb_grpc.add_ControlServicer_to_server(self._desk, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            return server, self._token.open_port(server, f"{host}:{port}")
        except RuntimeError as error:
            raise StartupError(
                f"cannot listen on {host}:{port}: is another cluster running?"
            ) from error

    async def _bind(self, server: StandingServer, port: int, timeout_s: float) -> int:
        deadline = self._clock.now() + timeout_s
        while True:
            self._desk.begin()
            try:
                return await server.start(port)
            except StartupError:
                if self._clock.now() >= deadline:
                    raise
            await asyncio.sleep(_BIND_RETRY_S)

    @property
    def _is_failing(self) -> bool:
        return self._failing_s >= _FAILING_S

    async def _tell_health(self, *, is_well: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        for name in ("", SERVICE_NAME):
            await self._health.set(name, statuses.SERVING if is_well else statuses.NOT_SERVING)

    async def _tick(self) -> None:
        ticked_at = self._clock.now()
        while True:
            await asyncio.sleep(self._settings.tick_s)
            last, ticked_at = ticked_at, self._clock.now()
            was_failing = self._is_failing
            try:
                self._desk.tick()
                self._failing_s = 0.0
            except Exception:
                # A bug of ours; the streams still work, and the next tick may.
                logger.exception("a tick failed")
                # A longer gap is the absence of the whole process.
                self._failing_s += min(ticked_at - last, self._settings.gap_s)
            if self._is_failing != was_failing:
                await self._tell_health(is_well=was_failing)

    async def _push_views(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.view_beat_s):
                    await self._desk.has_changed.wait()
            self._desk.push_view()
            await asyncio.sleep(self._settings.view_gap_s)
