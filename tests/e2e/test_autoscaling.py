"""Pools that grow and shrink with the load: real Serve, on nodes of two kinds of hardware."""

import contextlib
import dataclasses
import itertools
import logging
import threading
import time

import psutil
import pytest

from cluster import errors
from cluster.config import FaultsConfig, Role, ScalingConfig
from cluster.transport.faults import Point
from deploy.client import Client
from deploy.run_state import RunState
from tests.e2e.plain_cluster import make_config, view_of, wait_until, with_pool
from tests.e2e.process_cluster import Faults, fault
from tests.e2e.ray_nodes import ray_nodes
from tests.e2e.serve_watch import serve_watch
from tests.e2e.streams import Prompts
from tests.e2e.test_hardware_pools import Deployed

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(420)]

NODES = (
    {"num_gpus": 3, "resources": {"accelerator_type:H100": 1}},
    {"num_gpus": 1, "resources": {"accelerator_type:L40S": 1}},
    {"num_gpus": 1, "resources": {"accelerator_type:L40S": 1}},
)
H100, L40S = ({"accelerator_type": kind, "gpus_per_worker": 1.0} for kind in ("H100", "L40S"))
POOLS = {
    "prefill": {**H100, "min": 1, "max": 2, "cost_per_hour": 3.0},
    "cheap": {**L40S, "min": 1, "max": 2, "cost_per_hour": 1.0},
    "dear": {**H100, "min": 0, "max": 1, "cost_per_hour": 3.0},
}
"""``cheap`` and ``dear`` decode, 4 sequences a worker."""
QUIET_S = 5.0
DRAIN_S = 5.0
FLOOR = {"prefill": 1, "cheap": 1, "dear": 0}


@pytest.fixture(scope="module")
def scaled(tiny_llama, tmp_path_factory):
    roles = {"prefill": (Role.PREFILL, 1), "cheap": (Role.DECODE, 1), "dear": (Role.DECODE, 1)}
    config = make_config(tiny_llama, roles, max_num_seqs=4)
    for name, options in POOLS.items():
        config = with_pool(config, name, **options)
    limits = dataclasses.replace(config.limits, drain_s=DRAIN_S)
    config = dataclasses.replace(
        config,
        limits=limits,
        faults=FaultsConfig(enabled=True),
        scaling=ScalingConfig(quiet_s=QUIET_S),
    )
    with ray_nodes(NODES) as nodes:
        cluster = Deployed(config, nodes, tmp_path_factory.mktemp("scaled"))
        done = cluster.command("deploy", "--wait-ready", "150")
        assert done.returncode == 0, done.stdout + done.stderr
        try:
            with serve_watch(nodes.address) as watch:
                yield cluster, watch
        finally:
            gone = cluster.command("down", timeout_s=90)
            RunState(config.endpoints.control_port).clear(10)
            assert "taken away" in gone.stdout, gone.stderr


class Streams:
    """Requests one after the other, on as many threads as are added, until they are let go."""

    def __init__(self, cluster, num_prompt_tokens, max_tokens):
        self._address = cluster.grpc
        self._asks = (num_prompt_tokens, max_tokens)
        self._numbers = itertools.count()
        self._are_over = threading.Event()
        self._threads = []
        self.errors = []

    def add(self, count):
        for _ in range(count):
            self._threads.append(threading.Thread(target=self._run, daemon=True))
            self._threads[-1].start()

    def end(self):
        self._are_over.set()
        for thread in self._threads:
            thread.join(30)

    def _run(self):
        num_prompt_tokens, max_tokens = self._asks
        try:
            with Client(self._address) as client:
                while not self._are_over.is_set():
                    first = next(self._numbers)  # no two prompts begin alike
                    prompt = [40 + (first + 7 * i) % 400 for i in range(num_prompt_tokens)]
                    pieces = client.generate(
                        prompt_ids={"ids": prompt}, max_tokens=max_tokens, ignore_eos=True
                    )
                    for _ in pieces:
                        if self._are_over.is_set():
                            break  # and so hang up
        except errors.PdserveError as error:
            self.errors.append(error)


@contextlib.contextmanager
def streams_of(cluster, num_prompt_tokens, max_tokens):
    streams = Streams(cluster, num_prompt_tokens, max_tokens)
    try:
        yield streams
    finally:
        streams.end()
    assert streams.errors == []


def workers_of(cluster, pool):
    return [view for view in view_of(cluster).workers if view.worker.pool == pool]


def slow_down(cluster, pool, seconds):
    """Long steps, so that a load stands without this machine's help; 0: as they are."""
    for view in workers_of(cluster, pool):
        faults = Faults(view.worker.address)
        if seconds:
            faults.set(fault("delay", Point.STEP.value, times=0, seconds=seconds))
        else:
            faults.clear()
        faults.close()


