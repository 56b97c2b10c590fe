"""A cluster for fault tests: every part is a process of its own that can be killed and stopped.

Processes are forked from one that has imported everything, so a worker that was killed is back
within a second or two. Each worker keeps its port over restarts, and each router has its own
doors, so that a test chooses whom it calls; SIGTERM ends a router as Serve would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import multiprocessing.connection
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import grpc
import httpx
import psutil

from cluster import config as deploy_config
from cluster.config import DeployConfig, FaultsConfig
from cluster.control.facts import Health
from cluster.errors import PdserveError
from cluster.wire import faults_pb2 as wire
from cluster.wire import faults_pb2_grpc as wire_grpc
from tests.e2e import children
from tests.e2e.plain_cluster import (
    Metrics,
    free_ports,
    is_view_quiet,
    num_in_flight,
    parse_metrics,
    view_of,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cluster.control.facts import ClusterView

CONTROL = "control"
START_S = 60.0
_ANSWER_S = 20.0
"""For a process on a busy machine; one that is blocked takes longer."""
_PACE_S = 0.03
"""Between two looks at a whole cluster, which cost its processes time."""


@dataclasses.dataclass(frozen=True)
class Doors:
    """Where one router is reached."""

    config: DeployConfig
    http: str
    grpc: str


class Faults:
    """The fault switch of one worker or router, from outside."""

    def __init__(self, address: str, stacks: Callable[[], str] = str) -> None:
        """``stacks``: where the threads of its process stand, as text."""
        self._channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self._stub = wire_grpc.FaultsStub(self._channel)
        self._stacks = stacks

    def set(self, *faults: wire.Fault) -> None:
        self._ask(self._stub.Set, wire.FaultPlan(faults=faults), wait_for_ready=True)

    def clear(self) -> list[int]:
        state = self._ask(self._stub.Clear, wire.ClearFaults(), wait_for_ready=True)
        return list(state.fired)

    def fired(self) -> list[int]:
        return list(self._ask(self._stub.Fired, wire.GetFired()).fired)

    def passed(self, point: str) -> int:
        return self._ask(self._stub.Fired, wire.GetFired()).passed[point]

    def wait_fired(self, index: int = 0, timeout_s: float = 10) -> None:
        wait_until(lambda: self.fired()[index] > 0, timeout_s, f"fault {index} did not happen")

    def close(self) -> None:
        self._channel.close()

    def _ask(self, call, question, **options) -> wire.FaultState:
        """Ask its event loop; where that stands still, fail with what its threads are at."""
        try:
            return call(question, timeout=_ANSWER_S, **options)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            raise AssertionError(
                f"the fault switch did not answer in {_ANSWER_S:g} s:\n{self._stacks()}"
            ) from error


def fault(verb: str, point: str, **options) -> wire.Fault:
    """One entry of a plan; once, at the first message, unless told otherwise."""
    return wire.Fault(verb=verb, point=point, **{"nth": 1, "times": 1, **options})


class ProcessCluster:
    """Started by ``process_cluster``; ``names`` are control, router-0, ... and the workers."""

    def __init__(
        self,
        config: DeployConfig,
        model: Path,
        folder: Path,
        *,
        num_routers: int = 1,
        are_doors_shared: bool = False,
    ) -> None:
        self._are_doors_shared = are_doors_shared
        self.config = dataclasses.replace(config, faults=FaultsConfig(enabled=True))
        self.model = model
        self.folder = folder
        endpoints = config.endpoints
        self.control = f"{endpoints.host}:{endpoints.control_port}"
        self.routers = {f"router-{i}": self._doors(i) for i in range(num_routers)}
        self.pools = {
            f"{pool.name}-{index}": pool for pool in config.pools for index in range(pool.count)
        }
        self.ports = dict(zip(self.pools, free_ports(len(self.pools)), strict=True))
        """Of the workers."""
        self.target = children.run_worker
        """What the process of a worker runs."""
        self.ask_view: Callable[[ProcessCluster], ClusterView] = view_of
        self.processes: dict[str, multiprocessing.process.BaseProcess] = {}
        self._faults: dict[str, Faults] = {}
        # A router may be another process by the next call.
        self._http = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))

    @property
    def http(self) -> str:
        """The first router's."""
        return self.routers["router-0"].http

    @property
    def grpc(self) -> str:
        """The first router's."""
        return self.routers["router-0"].grpc

    def _doors(self, index: int) -> Doors:
        endpoints = self.config.endpoints
        if index and not self._are_doors_shared:
            http, grpc_port = free_ports(2)
            endpoints = dataclasses.replace(endpoints, http_port=http, grpc_port=grpc_port)
        return Doors(
            config=dataclasses.replace(self.config, endpoints=endpoints),
            http=f"http://{endpoints.host}:{endpoints.http_port}",
            grpc=f"{endpoints.host}:{endpoints.grpc_port}",
        )

    # ---- processes

    def start(self) -> None:
        for name in (CONTROL, *self.routers, *self.pools):
            self.start_one(name)
        for name in self.processes:
            self.wait_ready(name)
        self.wait_served()

    def start_one(self, name: str) -> None:
        """Start one process; ``wait_ready`` waits for it."""
        assert name not in self.processes
        self._out(name).unlink(missing_ok=True)
        if name == CONTROL:
            target, arguments = children.run_control, (self.config,)
        elif name in self.routers:
            config = self.routers[name].config
            target, arguments = children.run_router, (config, self.model)
        else:
            target, arguments = self.target, (self._worker_arguments(name),)
        process = children.forks.Process(
            target=children.in_child, args=(target, arguments, str(self._out(name))), daemon=True
        )
        process.start()
        self.processes[name] = process

    def wait_ready(self, name: str, timeout_s: float = START_S) -> None:
        process = self.processes[name]

        def is_ready() -> bool:
            assert process.is_alive(), self.log(name)[-3000:]
            out = self._out(name)
            return out.exists() and out.read_text().endswith("\n")

        wait_until(is_ready, timeout_s, f"{name} is not ready")

    def pid(self, name: str) -> int:
        return self.processes[name].pid

    def kill(self, name: str) -> int:
        """SIGKILL; returns the pid once it is gone."""
        process = self.processes.pop(name)
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        assert process.exitcode == -signal.SIGKILL, (name, process.exitcode)
        if name in self._faults:
            self._faults.pop(name).close()
        return process.pid

    def terminate(self, name: str) -> None:
        """SIGTERM; ``wait_exit`` waits for what comes of it."""
        os.kill(self.pid(name), signal.SIGTERM)

    def wait_exit(self, name: str, timeout_s: float) -> int:
        """Wait until a process has ended by itself; its exit code."""
        process = self.processes.pop(name)
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join(10)
            raise AssertionError(f"{name} did not end: {self.log(name)[-3000:]}")
        if name in self._faults:
            self._faults.pop(name).close()
        return process.exitcode

    def restart(self, name: str) -> None:
        """Start it again at the same address, and wait until it is ready."""
        self.start_one(name)
        self.wait_ready(name)

    @contextlib.contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """SIGSTOP, proven, for the time of a ``with``."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(
                lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, 5, "it runs on"
            )
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def log(self, name: str) -> str:
        return self._out(name).with_suffix(".log").read_text()

    def stacks(self, name: str) -> str:
        """Where the threads of a process stand now, which it writes to its log."""
        before = len(self.log(name))
        os.kill(self.pid(name), signal.SIGUSR2)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: len(self.log(name)) > before, 5, "it does not even say that")
        return self.log(name)[before:]

    def stop(self) -> None:
        for each in self._faults.values():
            each.close()
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
        for process in self.processes.values():
            process.join(10)
        self._http.close()

    # ---- what it says

    def faults(self, name: str) -> Faults:
        """The switch of a worker, or that between a router and the control plane.

        A router's is reached by its gRPC door, so not where several share that.
        """
        if name not in self._faults:
            assert name in self.pools or not self._are_doors_shared
            host = self.config.endpoints.host
            is_router = name in self.routers
            address = self.routers[name].grpc if is_router else f"{host}:{self.ports[name]}"
            self._faults[name] = Faults(address, functools.partial(self.stacks, name))
        return self._faults[name]

    def clear_faults(self) -> None:
        for name in (*self.routers, *self.pools):
            if name in self.processes:
                self.faults(name).clear()

    def view(self) -> ClusterView:
        return self.ask_view(self)

    def metrics(self, router: str = "router-0") -> Metrics:
        return parse_metrics(self._http.get(f"{self.routers[router].http}/metrics").text)

    def wait_served(self, timeout_s: float = 30) -> None:
        """Wait until every router that runs has heard of workers of each role."""
        for name in self.routers:
            if name in self.processes:
                url = f"{self.routers[name].http}/health/ready"
                what = f"{name} is not ready"
                wait_until(lambda url=url: self._is_ok(url), timeout_s, what, pace_s=_PACE_S)

    def wait_whole(self, timeout_s: float = 30) -> None:
        """Wait until every worker that runs is in the view, alive, under its present pid."""
        pids = {self.pid(name) for name in self.pools if name in self.processes}

        def is_whole() -> bool:
            try:
                view = self.view()
            except PdserveError:
                return False
            alive = {w.worker.pid for w in view.workers if w.health is Health.ALIVE}
            num_routers = sum(name in self.processes for name in self.routers)
            return pids <= alive and view.num_routers == num_routers

        wait_until(is_whole, timeout_s, "not all workers are in the view", pace_s=_PACE_S)
        self.wait_served(timeout_s)

    def wait_quiet(self, timeout_s: float = 10, *, knows_all: bool = True) -> None:
        """Wait for Q, of the workers and of every router; see ``is_view_quiet``."""
        wait_until(
            lambda: is_view_quiet(self.view(), knows_all=knows_all),
            timeout_s,
            "work goes on after its client has left",
            pace_s=_PACE_S,
        )
        for name in self.routers:
            if name in self.processes:
                wait_until(
                    lambda name=name: not num_in_flight(self.metrics(name)),
                    1,
                    f"{name} counts it still",
                )

    # ---- inside

    def _is_ok(self, url: str) -> bool:
        try:
            return self._http.get(url).status_code == 200
        except httpx.HTTPError:
            return False

    def _out(self, name: str) -> Path:
        return self.folder / f"{name}.out"

    def _worker_arguments(self, worker_id: str) -> list[str]:
        path = self.folder / "deploy.yaml"
        if not path.exists():
            path.write_text(json.dumps(deploy_config.to_tree(self.config)))  # JSON is YAML
        return [
            "--config", str(path),
            "--pool", self.pools[worker_id].name,
            "--worker-id", worker_id,
            "--model-path", str(self.model),
            "--control", self.control,
            "--port", str(self.ports[worker_id]),
        ]  # fmt: skip


@contextlib.contextmanager
def process_cluster(
    config: DeployConfig,
    model: Path,
    folder: Path,
    *,
    num_routers: int = 1,
    are_doors_shared: bool = False,
) -> Iterator[ProcessCluster]:
    """Run a cluster, with the fault seam, for the time of a ``with``.

    ``are_doors_shared``: all routers at the same ports, as on one host of Ray.
    """
    cluster = ProcessCluster(
        config, model, folder, num_routers=num_routers, are_doors_shared=are_doors_shared
    )
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@contextlib.contextmanager
def supervised(cluster: ProcessCluster, after_s: float = 0.0) -> Iterator[None]:
    """Start anew whatever dies, as a host would, for the time of a ``with``.

    ``after_s``: it is away for so long at least, and others notice.
    """
    reader, writer = multiprocessing.Pipe(duplex=False)

    def supervise() -> None:
        while True:
            names = {process.sentinel: name for name, process in cluster.processes.items()}
            for ready in multiprocessing.connection.wait([reader, *names]):
                if ready is reader:
                    return
                cluster.processes.pop(names[ready]).join(10)
                time.sleep(after_s)
                cluster.start_one(names[ready])

    thread = threading.Thread(target=supervise, name="supervisor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        writer.send(None)
        thread.join(10)
        reader.close()
        writer.close()
