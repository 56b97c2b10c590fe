"""Composes one router: control stream, worker streams, and both doors over one service."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

from cluster.clock import SystemClock
from cluster.control.capacity import Capacity
from cluster.control.route_client import RouteClient
from cluster.errors import EngineFault
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from cluster.rpc.client import WorkerClient
from cluster.rpc.fault_seam import FaultService, FaultyTap
from cluster.tls import DoorTls
from cluster.transport.faults import FaultSwitch
from cluster.trust import ClusterToken
from router.api import build_api
from router.auth import Keys
from router.dispatch import Dispatcher
from router.grpc_api import GrpcCaps, GrpcDoor
from router.http_door import HttpDoor
from router.http_guard import HttpCaps
from router.leave import Leave
from router.legs import Workers
from router.metrics import RouterMetrics
from router.prefix import PrefixNames
from router.served import served_model
from router.service import Door, Service
from router.text import TextCodec

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.config import DeployConfig
    from cluster.control.route_client import RouteEvents
    from cluster.request import Peer
    from cluster.rpc.client import LegEvents


class Ingress:
    """One router replica.

    ``start`` connects and opens the doors; ``stop`` is idempotent, and safe after a failed start.
    Raises StartupError where the model folder can't be read or a port can't be had.
    """

    def __init__(self, config: DeployConfig, model_path: Path) -> None:
        """With ``faults.enabled``, what is said to the control plane and back can go wrong."""
        model = served_model(
            model_path,
            name=config.model.name or model_path.name,
            max_model_len=config.model.max_model_len,
        )
        endpoints = config.endpoints
        control_address = f"{endpoints.host}:{endpoints.control_port}"
        incarnation = uuid.uuid4().hex
        router_id = f"router-{incarnation[:8]}"
        clock = SystemClock()
        open_door = Door(
            keys=Keys.of(config),
            tiers=Tiers.of(config.scheduling),
            ordering=Ordering.of(config.scheduling),
        )
        token = ClusterToken.load(config.security)
        faults = FaultSwitch() if config.faults.enabled else None
        tls = DoorTls(config.security) if config.security.has_door_tls else None

        def route(events: RouteEvents) -> RouteClient:
            client = RouteClient(
                control_address,
                router_id=router_id,
                incarnation=incarnation,
                clock=clock,
                events=events,
                token=token,
            )
            client.set_tap(FaultyTap(faults) if faults is not None else None)
            return client

        def connect(peer: Peer, events: LegEvents) -> WorkerClient:
            return WorkerClient(
                peer, router_id=router_id, incarnation=incarnation, events=events, token=token
            )

        dispatcher = Dispatcher(
            route=route,
            workers=Workers(connect),
            clock=clock,
            metrics=RouterMetrics(router_id),
            prefixes=PrefixNames(model.name, config.pools),
            resumes=config.router.resume,
        )
        service = Service(
            model=model,
            limits=config.limits,
            codec=TextCodec.load(model_path, eos_ids=model.eos_ids),
            dispatcher=dispatcher,
            capacity=Capacity.of(config.pools, max_model_len=model.max_model_len),
            max_open_calls=_max_open_calls(config),
            door=open_door,
        )
        self._service = service
        self._http = HttpDoor(
            build_api(service),
            host=endpoints.host,
            port=endpoints.http_port,
            caps=HttpCaps(
                max_head_bytes=config.limits.max_header_bytes,
                max_per_address=config.limits.max_connections_per_address,
            ),
            tls=tls,
        )
        self._grpc = GrpcDoor(
            service,
            host=endpoints.host,
            port=endpoints.grpc_port,
            caps=GrpcCaps(max_per_address=config.limits.max_connections_per_address),
            tls=tls,
            services=(FaultService(faults).add_to,) if faults is not None else (),
        )
        self._clock = clock
        self._leave = Leave(service, self._http, self._grpc)

    async def start(self) -> None:
        """Connect to the control plane and open the doors."""
        await self._service.start()
        await self._grpc.start()
        await self._http.start()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Say so, let nobody new in, and end what still runs after ``grace_s``; idempotent.

        Without a grace the doors are closed at once. Whoever comes meanwhile finds another router
        of the host, where there is one, or is told to come back: see ``Leave``.
        """
        until = self._clock.now() + grace_s
        if grace_s > 0.0 and self._grpc.is_serving:
            await self._leave.take(grace_s)
        left_s = max(0.0, until - self._clock.now())
        await asyncio.gather(self._grpc.stop(left_s), self._http.stop(left_s))
        await self._service.stop()

    async def check_health(self) -> None:
        """Raise EngineFault where a door is not open: whoever hosts the router starts another."""
        for name, door in (("HTTP", self._http), ("gRPC", self._grpc)):
            if not door.is_serving:
                raise EngineFault(f"the {name} door is not open", stage="edge")


def _max_open_calls(config: DeployConfig) -> int:
    """Calls that can run or wait in the whole cluster."""
    running = sum(pool.max_count * pool.max_num_seqs for pool in config.pools)
    return config.scheduling.max_queue_requests + running
