"""Pools that grow and shrink with the load: real Serve, on nodes of three kinds of hardware, which
Ray's autoscaler starts when a worker asks for one, and ends when none is on it any more.
"""

import dataclasses
import time

import psutil
import pytest

from cluster.config import FaultsConfig, Role, ScalingConfig
from deploy.run_state import RunState
from tests.e2e.node_kinds import KIND
from tests.e2e.plain_cluster import make_config, wait_until, with_pool
from tests.e2e.ray_nodes import ray_nodes
from tests.e2e.scaled import PATIENCE_S, Pools
from tests.e2e.serve_watch import serve_watch
from tests.e2e.streams import Prompts
from tests.e2e.test_hardware_pools import Deployed
from tests.e2e.yardstick import forgiven_s

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]


def node_kind(accelerator, num_gpus, fewest, most):
    resources = {f"accelerator_type:{accelerator}": 1, "GPU": num_gpus}
    return {"resources": resources, "min_workers": fewest, "max_workers": most}


NODES = {
    "h100": node_kind("H100", 3, 1, 1),
    "l40s": node_kind("L40S", 1, 1, 2),
    "h200": node_kind("H200", 1, 0, 1),
}
"""Those that pools have at their floor are there from the start."""
NODES_AT_FLOOR = {"H100": 1, "L40S": 1}
H100, L40S, H200 = (
    {"accelerator_type": kind, "gpus_per_worker": 1.0} for kind in ("H100", "L40S", "H200")
)
SLOTS, TPOT_S = 4, 0.45
POOLS = {
    "prefill": (Role.PREFILL, {**H100, "min": 1, "max": 2, "cost_per_hour": 3.0}),
    # KV for 4 sequences of 640 tokens.
    "cheap": (Role.DECODE, {**L40S, "min": 1, "max": 2, "cost_per_hour": 1.0, "kv_tokens": 2560}),
    "dear": (Role.DECODE, {**H200, "min": 0, "max": 1, "cost_per_hour": 3.0}),
    # For either half it is what costs the most.
    "mixed": (Role.MIXED, {**H100, "min": 0, "max": 1, "cost_per_hour": 10.0}),
}
QUIET_S = 5.0
DRAIN_S = 5.0
FLOOR = {name: options["min"] for name, (_, options) in POOLS.items()}
FULL = 0.8
"""The share of its capacity from which on a role is short."""


@pytest.fixture(scope="module")
def deployed(tiny_llama, tmp_path_factory):
    roles = {name: (role, 1) for name, (role, _) in POOLS.items()}
    config = make_config(tiny_llama, roles, max_num_seqs=SLOTS)
    for name, (_, options) in POOLS.items():
        config = with_pool(config, name, **options)
    config = dataclasses.replace(
        config,
        limits=dataclasses.replace(config.limits, drain_s=DRAIN_S),
        faults=FaultsConfig(enabled=True),
        scaling=ScalingConfig(ttft_target_s=2.0, tpot_target_s=TPOT_S, quiet_s=QUIET_S),
    )
    with ray_nodes((), autoscaled=NODES) as nodes:
        cluster = Deployed(config, nodes, tmp_path_factory.mktemp("scaled"))
        done = cluster.command("deploy", "--wait-ready", "150")
        assert done.returncode == 0, done.stdout + done.stderr + nodes.serve_log()
        try:
            with serve_watch(nodes.address) as watch:
                yield Pools(cluster, watch, FLOOR, forgiven_s())
        finally:
            gone = cluster.command("down", timeout_s=90)
            RunState(config.endpoints.control_port).clear(10)
            assert "taken away" in gone.stdout, gone.stderr


@pytest.fixture
def pools(deployed):
    """At the floor, and there again after the test; in between no pool has turned but once."""
    deployed.begin()
    yield deployed
    deployed.unslow()
    # Short streams show what workers do now: what they showed of KV and steps is soon forgotten.
    with deployed.streams(num_prompt_tokens=20, max_tokens=50) as short:
        short.add(1)
        deployed.wait_floor()
    for name, low in FLOOR.items():
        course = deployed.course(name)
        peak = course.index(max(course))
        rise, fall = course[: peak + 1], course[peak:]
        assert (rise, fall) == (sorted(rise), sorted(fall, reverse=True)), f"{name}: {course}"
        assert course[-1] == low


def test_prompts_that_wait_raise_prefill_and_then_a_mixed_pool(pools):
    """Issue 6, point 5: 9 prompts want to be computed at 5.5 a second and worker. The mixed pool,
    dearer than the other, comes for them, and from then on is counted as decoding too."""
    pools.slow("prefill", seconds_per_token=0.0006)
    with (
        pools.streams(num_prompt_tokens=300, max_tokens=2) as prompts,
        pools.streams(num_prompt_tokens=20, max_tokens=900) as sequences,
    ):
        # That they hardly decode is known: otherwise so many would be a load for decoding too.
        prompts.add(1)
        wait_until(lambda: prompts.num_ended >= 10, PATIENCE_S, "they do not end", pace_s=0.1)
        prompts.leave(1)
        assert pools.wait_grown("prefill", 2, burst_at=prompts.add(9)).half == "prefill"
        ready_at = time.monotonic()
        pools.slow("prefill", seconds_per_token=0.0006)
        # That the second one is not enough shows when it is there.
        assert pools.wait_grown("mixed", 1, burst_at=ready_at).half == "prefill"
        assert pools.targets == {**FLOOR, "prefill": 2, "mixed": 1}, "decode had room"
        prompts.leave(9)
        pools.slow("cheap", seconds=0.1)
        pools.slow("mixed", seconds=0.05)
        sequences.add(5)  # more than FULL of one worker's slots
        pools.wait_target("prefill", 1)
        pools.wait_running(5, "cheap", "mixed")
        assert pools.targets == {**FLOOR, "mixed": 1}, "it stays for those, and is room enough"
        growth = pools.wait_grown("cheap", 2, burst_at=sequences.add(2))
        assert "cheap 1 x 4 by slots, mixed 1 x 4 by slots" in growth.text
        assert growth.asked > FULL * 2 * SLOTS


