"""Pools on different hardware: four kinds of nodes, each a raylet of its own on this machine."""

import concurrent.futures
import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from cluster import config as deploy_config
from cluster.config import Role
from deploy.client import Client
from deploy.run_state import RunState
from tests.e2e import reference
from tests.e2e.plain_cluster import make_config, view_of, wait_until, with_pool
from tests.e2e.ray_cluster import PDSERVE
from tests.e2e.ray_nodes import ENVIRONMENT, ray_nodes

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(420)]

H100 = {"num_gpus": 1, "resources": {"accelerator_type:H100": 1}}
L40S = {"num_gpus": 1, "resources": {"accelerator_type:L40S": 1}}
OLD_RACK, NEW_RACK = {"labels": {"rack": "old"}}, {"labels": {"rack": "new"}}
NODES = (H100, L40S, OLD_RACK, NEW_RACK)
ASKS = {
    "prefill-h100": {"accelerator_type": "H100", "gpus_per_worker": 1.0},
    "decode-l40s": {"accelerator_type": "L40S", "gpus_per_worker": 1.0},
    "prefill-old": {"node_labels": {"rack": "old"}},
    "decode-new": {"node_labels": {"rack": "new"}},
}
"""What each pool asks for, in the order of the nodes that have it."""
SERVE = [str(Path(sys.executable).with_name("serve"))]
NUM_AT_ONCE, MAX_ASKED = 6, 120
FAIL_S = 60.0
ROLES = {name: Role(name.partition("-")[0]) for name in ASKS}


class Deployed:
    """A cluster that ``pdserve deploy`` has put on Ray's nodes."""

    def __init__(self, config, nodes, folder):
        self.config = config
        self.nodes = nodes
        self.file = folder / "deploy.yaml"
        self.file.write_text(yaml.safe_dump(deploy_config.to_tree(config)))
        endpoints = config.endpoints
        self.http = f"http://{endpoints.host}:{endpoints.http_port}"
        self.grpc = f"{endpoints.host}:{endpoints.grpc_port}"
        self.control = f"{endpoints.host}:{endpoints.control_port}"

    def command(self, name, *arguments, timeout_s=180):
        file = ["--config", str(self.file)] if name == "down" else [str(self.file)]
        return subprocess.run(
            [*PDSERVE, name, *file, "--cluster", self.nodes.address, *arguments],
            capture_output=True, text=True, timeout=timeout_s, check=False,
            env=os.environ | ENVIRONMENT,
        )  # fmt: skip


@pytest.fixture(scope="module")
def deployed(tiny_llama, tmp_path_factory):
    config = make_config(tiny_llama, {name: (role, 1) for name, role in ROLES.items()})
    for name, asks in ASKS.items():
        config = with_pool(config, name, **asks)
    with ray_nodes(NODES) as nodes:
        cluster = Deployed(config, nodes, tmp_path_factory.mktemp("hardware"))
        done = cluster.command("deploy", "--wait-ready", "150")
        assert done.returncode == 0, done.stdout + done.stderr
        try:
            yield cluster
        finally:
            gone = cluster.command("down", timeout_s=90)
            RunState(config.endpoints.control_port).clear(10)
            assert "taken away" in gone.stdout, gone.stderr


def test_each_worker_is_on_the_hardware_of_its_pool(deployed):
    """A worker's parent is its node's raylet: no word of ours or of Ray's is taken for it."""
    at = dict(zip(deployed.nodes.raylet_pids, ASKS, strict=True))
    workers = [view.worker for view in view_of(deployed).workers]
    assert {worker.pool for worker in workers} == set(ASKS)
    for worker in workers:
        assert at[psutil.Process(worker.pid).ppid()] == worker.pool, worker.worker_id


def test_all_pools_serve_real_tokens(deployed, tiny_llama):
    """P-13 over two prefill and two decode pools: equal to transformers whichever pair it was."""
    asked, answers, seen = [], [], set()
    everybody = {f"{name}-0" for name in ASKS}
    with (
        Client(deployed.grpc) as client,
        concurrent.futures.ThreadPoolExecutor(NUM_AT_ONCE) as threads,
    ):

        def ask(prompt):
            options = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "timeline": True}
            return list(client.generate(prompt_ids={"ids": prompt}, **options))

        # One after the other would all go to whoever was measured as the fastest.
        while seen != everybody:
            assert len(asked) < MAX_ASKED, f"never placed on {everybody - seen}"
            prompts = [
                [40 + (7 * number + i) % 400 for i in range(50)]
                for number in range(len(asked), len(asked) + NUM_AT_ONCE)
            ]
            asked += prompts
            for pieces in threads.map(ask, prompts):
                answers.append([token for piece in pieces for token in piece.token_ids])
                timeline = pieces[-1].timeline
                seen |= {timeline.prefill_worker, timeline.decode_worker}
    expected = reference.greedy(tiny_llama, asked, 8)
    assert expected.disagreements(answers)[0] == []


def test_the_plan_names_the_nodes(deployed):
    done = deployed.command("plan")
    assert done.returncode == 0, done.stderr
    for name in ASKS:
        assert name in done.stdout


