"""A node is lost: what was in flight there goes on elsewhere, and its pool is whole again."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time

import psutil
import pytest

from cluster.config import FaultsConfig, Role
from cluster.control.facts import Health
from deploy.processes import look_up
from deploy.run_state import RunState
from tests.e2e.plain_cluster import is_quiet, make_config, view_of, wait_until
from tests.e2e.process_cluster import Faults, fault
from tests.e2e.ray_nodes import ray_nodes
from tests.e2e.streams import Prompts
from tests.e2e.test_hardware_pools import Deployed
from tests.e2e.yardstick import forgiven_s

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(420)]
WHOLE_S = 30.0
NUM_STREAMS = 12
NUM_PROMPT, NUM_TOKENS = 480, 160
STEP_S = 0.05
"""So long a step takes where the fault happens: it finds prompts and streams in their midst."""
PREFILL_NODE, DECODE_NODE = {"labels": {"prefill": "1"}}, {"labels": {"decode": "1"}}
SPARE = {"labels": {"prefill": "1", "decode": "1"}}
NODES = (PREFILL_NODE, PREFILL_NODE, DECODE_NODE, DECODE_NODE, SPARE, SPARE, SPARE)
POOLS = {"prefill": (Role.PREFILL, 2), "decode": (Role.DECODE, 2)}


@pytest.fixture(scope="module")
def prompts(tiny_llama):
    return Prompts(tiny_llama, NUM_STREAMS, num_prompt=NUM_PROMPT, num_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def deployed(tiny_llama, tmp_path_factory):
    """Two workers of each role, each with a node of its own, and three nodes to spare."""
    config = make_config(
        tiny_llama, POOLS, chunk_tokens=16, cpus_per_worker=1.0, prefix_cache=False
    )
    pools = tuple(dataclasses.replace(pool, node_labels={pool.name: "1"}) for pool in config.pools)
    config = dataclasses.replace(config, pools=pools, faults=FaultsConfig(enabled=True))
    with ray_nodes(NODES) as nodes:
        cluster = Deployed(config, nodes, tmp_path_factory.mktemp("lost"))
        done = cluster.command("deploy", "--wait-ready", "150")
        assert done.returncode == 0, done.stdout + done.stderr
        try:
            yield cluster
        finally:
            cluster.command("down", timeout_s=90)
            RunState(config.endpoints.control_port).clear(10)


@pytest.fixture(scope="module")
def whole_s(deployed) -> float:
    """Within which a pool has to be whole again on this machine."""
    return WHOLE_S + forgiven_s()


def alive(cluster, role: Role):
    return [
        view
        for view in view_of(cluster).workers
        if view.worker.role is role and view.health is Health.ALIVE
    ]


def lose_node_of(victim, run: RunState, how: signal.Signals) -> list[psutil.Process]:
    """Do it to a worker's node, its raylet and all that it has started; returns them.

    Killed, its peers see it at once. Stopped, it says nothing more, as a machine does that is cut
    off or without power: all connections stay open.
    """
    raylet = psutil.Process(victim.pid).parent()
    assert raylet.name() == "raylet"
    processes = [raylet, *raylet.children(recursive=True)]
    for process in processes:
        process.send_signal(how)
    if how is signal.SIGSTOP:
        # Its place is one of this machine: those of another node are that node's own.
        (run.cores_dir / f"{victim.worker_id}.lock").unlink()
    wait_until(
        lambda: all(is_over(process, how) for process in processes), 10, "the fault did not happen"
    )
    return processes


def is_over(process: psutil.Process, how: signal.Signals) -> bool:
    if how is signal.SIGSTOP:
        return process.status() == psutil.STATUS_STOPPED
    # A raylet stays a zombie: whoever started it does not look after it.
    return look_up(process.pid) is None


def slow_down(views) -> dict[int, Faults]:
    """Slow workers down, until their switches, by their pid, are cleared."""
    switches = {view.worker.pid: Faults(view.worker.address) for view in views}
    for switch in switches.values():
        switch.set(fault("delay", "engine.step", times=0, seconds=STEP_S))
    return switches


def check_moved(role: Role, streams) -> None:
    """Those that the node had were taken up elsewhere, and those of the other worker were not.

    A prompt is computed again; a stream goes on from the token that it had come to.
    """
    moved = [stream for stream in streams if stream.timeline.num_attempts > 1]
    assert moved, "the lost worker had nothing in flight"
    assert len(moved) < len(streams), "others were disturbed too"
    if role is Role.DECODE:
        assert any(stream.timeline.num_resumed for stream in moved), "no stream was resumed"


@pytest.mark.parametrize(
    ("role", "how"),
    [
        (Role.DECODE, signal.SIGSTOP),
        (Role.DECODE, signal.SIGKILL),
        (Role.PREFILL, signal.SIGKILL),
    ],
)
def test_a_lost_node_costs_nobody_a_token(role, how, deployed, prompts, whole_s):
    """P-20: none of those in flight there fails, no other is touched, and all is whole in 30 s."""
    before = alive(deployed, role)
    assert len(before) == 2
    slow = slow_down(before)
    streams = [prompts.stream(deployed.grpc, n, deadline_s=90) for n in range(NUM_STREAMS)]
    busy = []

    def is_at_work() -> bool:
        busy[:] = [view for view in alive(deployed, role) if view.report.num_running]
        return len(busy) == 2

    wait_until(is_at_work, 30, "not both of them are at work")
    victim = busy[0].worker
    others = {view.worker.pid for view in view_of(deployed).workers} - {victim.pid}
    lost_at = time.monotonic()
    lost = lose_node_of(victim, RunState(deployed.config.endpoints.control_port), how)
    slow.pop(victim.pid).close()

    def is_whole() -> bool:
        pids = {view.worker.pid for view in alive(deployed, role)}
        return len(pids) == 2 and victim.pid not in pids

    try:
        # Each look takes time of the cores that the new worker needs to start.
        left_s = lost_at + whole_s - time.monotonic()
        wait_until(is_whole, left_s, "the pool is not whole", pace_s=0.5)
    except AssertionError as error:
        error.add_note(deployed.nodes.serve_log())
        raise
    finally:
        for process in lost:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    for number, stream in enumerate(streams):
        stream.wait_end(100)
        prompts.check(number, stream)
    check_moved(role, streams)
    assert others < {view.worker.pid for view in view_of(deployed).workers}, "others died too"
    wait_until(lambda: is_quiet(deployed), 20, "blocks are leaked")
    for switch in slow.values():
        switch.clear()
        switch.close()
    fresh = prompts.stream(deployed.grpc, 0)
    fresh.wait_end()
    prompts.check(0, fresh)
