"""Decode workers that prefill by themselves, on real workers: the same tokens, told as such."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from cluster.config import LocalPrefill, Role
from tests.e2e.plain_cluster import make_config, running

pytestmark = pytest.mark.slow

PAIR = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
PROMPTS = [[11 + 37 * i + j * j % 89 for j in range(8 + 60 * i)] for i in range(4)]


def answers(cluster):
    texts = []
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "timeline": True}
        answer = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=30).json()
        texts.append((answer["choices"][0]["text"], answer["pdserve"]["timeline"]["reason"]))
    return texts


@pytest.fixture(scope="module")
def expected(tiny_llama, tmp_path_factory):
    with running(make_config(tiny_llama, PAIR), tiny_llama, tmp_path_factory.mktemp("p")) as pairs:
        told = answers(pairs)
    assert all(reason.startswith("pair: ") for _, reason in told)
    return [text for text, _ in told]


def test_forced_on_no_kv_moves_and_no_token_changes(expected, tiny_llama, tmp_path):
    """The answer says why, a counter counts it, and the prefill worker computes nothing (V)."""
    config = make_config(tiny_llama, PAIR)
    scheduling = replace(config.scheduling, local_prefill=LocalPrefill.ALWAYS)
    with running(replace(config, scheduling=scheduling), tiny_llama, tmp_path) as cluster:
        told = answers(cluster)
        assert [text for text, _ in told] == expected
        assert all(reason.startswith("local prefill is set: ") for _, reason in told)
        cluster.wait_quiet()
        metrics = cluster.metrics()
        assert metrics.total("pdserve_control_grants_local_forced_total") == len(PROMPTS)
        assert metrics.total("pdserve_link_transfers_total") == 0
        assert metrics.total("pdserve_worker_prefilled_tokens_total", role="prefill") == 0
