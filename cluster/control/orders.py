"""An operator's order to one worker, given to the control plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import grpc.aio

from cluster import tls
from cluster.control.connection import CHANNEL_OPTIONS
from cluster.errors import InvalidRequest, NoWorker
from cluster.trust import ClusterToken
from cluster.wire import control_pb2 as pb
from cluster.wire.control_pb2_grpc import ControlStub

if TYPE_CHECKING:
    from cluster.config import Role


async def give_order(
    address: str,
    worker_id: str,
    role: Role | None,
    *,
    timeout_s: float,
    token: ClusterToken | None = None,
) -> str:
    """Have a worker drain and leave, or with a ``role`` come back in that; return who was told.

    That is the worker's incarnation, which leaves. Raises InvalidRequest with the reason where the
    order cannot be followed, and NoWorker where no control plane answers.
    """
    order = pb.WorkerOrder(worker_id=worker_id, role=role.value if role is not None else "")
    token = token or ClusterToken()
    async with token.channel(address, CHANNEL_OPTIONS) as channel:
        stub = ControlStub(channel)
        try:
            given = await stub.Order(order, timeout=timeout_s, metadata=token.metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidRequest(error.details() or "refused", stage="order") from error
            raise NoWorker(
                f"no control plane answers at {address}: {tls.refusal(error) or error.code().name}",
                stage="order",
            ) from error
    return str(given.incarnation)
