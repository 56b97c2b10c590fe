"""Starts in any order, starts that fail, and two clusters beside one another (issue 6, point 9)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import signal
import socket
import subprocess
import time

import grpc
import pytest
import yaml

from cluster import config as deploy_config
from cluster.config import Role
from cluster.control.status import get_cluster
from cluster.errors import NoWorker
from cluster.trust import ClusterToken
from cluster.wire import faults_pb2, worker_pb2
from deploy.cores import holders
from tests.e2e.plain_cluster import make_config, view_of, wait_until, with_pool
from tests.e2e.process_cluster import CONTROL, ProcessCluster
from tests.e2e.ray_cluster import PDSERVE
from tests.e2e.streams import Prompts
from tests.e2e.test_starting import FAIL_S, PAIR, on_ray_marks, starts, worker_pid

__all__ = ["starts"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def prompts(tiny_llama):
    return Prompts(tiny_llama, 2, num_prompt=48, num_tokens=16)


@pytest.fixture
def make_cluster(tiny_llama, tmp_path):
    """Make clusters that end with the test; nothing of them is started."""
    made: list[ProcessCluster] = []

    def make(config) -> ProcessCluster:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(ProcessCluster(config, tiny_llama, folder))
        return made[-1]

    yield make
    for cluster in made:
        cluster.stop()


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def serve_one(cluster: ProcessCluster, prompts: Prompts, number: int = 0) -> None:
    stream = prompts.stream(cluster.grpc, number)
    stream.wait_end()
    prompts.check(number, stream)


@contextlib.contextmanager
def taken(host: str, port: int):
    with socket.socket() as holder:
        holder.bind((host, port))
        holder.listen(1)
        yield


# ---- in any order


@pytest.mark.parametrize(
    "order",
    [
        ("prefill-0", "decode-0", CONTROL, "router-0"),
        ("router-0", CONTROL, "decode-0", "prefill-0"),
        ("router-0", "decode-0", "prefill-0", CONTROL),
    ],
    ids=["workers-first", "router-first", "control-plane-last"],
)
def test_it_serves_once_all_are_there(order, make_cluster, tiny_llama, prompts):
    """Each is up, by its port, before the next one is started; nobody is started twice."""
    cluster = make_cluster(make_config(tiny_llama, PAIR))
    doors = {name: f"127.0.0.1:{cluster.ports[name]}" for name in cluster.pools}
    doors |= {CONTROL: cluster.control, "router-0": cluster.grpc}
    for name in order:
        cluster.start_one(name)
        wait_until(lambda name=name: listens(doors[name]), FAIL_S, f"{name} does not listen")
    for name in order:
        cluster.wait_ready(name)
    cluster.wait_whole()
    serve_one(cluster, prompts)
    assert {w.worker.pid for w in cluster.view().workers} == {
        cluster.pid(name) for name in cluster.pools
    }


# ---- what is not there


@pytest.mark.parametrize("name", ["decode-0", CONTROL, "router-0-http", "router-0-grpc"])
def test_a_taken_port_ends_each_process_with_the_reason(name, make_cluster, tiny_llama):
    """Each of ours as a plain process: it says which port, and is gone within 60 s."""
    cluster = make_cluster(make_config(tiny_llama, PAIR))
    who = "router-0" if name.startswith("router") else name
    endpoints = cluster.config.endpoints
    port = {
        "decode-0": cluster.ports["decode-0"],
        CONTROL: endpoints.control_port,
        "router-0-http": endpoints.http_port,
        "router-0-grpc": endpoints.grpc_port,
    }[name]
    with taken(endpoints.host, port):
        cluster.start_one(who)
        process = cluster.processes.pop(who)
        process.join(FAIL_S)
        assert process.exitcode not in (None, 0), "it goes on without its port"
    assert f"cannot listen on {endpoints.host}:{port}" in cluster.log(who)


@pytest.mark.parametrize("key", ["grpc_port", "control_port"])
def test_a_taken_port_is_named_before_anything_is_started(key, tiny_llama, tmp_path):
    """The HTTP port is in ``test_starting``."""
    config = make_config(tiny_llama, PAIR)
    port = getattr(config.endpoints, key)
    with taken(config.endpoints.host, port):
        done = serve(config, tmp_path)
    assert done.returncode == 1
    assert f"port {port} (endpoints.{key}) is taken" in done.stderr
    assert "starting" not in done.stdout


def test_a_machine_that_is_too_small_is_said_before_anything_is_started(tiny_llama, tmp_path):
    config = with_pool(make_config(tiny_llama, PAIR), "decode", kv_tokens=16 << 30)
    done = serve(config, tmp_path)
    assert done.returncode == 1
    assert "the cluster takes about" in done.stderr
    assert "starting" not in done.stdout


def serve(config, folder) -> subprocess.CompletedProcess[str]:
    file = folder / "deploy.yaml"
    file.write_text(yaml.safe_dump(deploy_config.to_tree(config)))
    return subprocess.run(
        [*PDSERVE, "serve", "--once", "--config", str(file)],
        capture_output=True, text=True, timeout=FAIL_S, check=False,
    )  # fmt: skip


@on_ray_marks
def test_hardware_that_is_missing_ends_the_start(starts, tiny_llama):
    """A pool asks for what no node has: it is named, and Ray is gone again."""
    config = with_pool(
        make_config(tiny_llama, PAIR), "decode", accelerator_type="H100", gpus_per_worker=1.0
    )
    start = starts(config)
    assert start.process.wait(FAIL_S) == 1
    assert "pool decode: no node has H100" in start.text()
    start.assert_nothing_left()


@on_ray_marks
def test_a_worker_that_never_comes_up_ends_the_start(starts, tiny_llama):
    """It hangs while it loads: it neither fails nor registers. The other one is up meanwhile."""
    start = starts(make_config(tiny_llama, PAIR))
    start.wait_for(worker_pid)
    os.kill(worker_pid(start), signal.SIGSTOP)
    assert start.process.wait(FAIL_S + 20) == 1
    assert time.monotonic() - start.began < FAIL_S
    assert "pool decode: 0 of 1 workers registered" in start.text()
    start.assert_nothing_left()


@on_ray_marks
def test_a_pool_that_comes_up_in_part_ends_the_start(starts, tiny_llama):
    """One of two is killed while it loads: Serve alone would try again, for ever."""
    start = starts(make_config(tiny_llama, {**PAIR, "decode": (Role.DECODE, 2)}))
    start.control = f"127.0.0.1:{start.config.endpoints.control_port}"
    start.wait_for(lambda start: "decode-1" in holders(start.state.cores_dir))
    pid = holders(start.state.cores_dir)["decode-1"].pid
    os.kill(pid, signal.SIGSTOP)
    start.wait_for(lambda start: num_reports(start, "decode-0") >= 3)
    os.kill(pid, signal.SIGKILL)
    assert start.process.wait(FAIL_S) == 1
    assert time.monotonic() - start.began < FAIL_S
    assert "decode failed to start: its process was killed" in start.text()
    start.assert_nothing_left()


def num_reports(start, worker_id: str) -> int:
    """How often a worker has reported, which is each second: Serve knows by then that it is up."""
    try:
        view = view_of(start)
    except NoWorker:
        return 0
    ages = start.__dict__.setdefault("ages", [])
    ages += [w.report_age_s for w in view.workers if w.worker.worker_id == worker_id]
    return sum(later < earlier for earlier, later in itertools.pairwise(ages))


# ---- beside one another


def test_two_clusters_on_one_host_do_not_meet(make_cluster, tiny_llama, tmp_path, prompts):
    """Both serve, and neither's workers let the other's in; and where one takes the address of the
    other's control plane, nobody follows."""
    clusters = []
    for name in ("one", "two"):
        token = tmp_path / f"{name}.token"
        token.write_text(name * 8)
        config = make_config(tiny_llama, PAIR)
        security = dataclasses.replace(config.security, cluster_token_file=str(token))
        clusters.append(make_cluster(dataclasses.replace(config, security=security)))
    for cluster in clusters:
        for name in (CONTROL, "router-0", *cluster.pools):
            cluster.start_one(name)
    for cluster in clusters:
        for name in cluster.processes:
            cluster.wait_ready(name)
        cluster.wait_served()
        serve_one(cluster, prompts)
    one, two = clusters
    check_refuses_strangers(one, two)
    serve_one(one, prompts, 1)
    one.kill(CONTROL)
    two.kill(CONTROL)
    moved = dataclasses.replace(two.config, endpoints=dataclasses.replace(
        two.config.endpoints, control_port=one.config.endpoints.control_port))  # fmt: skip
    impostor = make_cluster(moved)
    impostor.restart(CONTROL)
    impostor.restart("decode-0")
    for name in ("prefill-0", "decode-0", "router-0"):
        wait_until(
            lambda name=name: "token is missing or wrong" in one.log(name),
            30,
            f"{name} was not refused",
        )
    view = view_with_token(impostor)
    assert {w.worker.pid for w in view.workers} == {impostor.pid("decode-0")}
    assert view.num_routers == 0
    impostor.kill(CONTROL)
    one.restart(CONTROL)
    one.wait_served()
    serve_one(one, prompts, 1)


