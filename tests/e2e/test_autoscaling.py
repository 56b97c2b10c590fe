"""Pools that grow and shrink with the load: real Serve, on nodes of two kinds of hardware."""

import dataclasses

import psutil
import pytest

from cluster.config import FaultsConfig, Role, ScalingConfig
from deploy.run_state import RunState
from tests.e2e.plain_cluster import make_config, wait_until, with_pool
from tests.e2e.ray_nodes import ray_nodes
from tests.e2e.scaled import Pools
from tests.e2e.serve_watch import serve_watch
from tests.e2e.streams import Prompts
from tests.e2e.test_hardware_pools import Deployed

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(420)]

NODES = (
    {"num_gpus": 4, "resources": {"accelerator_type:H100": 1}},
    {"num_gpus": 1, "resources": {"accelerator_type:L40S": 1}},
    {"num_gpus": 1, "resources": {"accelerator_type:L40S": 1}},
)
H100, L40S = ({"accelerator_type": kind, "gpus_per_worker": 1.0} for kind in ("H100", "L40S"))
SLOTS, TPOT_S = 4, 0.3
POOLS = {
    "prefill": (Role.PREFILL, {**H100, "min": 1, "max": 2, "cost_per_hour": 3.0}),
    # KV for 4 sequences of 640 tokens.
    "cheap": (Role.DECODE, {**L40S, "min": 1, "max": 2, "cost_per_hour": 1.0, "kv_tokens": 2560}),
    "dear": (Role.DECODE, {**H100, "min": 0, "max": 1, "cost_per_hour": 3.0}),
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
    with ray_nodes(NODES) as nodes:
        cluster = Deployed(config, nodes, tmp_path_factory.mktemp("scaled"))
        done = cluster.command("deploy", "--wait-ready", "150")
        assert done.returncode == 0, done.stdout + done.stderr
        try:
            with serve_watch(nodes.address) as watch:
                yield Pools(cluster, watch, FLOOR)
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
    """Issue 6, point 5: 16 prompts want to be computed at 5.5 a second and worker. The mixed pool,
    dearer than the other, comes for them, and from then on is counted as decoding too."""
    pools.slow("prefill", seconds_per_token=0.0006)
    with (
        pools.streams(num_prompt_tokens=300, max_tokens=2) as prompts,
        pools.streams(num_prompt_tokens=20, max_tokens=900) as sequences,
    ):
        prompts.add(16)
        assert pools.wait_grown("prefill", 2).half == "prefill"
        pools.slow("prefill", seconds_per_token=0.0006)
        assert pools.wait_grown("mixed", 1).half == "prefill"
        assert pools.targets == {**FLOOR, "prefill": 2, "mixed": 1}, "decode had room"
        prompts.leave(16)
        pools.slow("cheap", seconds=0.1)
        pools.slow("mixed", seconds=0.05)
        sequences.add(5)  # more than FULL of one worker's slots
        pools.wait_target("prefill", 1, 60)
        pools.wait_running(5, "cheap", "mixed")
        assert pools.targets == {**FLOOR, "mixed": 1}, "it stays for those, and is room enough"
        sequences.add(2)
        growth = pools.wait_raised("cheap", 2)
        assert "cheap 1 x 4 by slots, mixed 1 x 4 by slots" in growth.text
        assert growth.asked > FULL * 2 * SLOTS


def test_full_slots_raise_the_cheaper_decode_pool_then_the_dearer_one(pools):
    """Issue 6, point 5: each on its own hardware, the dearer one from none; and it goes first."""
    pools.slow("cheap", seconds=0.1)
    with pools.streams(num_prompt_tokens=20, max_tokens=900) as streams:
        streams.add(5)
        assert "cheap 1 x 4 by slots" in pools.wait_grown("cheap", 2).text
        assert pools.targets == {**FLOOR, "cheap": 2}
        pools.slow("cheap", seconds=0.1)
        at = [psutil.Process(view.worker.pid).ppid() for view in pools.workers("cheap")]
        assert sorted(at) == sorted(pools.cluster.nodes.raylet_pids[1:]), "one on each L40S"
        pools.wait_running(5, "cheap")
        streams.add(4)
        assert "cheap 2 x 4 by slots" in pools.wait_grown("dear", 1).text
        pools.slow("dear", seconds=0.1)
        streams.leave(5)
        pools.wait_target("dear", 0, 60)
        assert pools.targets == {**FLOOR, "cheap": 2}, "4 are no load for one of them alone"
    assert pools.wait_floor() > 0.8 * QUIET_S, "sooner than the load was quiet for so long"
    assert pools.course("prefill") == [1], "nobody waited for prefill"


def test_a_pool_that_shrinks_hands_its_streams_over(pools, tiny_llama):
    """CASES P-27: scale in: Serve ends a worker whose stream outlasts the grace; none is cut."""
    prompts = Prompts(tiny_llama, 6, num_prompt=20, num_tokens=900)
    pools.slow("cheap", seconds=0.1)
    streams = [prompts.stream(pools.cluster.grpc, number, deadline_s=240) for number in range(4)]
    pools.wait_running(4, "cheap")  # so the others are on another worker
    streams += [prompts.stream(pools.cluster.grpc, number, deadline_s=240) for number in (4, 5)]
    pools.wait_grown("cheap", 2)
    pools.slow("cheap", seconds=0.1)
    pools.wait_running(6, "cheap")
    for number in (1, 2, 3, 5):
        streams[number].leave()
    kept = {number: streams[number] for number in (0, 4)}
    wait_until(
        lambda: [view.report.num_running for view in pools.workers("cheap")] == [1, 1], 10,
        "not one stream on each",
    )  # fmt: skip
    pools.wait_target("cheap", 1, 60)
    wait_until(
        lambda: any(view.report.is_draining for view in pools.workers("cheap")), 20,
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
        streams.add(3)
        pools.wait_running(2, "cheap")
        growth = pools.wait_raised("cheap", 2)
        assert "by KV" in growth.text
        assert growth.could < SLOTS
        assert growth.asked < FULL * SLOTS, "slots would not have asked for it"


def test_steps_longer_than_the_target_raise_decode_though_slots_are_free(pools):
    """Issue 6, point 5: each sequence adds 0.2 s to a step that may take 0.3 s. The worker takes
    its last 50 steps, or those of 3 s, for what it is, so that is seen later than a burst."""
    pools.slow("cheap", seconds_per_token=0.2)
    with pools.streams(num_prompt_tokens=20, max_tokens=900) as streams:
        streams.add(3)
        pools.wait_running(3, "cheap")
        growth = pools.wait_raised("cheap", 2, timeout_s=60)
        assert "by steps of 300 ms" in growth.text
        assert growth.could < SLOTS
        assert growth.asked < FULL * SLOTS, "slots would not have asked for it"
        wait_until(lambda: longest_step_s(pools, 3) > TPOT_S, 30, "the worker shows shorter ones")


def longest_step_s(pools, num_sequences):
    """Of so many sequences, as the slowest worker has shown."""
    shown = [view.report for view in pools.workers("cheap")]
    return max(each.step_base_s + num_sequences * each.step_per_seq_s for each in shown)
