"""Every worker replaced, one by one, under 10 requests a second: none of them fails."""

from __future__ import annotations

import dataclasses
import time

import pytest

from cluster.config import Role
from cluster.control.facts import Health
from cluster.errors import PdserveError
from tests.e2e.plain_cluster import make_config, view_of, wait_until
from tests.e2e.process_cluster import process_cluster
from tests.e2e.ray_cluster import ray_cluster
from tests.e2e.streams import Prompts, SteadyLoad

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
DRAIN_S = 20.0
MIN_SHARE = 0.5
"""Of ten requests a second, that were really sent."""


@pytest.fixture(scope="module")
def prompts(tiny_llama):
    return Prompts(tiny_llama, 20, num_prompt=48, num_tokens=20)


@pytest.fixture
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


def check_load(load: SteadyLoad, began: float) -> None:
    seconds = time.monotonic() - began
    load.check()
    assert len(load.streams) >= 10 * MIN_SHARE * seconds, "there was no such load"


def test_every_worker_of_a_plain_cluster(config, tiny_llama, tmp_path, prompts):
    """CASES P-27: replaced one by one, then one taken away: 0 client-visible failures."""
    with process_cluster(config, tiny_llama, tmp_path) as cluster:
        before, began = incarnations(cluster), time.monotonic()
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
        check_load(load, began)
        assert before.keys() == after.keys() == cluster.pools.keys()
        assert not set(before.values()) & set(after.values()), "one was not replaced"
        cluster.wait_quiet()


@pytest.mark.ray
def test_every_worker_on_ray(config, tmp_path, prompts):
    """CASES P-27: `pdserve drain` one by one; Serve puts another in the place of each."""
    with ray_cluster(config, tmp_path) as cluster:
        before, began = incarnations(cluster), time.monotonic()
        seen = set(before.values())
        with SteadyLoad(cluster.grpc, prompts) as load:
            load.wait_started(5)
            for name in before:
                told = cluster.command("drain", name, timeout_s=60)
                assert told.returncode == 0, told.stderr
                assert "has drained and left" in told.stdout
                wait_until(
                    lambda: incarnations(cluster).keys() == before.keys(), 60, "none came back"
                )
                seen |= set(incarnations(cluster).values())
                load.wait_started(3)
        check_load(load, began)
        assert len(seen) == 2 * len(before), "one was not replaced"
