"""A cluster without Ray for tests: worker processes over Gloo, the rest on a loop in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster import config as deploy_config
from cluster.clock import SystemClock
from cluster.config import (
    DeployConfig,
    EndpointsConfig,
    LimitsConfig,
    LocalPrefill,
    ModelConfig,
    PoolConfig,
    Role,
    SchedulingConfig,
)
from cluster.control.server import ControlServer
from cluster.control.status import get_cluster
from cluster.trust import ClusterToken
from deploy.doors import http_client, http_url
from router.ingress import Ingress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.process import BaseProcess

    from cluster.control.facts import ClusterView

REPO = Path(__file__).resolve().parents[2]


_PORTS = itertools.cycle(random.sample(range(20000, 32000), 12000))
"""Below those that the kernel gives to outgoing connections: nobody takes one in the meantime. None
comes again soon: a cluster that starts beside this one may not listen at its own yet."""


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; all distinct."""
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            each, port = stack.enter_context(socket.socket()), next(_PORTS)
            with contextlib.suppress(OSError):
                each.bind(("127.0.0.1", port))
                ports.append(port)
    return ports


def make_config(model: Path, pools: dict[str, tuple[Role, int]], **pool_options) -> DeployConfig:
    """A config of tiny fp32 pools, ``name -> (role, count)``, on free ports.

    No decode worker prefills because that is cheaper: short prompts are handed over as long ones.
    """
    http, grpc, control = free_ports(3)
    options = {"dtype": deploy_config.Dtype.FP32, "kv_tokens": 8192, **pool_options}
    return DeployConfig(
        pools=tuple(
            PoolConfig(name=name, role=role, count=count, **options)
            for name, (role, count) in pools.items()
        ),
        model=ModelConfig(path=str(model), name="tiny", max_model_len=1024),
        limits=LimitsConfig(kv_digest=True, drain_s=0.5),
        scheduling=SchedulingConfig(local_prefill=LocalPrefill.NEVER),
        endpoints=EndpointsConfig(http_port=http, grpc_port=grpc, control_port=control),
    )


def wait_until(is_true, timeout_s: float, what: str, *, pace_s: float = 0.01) -> None:
    """Poll a condition of another process that has no event to wait for.

    The last look is after the time is over: this process may have stood still until then.
    """
    deadline, is_last = time.monotonic() + timeout_s, False
    while not is_true():
        assert not is_last, what
        time.sleep(pace_s)
        is_last = time.monotonic() >= deadline


class Metrics(dict):
    """What ``/metrics`` said: ``{(name, labels): value}``, labels as sorted pairs."""

    def total(self, name: str, **labels: str) -> float:
        """Sum what has this name and these labels; 0 where there is nothing."""
        wanted = set(labels.items())
        return sum(v for (n, has), v in self.items() if n == name and wanted <= set(has))


