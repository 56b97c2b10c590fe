"""Shared by the end-to-end tests: the tiny model, and one cluster on Ray for the session."""

import dataclasses
import os

import pytest

from cluster.config import Role
from tests.e2e.plain_cluster import make_config, with_router_replicas
from tests.e2e.ray_cluster import ray_cluster
from tests.factories_model import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def on_ray(tiny_llama, tmp_path_factory):
    """Two prefill and two decode workers and two routers on Ray."""
    pools = {"prefill": (Role.PREFILL, 2), "decode": (Role.DECODE, 2)}
    usable = sorted(os.sched_getaffinity(0))
    cores = (usable[0], usable[-1])  # one for each worker of a pool
    config = with_router_replicas(make_config(tiny_llama, pools, cores=cores), 2)
    config = dataclasses.replace(config, service_cores=cores[:1])
    with ray_cluster(config, tmp_path_factory.mktemp("on-ray")) as cluster:
        yield cluster
