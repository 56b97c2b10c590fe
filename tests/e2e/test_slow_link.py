"""One slow link between real workers: requests take the other one, until it is well again."""

from __future__ import annotations

import collections

import httpx
import pytest

from cluster.config import Role
from tests.e2e.plain_cluster import make_config, wait_until
from tests.e2e.process_cluster import fault, process_cluster
from tests.e2e.streams import Prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
NUM_PROMPT, NUM_TOKENS = 96, 4
DELAY_S = 0.15
NUM_LEARNING, NUM_COUNTED = 8, 24
FADES_S = 60.0
"""Within which what was measured of a link fades to the mean of its pools."""


def decode_worker_of(cluster, prompt: list[int]) -> str:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "timeline": True,
    }
    answer = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=30).json()
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS, answer
    return answer["pdserve"]["timeline"]["decode_worker"]


def test_traffic_moves_off_a_slow_link_and_comes_back(tiny_llama, tmp_path):
    """Measured pair cost: each message to one decode worker takes 150 ms, then none does."""
    prompts = Prompts(tiny_llama, 4, num_prompt=NUM_PROMPT, num_tokens=NUM_TOKENS).prompts
    config = make_config(tiny_llama, {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 2)})
    with process_cluster(config, tiny_llama, tmp_path) as cluster:

        def ask(number: int) -> str:
            return decode_worker_of(cluster, prompts[number % len(prompts)])

        # Whoever is preferred, were it by chance, gets the slow link.
        spread = collections.Counter(ask(number) for number in range(NUM_LEARNING))
        ((slow, _),) = spread.most_common(1)
        prefill = cluster.faults("prefill-0")
        prefill.set(fault("delay", "data.send", times=0, seconds=DELAY_S, peer=slow))
        for number in range(NUM_LEARNING):
            ask(number)
        assert prefill.fired()[0] > 0, "nobody met the slow link"
        counted = collections.Counter(ask(number) for number in range(NUM_COUNTED))
        assert counted[slow] <= NUM_COUNTED * 0.2, (slow, counted)

        prefill.clear()
        wait_until(lambda: ask(0) == slow, FADES_S + 20, "it is not tried again")
        cluster.wait_quiet()
