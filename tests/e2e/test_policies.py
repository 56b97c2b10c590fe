"""Every policy and kind of batching on real workers: the same tokens, and nothing is left."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from cluster.config import Batching, Policy, Preemption, Role, SchedulingConfig
from deploy.client import Client
from tests.e2e.plain_cluster import make_config, running, with_pool

PROMPTS = [[11 + 37 * i + j * j % 89 for j in range(8 + 9 * i)] for i in range(6)]
NUM_TOKENS = 24
OFF = {"preemption": Preemption.OFF}
PAIR = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
MIXED = {"mixed": (Role.MIXED, 1)}
SETTINGS = {
    "static": (PAIR, OFF, {"batching": Batching.STATIC, "batch_size": 2}),
    "dynamic": (MIXED, OFF, {"batching": Batching.DYNAMIC, "batch_size": 3}),
    "sjf, fair": (MIXED, {"policy": Policy.SJF, "fair_tenants": True}, {}),
    "tiers": (PAIR, {"policy": Policy.PRIORITY}, {"max_num_seqs": 2}),
}


def generate_all(cluster):
    def generate(index):
        tier = ("low", "normal", "high")[index % 3]
        with Client(cluster.grpc) as client:
            pieces = client.generate(
                prompt_ids={"ids": PROMPTS[index]}, max_tokens=NUM_TOKENS, ignore_eos=True,
                seed=index, temperature=0.9, priority=tier,
            )  # fmt: skip
            return [token for piece in pieces for token in piece.token_ids]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(generate, range(len(PROMPTS))))


@pytest.fixture(scope="module")
def expected(tiny_llama, tmp_path_factory):
    with running(make_config(tiny_llama, MIXED), tiny_llama, tmp_path_factory.mktemp("m")) as own:
        return generate_all(own)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_policy_changes_no_token(name, expected, tiny_llama, tmp_path):
    """P-13, P-14, P-15: in fp32, whoever waits for whom, and whoever shares a step with whom."""
    pools, scheduling, options = SETTINGS[name]
    config = make_config(tiny_llama, pools)
    for pool in pools if options else ():
        config = with_pool(config, pool, **options)
    config = replace(config, scheduling=SchedulingConfig(**scheduling))
    with running(config, tiny_llama, tmp_path) as cluster:
        assert generate_all(cluster) == expected
        cluster.wait_quiet()