def wait_grown(scaled, pool, count):
    """Wait until a pool is asked for so many workers, and has them: within what issue 6 says."""
    cluster, watch = scaled
    began = time.monotonic()
    wait_until(lambda: watch.targets[pool] == count, 10, f"{pool} was not raised within 10 s")
    raised = time.monotonic()
    wait_until(lambda: len(workers_of(cluster, pool)) == count, 30, f"{pool} not ready in 30 s")
    logger.info(
        "pool=%s raised after %.1f s, ready %.1f s later",
        pool, raised - began, time.monotonic() - raised,
    )  # fmt: skip


def wait_at_floor(scaled, *, quiet_s=0.0):
    cluster, watch = scaled
    began = time.monotonic()
    wait_until(lambda: watch.targets.items() >= FLOOR.items(), 60, "not back at the floor")
    took_s = time.monotonic() - began
    assert took_s > 0.8 * quiet_s, "sooner than the load was quiet for so long"
    logger.info("at the floor after %.1f s", took_s)
    wait_until(lambda: len(view_of(cluster).workers) == 2, 60, "the workers did not leave")


def test_prompts_that_wait_raise_prefill(scaled):
    """Issue 6, point 5: a step of up to 4 prompts takes a second, and 12 want to be in it."""
    cluster, watch = scaled
    wait_at_floor(scaled)
    slow_down(cluster, "prefill", 1.0)
    with streams_of(cluster, num_prompt_tokens=300, max_tokens=2) as streams:
        streams.add(12)
        wait_grown(scaled, "prefill", 2)
        assert watch.targets.items() >= {**FLOOR, "prefill": 2}.items(), "decode had room"
    slow_down(cluster, "prefill", 0)
    wait_at_floor(scaled)


def test_full_slots_raise_the_cheaper_decode_pool_then_the_dearer_one(scaled):
    """Issue 6, point 5: each on its own hardware, the dearer one from none; and both go back."""
    cluster, watch = scaled
    wait_at_floor(scaled)
    num_told = len(watch.told)
    slow_down(cluster, "cheap", 0.05)
    with streams_of(cluster, num_prompt_tokens=20, max_tokens=900) as streams:
        streams.add(5)
        wait_grown(scaled, "cheap", 2)
        assert watch.targets.items() >= {**FLOOR, "cheap": 2}.items()
        slow_down(cluster, "cheap", 0.05)
        raylets = [psutil.Process(view.worker.pid).ppid() for view in workers_of(cluster, "cheap")]
        assert sorted(raylets) == sorted(cluster.nodes.raylet_pids[1:]), "one on each L40S"
        wait_until(
            lambda: all(view.report.num_running for view in workers_of(cluster, "cheap")), 30,
            "the new worker got nothing to do",
        )  # fmt: skip
        streams.add(4)
        wait_grown(scaled, "dear", 1)
    wait_at_floor(scaled, quiet_s=QUIET_S)
    assert {told["prefill"] for told in watch.told[num_told:]} <= {1}, "nobody waited for prefill"


def test_a_pool_that_shrinks_hands_its_streams_over(scaled, tiny_llama):
    """CASES P-27: scale in: Serve ends a worker whose stream outlasts the grace; none is cut."""
    cluster, watch = scaled
    prompts = Prompts(tiny_llama, 6, num_prompt=20, num_tokens=900)
    wait_at_floor(scaled)
    slow_down(cluster, "cheap", 0.1)
    streams = [prompts.stream(cluster.grpc, number, deadline_s=240) for number in range(6)]
    wait_grown(scaled, "cheap", 2)
    slow_down(cluster, "cheap", 0.1)
    wait_until(
        lambda: all(view.report.num_running for view in workers_of(cluster, "cheap")), 30,
        "the new worker got nothing to do",
    )  # fmt: skip
    for number in (1, 2, 3, 5):
        streams[number].leave()
    kept = {number: streams[number] for number in (0, 4)}
    wait_until(
        lambda: [view.report.num_running for view in workers_of(cluster, "cheap")] == [1, 1], 10,
        "not one stream on each",
    )  # fmt: skip
    wait_until(lambda: watch.targets["cheap"] == 1, 60, "it was not told to shrink")
    wait_until(
        lambda: any(view.report.is_draining for view in workers_of(cluster, "cheap")), 20,
        "nobody drains",
    )  # fmt: skip
    assert all(stream.is_alive() for stream in kept.values()), "they were too short for this"
    wait_until(lambda: len(workers_of(cluster, "cheap")) == 1, DRAIN_S + 15, "it did not leave")
    slow_down(cluster, "cheap", 0)
    for number, stream in kept.items():
        stream.wait_end(60)
        prompts.check(number, stream)
    assert sum(stream.timeline.num_resumed for stream in kept.values()) == 1
    wait_at_floor(scaled)
