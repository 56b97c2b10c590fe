"""Pools on different hardware: four kinds of nodes, each a raylet of its own on this machine."""

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from cluster import config as deploy_config
from cluster.config import FaultsConfig, Role
from deploy.client import Client
from deploy.run_state import RunState
from tests.e2e import reference
from tests.e2e.plain_cluster import free_ports, make_config, view_of, wait_until, with_pool
from tests.e2e.process_cluster import Faults, fault
from tests.e2e.ray_cluster import PDSERVE
from tests.e2e.ray_nodes import ENVIRONMENT, ray_nodes
from tests.e2e.streams import Prompts

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(420)]

H100 = {"num_gpus": 1, "resources": {"accelerator_type:H100": 1}}
L40S = {"num_gpus": 1, "resources": {"accelerator_type:L40S": 1}}
OLD_RACK, NEW_RACK = {"labels": {"rack": "old"}}, {"labels": {"rack": "new"}}
NODES = (H100, L40S, OLD_RACK, NEW_RACK)
ASKS = {
    "prefill-h100": {"accelerator_type": "H100", "gpus_per_worker": 0.5, "count": 2},
    "decode-l40s": {"accelerator_type": "L40S", "gpus_per_worker": 1.0},
    "prefill-old": {"node_labels": {"rack": "old"}},
    "decode-new": {"node_labels": {"rack": "new"}},
}
"""What each pool asks for, in the order of the nodes that have it; two share a GPU."""
SERVE = [str(Path(sys.executable).with_name("serve"))]
NUM_AT_ONCE, MAX_ASKED = 6, 400
FAIL_S = 60.0
BUSY_STEP_S = 0.6
OTHER_APP = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
Other = ray.remote(num_cpus=1)(type("Other", (), {"is_here": lambda self: True}))
other = Other.remote()
print(ray.get(other.is_here.remote()), flush=True)
sys.stdin.read()
"""
"""Takes a CPU until its standard input ends."""
ROLES = {name: Role(name.partition("-")[0]) for name in ASKS}
COUNTS = {name: asks.get("count", 1) for name, asks in ASKS.items()}


class Deployed:
    """A cluster that ``pdserve deploy`` has put on Ray's nodes."""

    dashboard = ""
    """Ray's, where one runs."""

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
    config = dataclasses.replace(config, faults=FaultsConfig(enabled=True))
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
    """A worker's parent is its node's raylet: no word of ours or of Ray's is taken for it.

    Point 1: those that ask for half a GPU are two on the one node that has it.
    """
    at = dict(zip(deployed.nodes.raylet_pids, ASKS, strict=True))
    workers = [view.worker for view in view_of(deployed).workers]
    assert Counter(worker.pool for worker in workers) == COUNTS
    assert len({worker.pid for worker in workers}) == len(workers)
    for worker in workers:
        assert at[psutil.Process(worker.pid).ppid()] == worker.pool, worker.worker_id


def test_control_plane_and_routers_are_on_the_head(deployed):
    """Point 5: on the node that has none of the pools' hardware, as clients and workers expect."""
    for name in ("control", "router"):
        replicas = processes_of(deployed.nodes.address, f"ray::ServeReplica:pdserve:{name}")
        assert replicas, name
        for replica in replicas:
            assert replica.ppid() not in deployed.nodes.raylet_pids, name


def test_all_pools_serve_real_tokens(deployed, tiny_llama):
    """P-13 over two prefill and two decode pools: equal to transformers whichever pair it was."""
    asked, answers, seen = [], [], set()
    everybody = {f"{name}-{i}" for name, count in COUNTS.items() for i in range(count)}
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


def test_the_plan_names_the_nodes_that_workers_are_on(deployed):
    """Its rows are true. What the app holds, all of two nodes' GPUs, is not in its own way."""
    done = deployed.command("plan")
    assert done.returncode == 0, done.stderr
    planned = re.findall(r"^(\S+) +127\.0\.0\.1 \((\w+)\) +(\d+)$", done.stdout, re.M)
    ids = dict(zip(deployed.nodes.raylet_pids, deployed.nodes.node_ids, strict=True))
    workers = [view.worker for view in view_of(deployed).workers]
    at = {worker.pool: ids[psutil.Process(worker.pid).ppid()] for worker in workers}
    rows = [(pool, node_id[:6], str(COUNTS[pool])) for pool, node_id in at.items()]
    assert sorted(planned) == sorted(rows)


