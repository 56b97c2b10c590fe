"""A worker takes other roles while the cluster serves, in the process that it has."""

from __future__ import annotations

import dataclasses
import subprocess

import psutil
import pytest

from cluster.config import Role
from cluster.errors import InvalidRequest
from deploy import cli, orders
from tests.e2e.leaving import report_of
from tests.e2e.plain_cluster import make_config
from tests.e2e.process_cluster import process_cluster
from tests.e2e.ray_cluster import PDSERVE
from tests.e2e.streams import Prompts, SteadyLoad

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def prompts(tiny_llama):
    return Prompts(tiny_llama, 20, num_prompt=48, num_tokens=20)


@pytest.fixture(scope="module")
def cluster(tiny_llama, tmp_path_factory):
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 2)}
    config = make_config(tiny_llama, pools, max_num_seqs=16)
    limits = dataclasses.replace(config.limits, drain_s=20.0)
    config = dataclasses.replace(config, limits=limits)
    with process_cluster(config, tiny_llama, tmp_path_factory.mktemp("roles")) as running:
        yield running


def registration(cluster, name: str):
    return next(w.worker for w in cluster.view().workers if w.worker.worker_id == name)


def num_loads(cluster, name: str) -> int:
    """How often a process has loaded weights: each time its log has the model and what it is."""
    return cluster.log(name).count("cluster.model.loader model=llama")


def test_a_worker_takes_each_role_under_load(cluster, prompts, capsys):
    """Point 7: `pdserve set-role`: drain, switch halves, register; the same process and weights."""
    process = psutil.Process(cluster.pid("decode-1"))
    began, seen = process.create_time(), {registration(cluster, "decode-1").incarnation}
    assert num_loads(cluster, "decode-1") == 1
    with SteadyLoad(cluster.grpc, prompts) as load:
        for role in (Role.PREFILL, Role.MIXED, Role.DECODE):
            load.wait_started(3)
            words = ["set-role", "--config", str(cluster.folder / "deploy.yaml")]
            assert cli.main([*words, "decode-1", role.value]) == 0
            assert f"decode-1 serves as {role.value}" in capsys.readouterr().out
            load.wait_started(15)
            present = registration(cluster, "decode-1")
            assert (present.role, present.pid) == (role, process.pid)
            assert present.incarnation not in seen
            seen.add(present.incarnation)
            counters = report_of(cluster, "decode-1").counters
            assert (counters["prefilled_tokens"] > 0) is (role is not Role.DECODE)
            assert ("imports_ok" in counters) is (role is not Role.PREFILL)
    load.check()
    assert process.create_time() == began
    assert num_loads(cluster, "decode-1") == 1, "weights were loaded again"
    assert len(seen) == 4
    cluster.wait_quiet()


def test_what_cannot_be_done_is_told_by_name(cluster):
    """A worker or a role that there is not; and nothing changes."""
    told = subprocess.run(
        [*PDSERVE, "set-role", "decode-9", "prefill", "--set",
         f"endpoints.control_port={cluster.config.endpoints.control_port}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert told.returncode == 1
    assert "no worker is called 'decode-9': there is decode-0, decode-1, prefill-0" in told.stderr
    told = subprocess.run(
        [*PDSERVE, "set-role", "decode-0", "both"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert told.returncode == 2
    assert "'both'" in told.stderr
    with pytest.raises(InvalidRequest, match="decode-0 is a decode worker"):
        orders.set_role(cluster.config, "decode-0", Role.DECODE)
    assert registration(cluster, "decode-0").role is Role.DECODE


def test_a_worker_that_is_restarted_has_its_pools_role(cluster):
    assert orders.set_role(cluster.config, "decode-0", Role.MIXED) == 0
    cluster.kill("decode-0")
    cluster.restart("decode-0")
    cluster.wait_whole()
    assert registration(cluster, "decode-0").role is Role.DECODE
