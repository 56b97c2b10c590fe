"""One question to the control plane: what does the cluster look like now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import grpc.aio

from cluster.control import convert_view
from cluster.control.connection import CHANNEL_OPTIONS
from cluster.errors import NoWorker
from cluster.wire import control_pb2 as pb
from cluster.wire.control_pb2_grpc import ControlStub

if TYPE_CHECKING:
    from cluster.control.facts import ClusterView


async def get_cluster(address: str, timeout_s: float) -> ClusterView:
    """Return the view; raises NoWorker where no control plane answers within ``timeout_s``."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        try:
            message = await ControlStub(channel).GetCluster(
                pb.GetClusterRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise NoWorker(
                f"no control plane answers at {address}: {error.code().name}", stage="status"
            ) from error
    return convert_view.view_from_wire(message)
