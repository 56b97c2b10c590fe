"""One question to the control plane: what does the cluster look like now."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from cluster import tls
from cluster.control import convert_view
from cluster.control.connection import CHANNEL_OPTIONS
from cluster.errors import NoWorker
from cluster.trust import ClusterToken
from cluster.wire import control_pb2 as pb
from cluster.wire.control_pb2_grpc import ControlStub

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from cluster.control.facts import ClusterView

    Ask = Callable[[float], Awaitable[ClusterView]]


@contextlib.asynccontextmanager
async def asking(address: str, token: ClusterToken | None = None) -> AsyncIterator[Ask]:
    """Give a way to ask again and again over one connection: ``await ask(timeout_s)``."""
    token = token or ClusterToken()
    async with token.channel(address, CHANNEL_OPTIONS) as channel:
        stub = ControlStub(channel)

        async def ask(timeout_s: float) -> ClusterView:
            try:
                message = await stub.GetCluster(
                    pb.GetClusterRequest(), timeout=timeout_s, metadata=token.metadata
                )
            except grpc.aio.AioRpcError as error:
                raise NoWorker(
                    f"no control plane answers at {address}: "
                    f"{tls.refusal(error) or error.code().name}",
                    stage="status",
                ) from error
            return convert_view.view_from_wire(message)

        yield ask


async def get_cluster(
    address: str, timeout_s: float, token: ClusterToken | None = None
) -> ClusterView:
    """Return the view; raises NoWorker where no control plane answers within ``timeout_s``."""
    async with asking(address, token) as ask:
        return await ask(timeout_s)