def check_refuses_strangers(cluster: ProcessCluster, other: ProcessCluster) -> None:
    """S-16: a worker's port for legs and links, by the token alone: no certificate is asked for."""
    own, foreign = (ClusterToken.load(each.config.security).metadata for each in (cluster, other))
    shown = [(), foreign, own + foreign, ((own[0][0], own[0][1] + "x"),)]
    services = (worker_pb2.DESCRIPTOR, faults_pb2.DESCRIPTOR)
    methods = [
        f"/{service.full_name}/{method.name}"
        for file in services
        for service in file.services_by_name.values()
        for method in service.methods
    ]
    assert len(methods) == 5
    for name in cluster.pools:
        port = cluster.ports[name]
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method in methods:
                told = {code_of(channel, method, metadata) for metadata in shown}
                assert told == {grpc.StatusCode.UNAUTHENTICATED}, (name, method, told)
            assert code_of(channel, methods[0], own) is grpc.StatusCode.FAILED_PRECONDITION
        # A scanner, which speaks no HTTP/2.
        with socket.create_connection(("127.0.0.1", port), timeout=10) as scanner:
            scanner.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
            scanner.shutdown(socket.SHUT_WR)
            said = b"".join(iter(lambda scanner=scanner: scanner.recv(4096), b""))
        assert b"200" not in said
        assert b"pdserve" not in said


def code_of(channel: grpc.Channel, method: str, metadata) -> grpc.StatusCode:
    """How a call ends that says nothing and shows this."""
    call = channel.stream_stream(method)(iter(()), metadata=metadata, timeout=10)
    with pytest.raises(grpc.RpcError):
        next(call)
    return call.code()


def view_with_token(cluster: ProcessCluster):
    token = ClusterToken.load(cluster.config.security)
    return asyncio.run(get_cluster(cluster.control, timeout_s=5.0, token=token))