def test_what_has_no_room_is_refused_with_its_pool(deployed, tiny_llama, tmp_path):
    """Point 9: missing hardware is told at once, and what serves goes on."""
    other = with_pool(deployed.config, "decode-l40s", accelerator_type="B200")
    refused = Deployed(other, deployed.nodes, tmp_path).command("deploy", timeout_s=60)
    assert refused.returncode == 1
    assert "pool decode-l40s: no node has B200; there is H100, L40S" in refused.stderr
    more = with_pool(deployed.config, "prefill-h100", count=3)
    refused = Deployed(more, deployed.nodes, tmp_path).command("plan", timeout_s=60)
    assert "pool prefill-h100: 2 of 3 workers fit" in refused.stderr
    assert httpx.get(f"{deployed.http}/health/ready").status_code == 200


def test_serve_replaces_whose_engine_stands_still_and_nobody_else(deployed, tiny_llama):
    """CASES P-26: all processes live and report; one is busy, and two are idle meanwhile."""
    prompts = Prompts(tiny_llama, 2 * NUM_AT_ONCE, num_prompt=48, num_tokens=120)
    before = {w.worker.worker_id: w.worker for w in view_of(deployed).workers}
    hung, busy = (Faults(before[name].address) for name in ("decode-l40s-0", "decode-new-0"))
    hung.set(fault("hold", "engine.step"))
    busy.set(fault("delay", "engine.step", times=0, seconds=BUSY_STEP_S))
    streams = []
    while not any(hung.fired()):
        assert len(streams) < len(prompts.prompts), "nothing is placed on it"
        streams.append(prompts.stream(deployed.grpc, len(streams), deadline_s=150))
        last = streams[-1]
        wait_until(
            lambda last=last: len(last.tokens) > 1 or any(hung.fired()), 30, "no token comes"
        )
    after = {}

    def is_replaced() -> bool:
        after.update((w.worker.worker_id, w.worker) for w in view_of(deployed).workers)
        return after["decode-l40s-0"].pid != before["decode-l40s-0"].pid

    wait_until(is_replaced, FAIL_S, "it is not replaced", pace_s=0.2)
    assert any(not stream.ended_at for stream in streams), "nobody was busy (V)"
    busy.clear()
    for number, stream in enumerate(streams):
        stream.wait_end(FAIL_S)
        prompts.check(number, stream)
    kept = {name: worker.pid for name, worker in before.items() if name != "decode-l40s-0"}
    assert {name: worker.pid for name, worker in after.items() if name in kept} == kept
    for each in (hung, busy):
        each.close()


# ---- another Ray on this host


@pytest.fixture(scope="module")
def second(tiny_llama, tmp_path_factory):
    """One node with one CPU, which the worker takes, and a dashboard; nothing is deployed there."""
    config = make_config(tiny_llama, {"both": (Role.MIXED, 1)}, cpus_per_worker=1.0)
    (port,) = free_ports(1)
    with ray_nodes((), dashboard_port=port) as nodes:
        cluster = Deployed(config, nodes, tmp_path_factory.mktemp("second"))
        cluster.dashboard = f"http://127.0.0.1:{port}"
        try:
            yield cluster
        finally:
            RunState(config.endpoints.control_port).clear(10)


def test_what_another_app_uses_has_no_room(second):
    """Point 1: on a Ray that is shared; as soon as that app is gone there is room again."""
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_APP, second.nodes.address],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT,
    )  # fmt: skip
    try:
        assert other.stdout.readline() == "True\n"
        refused = second.command("plan", timeout_s=FAIL_S)
        assert refused.returncode == 1
        assert "pool both: 0 of 1 workers fit" in refused.stderr
        assert "other apps use 1 CPU of them" in refused.stderr
    finally:
        other.communicate(timeout=30)