def test_what_has_no_room_is_refused_with_its_pool(deployed, tiny_llama, tmp_path):
    """Point 9: missing hardware is told at once, and what serves goes on."""
    other = with_pool(deployed.config, "decode-l40s", accelerator_type="B200")
    refused = Deployed(other, deployed.nodes, tmp_path).command("deploy", timeout_s=60)
    assert refused.returncode == 1
    assert "pool decode-l40s: no node has B200; there is H100, L40S" in refused.stderr
    more = with_pool(deployed.config, "prefill-h100", count=2)
    refused = Deployed(more, deployed.nodes, tmp_path).command("plan", timeout_s=60)
    assert "pool prefill-h100: 1 of 2 workers fit" in refused.stderr
    assert httpx.get(f"{deployed.http}/health/ready").status_code == 200


def test_a_second_ray_of_this_host_gets_no_door_of_the_first(deployed, tiny_llama, tmp_path):
    """Point 9: neither by `pdserve deploy`, which looks first, nor by `serve run`, by the routers.

    With a control port of its own nothing else would tell them apart: the kernel would spread what
    comes over the doors of both.
    """
    config = make_config(tiny_llama, {"both": (Role.MIXED, 1)})
    ours, doors = deployed.config.endpoints, config.endpoints
    doors = dataclasses.replace(doors, http_port=ours.http_port, grpc_port=ours.grpc_port)
    config = dataclasses.replace(config, endpoints=doors)
    with ray_nodes(()) as nodes:
        second = Deployed(config, nodes, tmp_path)
        refused = second.command("deploy", timeout_s=FAIL_S)
        assert refused.returncode == 1
        for key, port in (("http_port", doors.http_port), ("grpc_port", doors.grpc_port)):
            assert f"port {port} (endpoints.{key}) is taken" in refused.stderr, refused.stderr
        built = tmp_path / "serve.yaml"
        subprocess.run([*PDSERVE, "build", str(second.file), "--out", str(built)], check=True)
        serve_run = subprocess.Popen(
            [*SERVE, "run", str(built), f"--address={nodes.address}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | ENVIRONMENT,
        )  # fmt: skip
        try:
            told = f"is a door of another cluster, on the Ray at {deployed.nodes.address}: "
            wait_until(lambda: told in nodes.serve_log(), FAIL_S, "no router of it was refused")
        finally:
            serve_run.kill()
            serve_run.wait(10)
            RunState(doors.control_port).clear(10)
    # Each connection is another one of the kernel's choices.
    assert {httpx.get(f"{deployed.http}/health/ready").status_code for _ in range(30)} == {200}


def test_a_serve_that_hangs_is_told_within_a_minute(deployed):
    """Point 9: its calls have no timeout; what serves goes on meanwhile."""
    controller = controller_of(deployed.nodes.address)
    controller.suspend()
    try:
        began = time.monotonic()
        for name in ("deploy", "down"):
            refused = deployed.command(name, timeout_s=FAIL_S)
            assert refused.returncode == 1
            assert "Ray Serve has not answered for" in refused.stderr, refused.stderr
            assert time.monotonic() - began < FAIL_S
            began = time.monotonic()
        assert httpx.get(f"{deployed.http}/health/ready").status_code == 200
    finally:
        controller.resume()


def controller_of(address: str) -> psutil.Process:
    """Serve's, on the Ray at this address: of all on this machine, and there may be others."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, IndexError):
            if process.cmdline()[0].startswith("ray::ServeController") and any(
                address in word for word in process.parent().cmdline()
            ):
                return process
    raise AssertionError("Serve has no controller")


def test_an_update_that_stands_still_ends_with_its_pool(deployed, tmp_path):
    """Point 9: a worker hangs while it loads, on another node; it fails in no other way.

    It is the last test: what it leaves is half an update.
    """
    other = with_pool(deployed.config, "decode-new", max_num_seqs=3)
    (old,) = [w.worker.pid for w in view_of(deployed).workers if w.worker.pool == "decode-new"]
    raylet = psutil.Process(deployed.nodes.raylet_pids[list(ASKS).index("decode-new")])
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        update = threads.submit(Deployed(other, deployed.nodes, tmp_path).command, "deploy")
        loading = []

        def is_loading() -> bool:
            found = [child for child in raylet.children() if is_replica(child, "decode-new")]
            loading[:] = [child for child in found if child.pid != old]
            return bool(loading)

        wait_until(is_loading, 60, "it is not replaced")
        loading[0].suspend()
        hung_at = time.monotonic()
        try:
            done = update.result(120)
        finally:
            loading[0].kill()
    assert done.returncode == 1
    assert "nothing has moved for 20 s: pool decode-new: 0 of 1 workers" in done.stderr, done.stderr
    assert time.monotonic() - hung_at < FAIL_S


def is_replica(process: psutil.Process, pool: str) -> bool:
    with contextlib.suppress(psutil.Error, IndexError):
        return f"ServeReplica:pdserve:{pool}" in process.cmdline()[0]
    return False
