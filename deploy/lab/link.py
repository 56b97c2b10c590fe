"""A slower link between workers, by the fault seam: each message takes as long as its bytes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc

from cluster.control.status import get_cluster
from cluster.errors import PdserveError
from cluster.transport.faults import Point, Verb
from cluster.trust import ClusterToken
from cluster.wire import faults_pb2 as wire
from cluster.wire import faults_pb2_grpc as wire_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deploy.bench.site import Doors

_ANSWER_S = 5.0
_EVER = 0


@contextlib.contextmanager
def slowed(doors: Doors, bytes_per_s: float | None) -> Iterator[None]:
    """Slow every link of the cluster for the time of a ``with``; None: leave them as they are.

    Needs ``faults.enabled``. Raises PdserveError where a worker does not take it, or where no
    message passed it all the while: then nothing was slowed.
    """
    if bytes_per_s is None:
        yield
        return
    token = ClusterToken.load(doors.config.security)
    with contextlib.ExitStack() as stack:
        stubs = [
            wire_grpc.FaultsStub(stack.enter_context(token.blocking_channel(address)))
            for address in _workers(doors, token)
        ]
        delay = wire.Fault(
            verb=Verb.DELAY.value,
            point=Point.SEND.value,
            nth=1,
            times=_EVER,
            seconds_per_byte=1.0 / bytes_per_s,
        )
        try:
            for stub in stubs:
                stub.Set(wire.FaultPlan(faults=[delay]), timeout=_ANSWER_S, metadata=token.metadata)
            yield
            num_slowed = sum(
                sum(
                    stub.Clear(wire.ClearFaults(), timeout=_ANSWER_S, metadata=token.metadata).fired
                )
                for stub in stubs
            )
        except grpc.RpcError as error:
            raise PdserveError(
                f"a worker would not have its links slowed: {error.code().name}", stage="lab"
            ) from error
    if num_slowed == 0:
        raise PdserveError("no transfer met the slowed link", stage="lab")


def _workers(doors: Doors, token: ClusterToken) -> list[str]:
    endpoints = doors.config.endpoints
    address = f"{endpoints.host}:{endpoints.control_port}"
    view = asyncio.run(get_cluster(address, timeout_s=_ANSWER_S, token=token))
    return [worker.worker.address for worker in view.workers]