def test_what_never_gets_ready_is_taken_away_again(second):
    """Point 9: the first deployment, within its wait, with the reason; nothing is left of it."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        deploying = threads.submit(second.command, "deploy", "--wait-ready", "20")
        loading = []

        def is_loading() -> bool:
            loading[:] = processes_of(second.nodes.address, "ray::ServeReplica:pdserve:both")
            assert loading or not deploying.done(), deploying.result().stderr
            return bool(loading)

        wait_until(is_loading, FAIL_S, "it is not started", pace_s=0.05)
        loading[0].suspend()
        done = deploying.result(FAIL_S)
    assert done.returncode == 1
    # Which of them depends on how soon the control plane was there.
    why = r"(pool both: 0 of 1 workers registered|the control plane does not answer)"
    assert re.search(f"not ready after 20 s: {why}", done.stderr), done.stderr
    wait_until(
        lambda: not processes_of(second.nodes.address, "ray::ServeReplica:pdserve:"),
        FAIL_S, "a process of it is left", pace_s=0.2,
    )  # fmt: skip
    endpoints = second.config.endpoints
    for port in (endpoints.http_port, endpoints.grpc_port, endpoints.control_port):
        socket.create_server((endpoints.host, port)).close()
    gone = second.command("down", timeout_s=FAIL_S)
    assert gone.stdout == "nothing was there\n", gone.stdout + gone.stderr


def test_a_second_ray_of_this_host_gets_no_door_of_the_first(deployed, second, tmp_path):
    """Point 9: neither by `pdserve deploy`, which looks first, nor by Serve, by the routers.

    With a control port of its own nothing else would tell them apart: the kernel would spread what
    comes over the doors of both.
    """
    ours, doors = deployed.config.endpoints, second.config.endpoints
    doors = dataclasses.replace(doors, http_port=ours.http_port, grpc_port=ours.grpc_port)
    config = dataclasses.replace(second.config, endpoints=doors)
    same = Deployed(config, second.nodes, tmp_path)
    same.dashboard = second.dashboard
    refused = same.command("deploy", timeout_s=FAIL_S)
    assert refused.returncode == 1
    for key, port in (("http_port", doors.http_port), ("grpc_port", doors.grpc_port)):
        assert f"port {port} (endpoints.{key}) is taken" in refused.stderr, refused.stderr
    serve_deploy(same, tmp_path)
    told = f"is a door of another cluster, on the Ray at {deployed.nodes.address}: "
    wait_until(lambda: told in second.nodes.serve_log(), FAIL_S, "no router of it was refused")
    # Each connection is another one of the kernel's choices.
    assert {httpx.get(f"{deployed.http}/health/ready").status_code for _ in range(30)} == {200}


def test_serve_deploy_takes_what_build_wrote(second, tmp_path):
    """Point 4, by way of Ray's dashboard; and in place of what was there and couldn't serve."""
    serve_deploy(second, tmp_path)
    wait_until(lambda: is_ready(second), 2 * FAIL_S, "it does not serve", pace_s=0.2)
    ask = {"model": "tiny", "prompt": "the harbour", "max_tokens": 8}
    answer = httpx.post(f"{second.http}/v1/completions", json=ask, timeout=60)
    assert answer.raise_for_status().json()["choices"]


def serve_deploy(cluster, folder) -> None:
    """The README's two commands."""
    built = folder / "serve.yaml"
    subprocess.run([*PDSERVE, "build", str(cluster.file), "--out", str(built)], check=True)
    done = subprocess.run(
        [*SERVE, "deploy", str(built), "--address", cluster.dashboard],
        capture_output=True, text=True, timeout=FAIL_S, check=False, env=os.environ | ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def is_ready(cluster) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{cluster.http}/health/ready", timeout=10).status_code == 200
    return False


# ---- what hangs


def test_a_serve_that_hangs_is_told_within_a_minute(deployed):
    """Point 9: its calls have no timeout; what serves goes on meanwhile."""
    (controller,) = processes_of(deployed.nodes.address, "ray::ServeController")
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


def processes_of(address: str, title: str) -> list[psutil.Process]:
    """Those whose title begins so on the Ray at this address: there may be others here."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, IndexError):
            if process.cmdline()[0].startswith(title) and any(
                address in word for word in process.parent().cmdline()
            ):
                found.append(process)
    return found


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