def test_full_slots_raise_the_cheaper_decode_pool_then_the_dearer_one(pools):
    """Issue 6, point 5: each on its own hardware, which was not there before; the dearer one comes
    from none, goes first, and its node with it."""
    wait_nodes(pools, NODES_AT_FLOOR)
    pools.slow("cheap", seconds=0.1)
    with pools.streams(num_prompt_tokens=20, max_tokens=900) as streams:
        growth = pools.wait_grown("cheap", 2, burst_at=streams.add(5))
        assert "cheap 1 x 4 by slots" in growth.text
        assert pools.targets == {**FLOOR, "cheap": 2}
        assert kinds_of_nodes(pools, "cheap") == ["l40s", "l40s"]
        assert pools.nodes == {"H100": 1, "L40S": 2}
        pools.slow("cheap", seconds=0.1)
        pools.wait_running(5, "cheap")
        growth = pools.wait_grown("dear", 1, burst_at=streams.add(4))
        assert "cheap 2 x 4 by slots" in growth.text
        assert kinds_of_nodes(pools, "dear") == ["h200"]
        pools.slow("dear", seconds=0.1)
        streams.leave(5)
        pools.wait_target("dear", 0)
        assert pools.targets == {**FLOOR, "cheap": 2}, "4 are no load for one of them alone"
        quiet_at = time.monotonic()
    assert pools.wait_floor(quiet_at) > 0.8 * QUIET_S, "sooner than the load was quiet for so long"
    assert pools.course("prefill") == [1], "nobody waited for prefill"
    wait_nodes(pools, NODES_AT_FLOOR)


def test_a_pool_that_shrinks_hands_its_streams_over(pools, tiny_llama):
    """CASES P-27: scale in: Serve ends a worker whose stream outlasts the grace; none is cut."""
    prompts = Prompts(tiny_llama, 6, num_prompt=20, num_tokens=900)
    pools.slow("cheap", seconds=0.1)
    streams = [prompts.stream(pools.cluster.grpc, number, deadline_s=240) for number in range(4)]
    pools.wait_running(4, "cheap")  # so the others are on another worker
    burst_at = time.monotonic()
    streams += [prompts.stream(pools.cluster.grpc, number, deadline_s=240) for number in (4, 5)]
    pools.wait_grown("cheap", 2, burst_at)
    pools.slow("cheap", seconds=0.1)
    pools.wait_running(6, "cheap")
    for number in (1, 2, 3, 5):
        streams[number].leave()
    kept = {number: streams[number] for number in (0, 4)}
    wait_until(
        lambda: [view.report.num_running for view in pools.workers("cheap")] == [1, 1], PATIENCE_S,
        "not one stream on each",
    )  # fmt: skip
    pools.wait_target("cheap", 1)
    wait_until(
        lambda: any(view.report.is_draining for view in pools.workers("cheap")), PATIENCE_S,
        "nobody drains",
    )  # fmt: skip
    assert all(stream.is_alive() for stream in kept.values()), "they were too short for this"
    wait_until(lambda: len(pools.workers("cheap")) == 1, DRAIN_S + 15, "it did not leave")
    pools.unslow()
    for number, stream in kept.items():
        stream.wait_end(60)
        prompts.check(number, stream)
    assert sum(stream.timeline.num_resumed for stream in kept.values()) == 1


def test_full_blocks_raise_decode_though_slots_are_free(pools):
    """Issue 6, point 5: two sequences of 1000 tokens fill a worker's blocks, and a third waits."""
    pools.slow("cheap", seconds=0.1)
    with pools.streams(num_prompt_tokens=900, max_tokens=100) as streams:
        growth = pools.wait_grown("cheap", 2, burst_at=streams.add(3))
        assert "by KV" in growth.text
        assert growth.could < SLOTS
        assert growth.asked < FULL * SLOTS, "slots would not have asked for it"


def test_steps_longer_than_the_target_raise_decode_though_slots_are_free(pools):
    """Issue 6, point 5: each sequence adds 0.15 s to a step that may take 0.45 s, which nobody
    knows before there are some."""
    pools.slow("cheap", seconds_per_token=0.15)
    with pools.streams(num_prompt_tokens=20, max_tokens=900) as streams:
        growth = pools.wait_grown("cheap", 2, burst_at=streams.add(3))
        assert "by steps of 450 ms" in growth.text
        assert growth.could < SLOTS
        assert growth.asked < FULL * SLOTS, "slots would not have asked for it"
        assert longest_step_s(pools, 3) > TPOT_S


def longest_step_s(pools, num_sequences):
    """Of so many sequences, as the slowest worker has shown."""
    shown = [view.report for view in pools.workers("cheap")]
    return max(each.step_base_s + num_sequences * each.step_per_seq_s for each in shown)


def kinds_of_nodes(pools, pool):
    """What the raylets were started as that a pool's workers are children of, each another one."""
    raylets = {psutil.Process(view.worker.pid).parent() for view in pools.workers(pool)}
    return [raylet.environ()[KIND] for raylet in raylets]


def wait_nodes(pools, nodes):
    """Wait until there are so many by their accelerator: idle ones go."""
    wait_until(lambda: pools.nodes == nodes, PATIENCE_S, "idle nodes are still there")
