"""A process with both doors of a router, over a cluster that says "ok": SIGTERM has it leave.

Its arguments are the two ports, 0 for any, and how long it may drain; it says the ports.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time

from cluster.config import LimitsConfig
from router import api
from router.grpc_api import GrpcDoor
from router.http_door import HttpDoor
from router.leave import Leave
from tests.router.fakes import EOS_ID, FakeCluster, make_router, speaks

HOST = "127.0.0.1"


async def serve(http_port: int, grpc_port: int, drain_s: float) -> None:
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    cluster = FakeCluster()
    cluster.script = speaks([ord("o"), ord("k"), EOS_ID])
    service = make_router(cluster, limits=LimitsConfig(drain_s=drain_s))
    http = HttpDoor(api.build_api(service), host=HOST, port=http_port)
    grpc_door = GrpcDoor(service, host=HOST, port=grpc_port)
    await http.start()
    await grpc_door.start()
    sys.stdout.write(f"{http.port} {grpc_door.port}\n")
    sys.stdout.flush()
    await told.wait()
    until = time.monotonic() + drain_s
    await Leave(service, http, grpc_door).take(drain_s)
    left_s = until - time.monotonic()
    await asyncio.gather(grpc_door.stop(left_s), http.stop(left_s))
    await service.stop()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
