"""What a worker's own gRPC health says of it: whether it takes work, and not that it listens."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.engine import loop as loop_module
from cluster.request import LegKind
from tests.deploy.world import KEY, Sink, blocked_runner, make_leg

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Watch:
    """Follows one worker's health."""

    def __init__(self, address):
        self._channel = grpc.aio.insecure_channel(address)
        self._call = health_pb2_grpc.HealthStub(self._channel).Watch(
            health_pb2.HealthCheckRequest()
        )

    async def next(self):
        return (await asyncio.wait_for(self._call.read(), 10)).status

    async def until(self, status):
        while await self.next() != status:
            pass

    async def close(self):
        self._call.cancel()
        await self._channel.close()


async def test_a_worker_is_well_once_it_is_accepted_until_it_drains(world):
    """CASES P-26: nobody is sent there before, though its door is open."""
    worker, seen = world.make("m", "m-0"), []
    accept = worker._until_accepted

    async def look_and_accept(timeout_s):
        watch = Watch(worker.me.address)
        seen.append(await watch.next())
        await watch.close()
        await accept(timeout_s)

    worker._until_accepted = look_and_accept
    await worker.start()
    assert seen == [NOT_SERVING]
    watch = Watch(worker.me.address)
    await watch.until(SERVING)
    await worker.drain(0.0)
    assert await watch.next() == NOT_SERVING
    await watch.close()


async def test_a_worker_whose_step_hangs_is_not_well_until_it_goes_on(world, monkeypatch):
    """CASES P-26: 200 for an hour, or killed because it was busy: neither."""
    monkeypatch.setattr(loop_module, "_STALL_FLOOR_S", 0.3)
    monkeypatch.setattr(loop_module, "_STUCK_FACTOR", 1e9)
    runner, entered, go = blocked_runner()
    worker = await world.start("m", "m-0", runner)
    watch, sink = Watch(worker.me.address), Sink()
    await watch.until(SERVING)
    worker.legs.start_leg(make_leg(LegKind.LOCAL), sink)
    assert await asyncio.to_thread(entered.wait, 10)
    assert await watch.next() == NOT_SERVING
    go.set()
    assert await watch.next() == SERVING
    assert (await sink.end_of(KEY)).error is None
    await watch.close()


async def test_a_worker_that_has_failed_is_not_well(world):
    worker = await world.start("m", "m-0")
    watch = Watch(worker.me.address)
    await watch.until(SERVING)
    worker._fail(RuntimeError("a bug"))
    assert await watch.next() == NOT_SERVING
    await watch.close()
