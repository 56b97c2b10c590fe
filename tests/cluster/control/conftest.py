"""A control plane on a free port, with routers and workers that the test ends for it."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from cluster.clock import SystemClock
from cluster.control.connection import Backoff
from cluster.control.facts import BlockCounts, Registration, TransferSample, WorkerReport
from cluster.control.report_client import ReportClient, ReportTiming
from cluster.control.route_client import RouteClient, RouteTiming
from cluster.control.server import ControlServer
from cluster.control.settings import ControlSettings
from cluster.errors import PdserveError
from tests.cluster.control.factory import make_config, make_registration

QUICK = ControlSettings(
    tick_s=0.01,
    reconcile_s=0.3,
    suspect_after_s=0.4,
    dead_after_s=0.8,
    stream_grace_s=0.2,
    unseen_grant_s=0.5,
    orphan_s=0.1,
    router_grace_s=0.2,
    view_gap_s=0.01,
    view_beat_s=0.1,
)
BACKOFF = Backoff(first_s=0.01, last_s=0.05)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Router:
    """A RouteClient with a memory of what it was told."""

    def __init__(self, address: str, name: str, **timing: float) -> None:
        self.running: set[str] = set()
        self.asked: list[str] = []
        self.dead: list[str] = []
        self.missed: list[tuple[str, int, PdserveError]] = []
        self.client = RouteClient(
            address,
            router_id=name,
            incarnation=f"{name}-1",
            clock=SystemClock(),
            events=self,
            timing=RouteTiming(backoff=BACKOFF, **timing),
        )

    def on_cancel(self, request_id: str) -> bool:
        self.asked.append(request_id)
        return request_id in self.running

    def on_worker_dead(self, worker_id: str, incarnation: str) -> None:
        self.dead.append(incarnation)

    def on_leg_missed(self, request_id: str, attempt: int, error: PdserveError) -> None:
        self.missed.append((request_id, attempt, error))


class FakeWorker:
    """A ReportClient with a settable load."""

    def __init__(self, address: str, registration: Registration) -> None:
        self.registration = registration
        self.held: tuple[str, ...] = ()
        self.transfers: list[TransferSample] = []
        self.aborted: list[str] = []
        self.orders = []
        self.num_reports = 0
        self.client = ReportClient(
            address,
            registration=lambda: self.registration,
            report=self._report,
            on_abort_grant=self.aborted.append,
            on_order=self.orders.append,
            clock=SystemClock(),
            timing=ReportTiming(beat_s=0.1, backoff=BACKOFF),
        )

    def hold(self, *grant_ids: str) -> None:
        self.held = grant_ids
        self.client.changed()

    def _report(self) -> WorkerReport:
        self.num_reports += 1
        transfers, self.transfers = tuple(self.transfers), []
        return WorkerReport(
            transfers=transfers,
            blocks=BlockCounts(free=self.registration.num_blocks),
            held_grants=self.held,
            counters={"reports_total": float(self.num_reports)},
        )


class Cluster:
    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self.config, self._settings = make_config(), QUICK
        self.server = ControlServer(self.config, SystemClock(), settings=QUICK)
        self.address = ""

    async def start(self, *pools, settings: ControlSettings = QUICK, **scheduling) -> None:
        self.config, self._settings = make_config(*pools, **scheduling), settings
        self.server = ControlServer(self.config, SystemClock(), settings=settings)
        self.address = await self.server.start("127.0.0.1", 0)

    async def restart(self) -> None:
        port = int(self.address.rpartition(":")[2])
        self.server = ControlServer(self.config, SystemClock(), settings=self._settings)
        await self.server.start("127.0.0.1", port)

    async def router(self, name: str = "a", *, is_early: bool = False, **timing: float) -> Router:
        """``is_early``: it starts, and may have heard nothing yet."""
        router = Router(self.address, name, **timing)
        await router.client.start()
        self._stack.push_async_callback(router.client.stop)
        if not is_early:
            await until(lambda: router.client.is_connected and router.client.view is not None)
        return router

    async def worker(self, pool: str, index: int = 0, **changes: object) -> FakeWorker:
        registration = make_registration(self.config.pool(pool), index, **changes)
        worker = FakeWorker(self.address, registration)
        await worker.client.start()
        self._stack.push_async_callback(worker.client.stop, "the test is over")
        await asyncio.wait_for(asyncio.shield(worker.client.accepted), 10.0)
        return worker

    async def workers(self) -> tuple[FakeWorker, FakeWorker]:
        return await self.worker("prefill"), await self.worker("decode")


@pytest.fixture
async def cluster():
    async with contextlib.AsyncExitStack() as stack:
        built = Cluster(stack)
        yield built
        await built.server.stop()
