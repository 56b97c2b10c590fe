"""Every worker replaced, one by one, under 10 requests a second: none of them fails."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import time

import httpx
import pytest

from cluster.config import Role
from cluster.control.facts import Health
from cluster.errors import PdserveError
from deploy.run_state import RunState
from tests.e2e.kept_connections import KeptGrpc, KeptHttp
from tests.e2e.plain_cluster import (
    make_config,
    parse_metrics,
    view_of,
    wait_until,
    with_router_replicas,
)
from tests.e2e.process_cluster import process_cluster
from tests.e2e.ray_cluster import PDSERVE
from tests.e2e.ray_nodes import ray_nodes
from tests.e2e.streams import Prompts, SteadyLoad
from tests.e2e.test_hardware_pools import Deployed

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
DRAIN_S = 20.0


@pytest.fixture(scope="module")
def prompts(tiny_llama):
    return Prompts(tiny_llama, 20, num_prompt=48, num_tokens=20)


@pytest.fixture(scope="module")
def config(tiny_llama):
    pools = {"prefill": (Role.PREFILL, 2), "decode": (Role.DECODE, 2)}
    config = make_config(tiny_llama, pools, max_num_seqs=16)
    limits = dataclasses.replace(config.limits, drain_s=DRAIN_S)
    return dataclasses.replace(config, limits=limits)


def incarnations(cluster) -> dict[str, str]:
    """Of the workers that are there and live."""
    try:
        view = view_of(cluster)
    except PdserveError:
        return {}
    return {
        w.worker.worker_id: w.worker.incarnation
        for w in view.workers
        if w.health is Health.ALIVE and not w.report.is_draining
    }


def router_ids(cluster) -> set[str]:
    """Of the routers that answer at the doors: each connection reaches one of them."""
    pages = [parse_metrics(httpx.get(f"{cluster.http}/metrics").text) for _ in range(20)]
    return {
        dict(labels)["router"] for page in pages for _, labels in page if "router" in dict(labels)
    }


def test_every_worker_of_a_plain_cluster(config, tiny_llama, tmp_path, prompts):
    """CASES P-27: replaced one by one, then one taken away: 0 client-visible failures."""
    with process_cluster(config, tiny_llama, tmp_path) as cluster:
        before = incarnations(cluster)
        with SteadyLoad(cluster.grpc, prompts) as load:
            load.wait_started(5)
            for name in cluster.pools:
                cluster.terminate(name)
                assert cluster.wait_exit(name, DRAIN_S + 10) == 0
                cluster.restart(name)
                cluster.wait_whole()
                load.wait_started(3)
            after = incarnations(cluster)
            cluster.terminate("decode-1")
            assert cluster.wait_exit("decode-1", DRAIN_S + 10) == 0
            load.wait_started(5)
        load.check()
        assert before.keys() == after.keys() == cluster.pools.keys()
        assert not set(before.values()) & set(after.values()), "one was not replaced"
        cluster.wait_quiet()


@pytest.fixture(scope="module")
def deployed(config, tmp_path_factory):
    """Two workers of each role and two routers on a Ray of one head node and one other."""
    shape = with_router_replicas(config, 2)
    with ray_nodes([{}]) as nodes:
        cluster = Deployed(shape, nodes, tmp_path_factory.mktemp("rolling"))
        done = cluster.command("deploy", "--wait-ready", "150")
        assert done.returncode == 0, done.stdout + done.stderr
        try:
            yield cluster
        finally:
            gone = cluster.command("down", timeout_s=90)
            RunState(config.endpoints.control_port).clear(10)
            assert "taken away" in gone.stdout, gone.stderr


def told(cluster, *words: str) -> str:
    """What ``pdserve`` says to an order, with the cluster's deploy file."""
    name, *rest = words
    done = subprocess.run(
        [*PDSERVE, name, "--config", str(cluster.file), *rest],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_replaced(cluster, names, old: set[str]) -> None:
    def are_all_back() -> bool:
        return incarnations(cluster).keys() == names and not old & set(
            incarnations(cluster).values()
        )

    wait_until(are_all_back, 90, "not all came back")


@pytest.mark.ray
def test_a_role_change_on_ray(deployed, prompts):
    """Point 7: `pdserve set-role` and back; the same process, so the weights as they were."""
    before = {w.worker.worker_id: w.worker for w in view_of(deployed).workers}
    with SteadyLoad(deployed.grpc, prompts) as load:
        load.wait_started(5)
        for role in (Role.MIXED, Role.DECODE):
            said = told(deployed, "set-role", "decode-1", role.value)
            assert f"decode-1 serves as {role.value}" in said
            load.wait_started(10)
    load.check()
    after = {w.worker.worker_id: w.worker for w in view_of(deployed).workers}
    assert {name: w.pid for name, w in before.items()} == {n: w.pid for n, w in after.items()}
    assert after["decode-1"].incarnation != before["decode-1"].incarnation
    assert after["decode-1"].role is Role.DECODE


@pytest.mark.ray
def test_every_worker_on_ray(deployed, prompts):
    """CASES P-27: `pdserve drain` one by one; Serve puts another in the place of each."""
    before = incarnations(deployed)
    seen = set(before.values())
    with SteadyLoad(deployed.grpc, prompts) as load:
        load.wait_started(5)
        for name in before:
            began = time.monotonic()
            assert f"{name} has drained and left" in told(deployed, "drain", name)
            left = time.monotonic()
            wait_until(lambda: incarnations(deployed).keys() == before.keys(), 60, "none came back")
            logger.info(
                "worker=%s left after %.1f s, back %.1f s later",
                name, left - began, time.monotonic() - left,
            )  # fmt: skip
            seen |= set(incarnations(deployed).values())
            load.wait_started(3)
    load.check()
    assert len(seen) == 2 * len(before), "one was not replaced"


@pytest.mark.ray
def test_a_changed_config_on_ray(deployed, prompts, tmp_path):
    """CASES P-27: `pdserve deploy` again: Serve itself stops and starts every process under load.

    Workers, routers and the control plane, each with less time to drain than its predecessor:
    nothing fails, no stream is cut to be resumed, and connections that are kept open are moved.
    """
    before, routers = incarnations(deployed), router_ids(deployed)
    limits = dataclasses.replace(deployed.config.limits, drain_s=DRAIN_S / 2)
    changed = Deployed(
        dataclasses.replace(deployed.config, limits=limits), deployed.nodes, tmp_path
    )
    with (
        SteadyLoad(deployed.grpc, prompts) as load,
        KeptHttp(deployed.http, prompts.prompts[0], 2) as over_http,
        KeptGrpc(deployed.grpc, prompts.prompts[1], 2) as over_grpc,
    ):
        load.wait_started(5)
        done = changed.command("deploy", "--wait-ready", "150")
        assert done.returncode == 0, done.stdout + done.stderr
        wait_replaced(changed, before.keys(), set(before.values()))
        load.wait_started(5)
    load.check()
    assert not any(stream.timeline.num_resumed for _, stream in load.streams), "one was cut"
    assert not routers & router_ids(changed), "a router was not replaced"
    for caller in (over_http, over_grpc):
        caller.check()
    assert max(over_http.connections.values()) > 1, "no connection was kept"