def parse_metrics(text: str) -> Metrics:
    """Read Prometheus' text format."""
    return Metrics(
        ((sample.name, tuple(sorted(sample.labels.items()))), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    )


def num_in_flight(metrics: Metrics) -> float:
    """Requests that the router has not ended: a moment after the control plane hears of it."""
    return metrics.total("pdserve_requests_in_flight")


def view_of(cluster) -> ClusterView:
    """What the control plane of this cluster, of whichever kind, says."""
    token = ClusterToken.load(cluster.config.security)
    return asyncio.run(get_cluster(cluster.control, timeout_s=5.0, token=token))


def is_quiet(cluster) -> bool:
    """CASES §0 Q: nothing runs, waits or moves on any worker, every block is free or cached."""
    return is_view_quiet(view_of(cluster))


def is_view_quiet(view: ClusterView, *, knows_all: bool = True) -> bool:
    """The same of a view; with ``knows_all`` the control plane has heard of all ends, too."""
    is_over = view.num_waiting == view.num_granted == 0 or not knows_all
    return is_over and all(
        w.report.num_running == w.report.num_waiting == w.report.num_transferring == 0
        and w.report.blocks.available == w.worker.num_blocks
        and not w.report.held_grants
        for w in view.workers
    )


class Fork:
    """A forked process, as ``subprocess`` has those that are not."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)


class PlainCluster:
    """Started by ``plain_cluster``; knows its doors and its worker processes."""

    def __init__(
        self, config: DeployConfig, model: Path, folder: Path, *, is_forked: bool = True
    ) -> None:
        self.config = config
        self.model = model
        self.folder = folder
        self._is_forked = is_forked
        self.workers: dict[str, Fork | subprocess.Popen[bytes]] = {}
        endpoints = config.endpoints
        self.http = http_url(config)
        self.grpc = f"{endpoints.host}:{endpoints.grpc_port}"
        self.control = f"{endpoints.host}:{endpoints.control_port}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._up = threading.Event()
        self.failure: BaseException | None = None

    def start(self) -> None:
        path = self.folder / "deploy.yaml"
        path.write_text(yaml.safe_dump(deploy_config.to_tree(self.config)))
        self._thread.start()
        assert self._up.wait(30)
        if self.failure:
            raise self.failure
        for pool in self.config.pools:
            for index in range(pool.count):
                self.start_worker(pool.name, f"{pool.name}-{index}")
        for worker_id in self.workers:
            self.wait_ready(worker_id)
        self.wait_served()

    def wait_served(self, timeout_s: float = 30) -> None:
        """Wait until the router has heard of the workers: its view is pushed, not asked for."""
        until = time.monotonic() + timeout_s
        with http_client(self.config, timeout_s=5) as client:
            while client.get(f"{self.http}/health/ready").status_code != 200:
                assert time.monotonic() < until, "the router is not ready"
                time.sleep(0.05)

    def start_worker(self, pool: str, worker_id: str) -> None:
        """Start one worker process; ``wait_ready`` waits for it."""
        arguments = [
            "--config", str(self.folder / "deploy.yaml"),
            "--pool", pool,
            "--worker-id", worker_id,
            "--model-path", str(self.model),
            "--control", self.control,
        ]  # fmt: skip
        out = self._out(worker_id)
        out.unlink(missing_ok=True)
        run = _fork if self._is_forked else _run
        self.workers[worker_id] = run(arguments, out)

    def wait_ready(self, worker_id: str, timeout_s: float = 90) -> None:
        process, out = self.workers[worker_id], self._out(worker_id)

        def is_ready() -> bool:
            if process.poll() is not None:
                raise RuntimeError(out.with_suffix(".log").read_text()[-3000:])
            return out.exists() and out.read_text().endswith("\n")

        wait_until(is_ready, timeout_s, f"{worker_id} is not ready")

    def _out(self, worker_id: str) -> Path:
        return self.folder / f"{worker_id}.out"

    def kill(self, worker_id: str) -> int:
        """SIGKILL a worker; returns its pid once it is gone."""
        process = self.workers.pop(worker_id)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        return process.pid

    def view(self) -> ClusterView:
        return view_of(self)

    def metrics(self) -> Metrics:
        """Scrape the router."""
        with http_client(self.config, timeout_s=5) as client:
            return parse_metrics(client.get(f"{self.http}/metrics").text)

    def wait_quiet(self, timeout_s: float = 10) -> None:
        """Wait for Q; also of the router, which counts what it has not answered yet."""
        wait_until(lambda: is_quiet(self), timeout_s, "work goes on after its client has left")
        wait_until(lambda: not num_in_flight(self.metrics()), 1, "the router counts it still")

    async def _serve(self) -> None:
        endpoints = self.config.endpoints
        control = ControlServer(self.config, SystemClock())
        ingress = Ingress(self.config, self.model)
        try:
            await control.start(endpoints.host, endpoints.control_port)
            await ingress.start()
            self._up.set()
            await asyncio.to_thread(self._stop.wait)
        except BaseException as error:
            self.failure = error
            self._up.set()
        finally:
            await ingress.stop()
            await control.stop()

    def stop(self) -> None:
        for process in self.workers.values():
            process.terminate()
        late = [name for name, process in self.workers.items() if not _has_ended(process)]
        # Before anything is raised: the thread would keep the tests' process from ending.
        self._stop.set()
        self._thread.join(15)
        assert not late, f"{late} did not end when they were told to"


def _fork(arguments: list[str], out: Path) -> Fork:
    """Have a worker within a second or two: importing what it needs takes several."""
    from tests.e2e import children  # whoever wants but a port from here loads no engine

    process = children.forks.Process(
        target=children.in_child,
        args=(children.run_worker, (arguments,), str(out)),
        daemon=True,
    )
    process.start()
    return Fork(process)


def _run(arguments: list[str], out: Path) -> subprocess.Popen[bytes]:
    """Have one that has all of this process's environment, from its first import on."""
    with out.open("wb") as told, out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "deploy.worker_main", *arguments],
            stdout=told,
            stderr=log,
            cwd=REPO,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def _has_ended(process: Fork | subprocess.Popen[bytes]) -> bool:
    """Wait for a process that was told to end, and end it where it does not."""
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
        return False
    return True


@contextlib.contextmanager
def running(
    config: DeployConfig, model: Path, folder: Path, *, is_forked: bool = True
) -> Iterator[PlainCluster]:
    """Run a cluster for the time of a ``with``; its workers have this process's environment where
    they are not forked."""
    cluster = PlainCluster(config, model, folder, is_forked=is_forked)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@contextlib.contextmanager
def plain_cluster(
    model: Path,
    folder: Path,
    pools: dict[str, tuple[Role, int]],
    **pool_options,
) -> Iterator[PlainCluster]:
    """Run a cluster whose pools have the same options for the time of a ``with``."""
    with running(make_config(model, pools, **pool_options), model, folder) as cluster:
        yield cluster


def with_pool(config: DeployConfig, name: str, **options) -> DeployConfig:
    """The same config with other options of one pool."""
    pools = tuple(
        dataclasses.replace(pool, **options) if pool.name == name else pool for pool in config.pools
    )
    return dataclasses.replace(config, pools=pools)


def with_router_replicas(config: DeployConfig, replicas: int) -> DeployConfig:
    """The same config with another number of router replicas."""
    router = dataclasses.replace(config.router, replicas=replicas)
    return dataclasses.replace(config, router=router)
