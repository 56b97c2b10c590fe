"""Decode workers that prefill by themselves, on real workers: the same tokens, told as such."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from cluster.config import FaultsConfig, LocalPrefill, Role
from tests.e2e.plain_cluster import make_config, running, wait_until
from tests.e2e.process_cluster import Faults, fault

pytestmark = pytest.mark.slow

PAIR = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
PROMPTS = [[11 + 37 * i + j * j % 89 for j in range(8 + 60 * i)] for i in range(4)]
SLOW_S = 0.005
"""For a token, on a prefill worker that takes long."""


def answers(cluster, prompts=PROMPTS):
    texts = []
    for prompt in prompts:
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
        metrics = metrics_with(cluster, "pdserve_control_grants_local_forced_total", len(PROMPTS))
        assert metrics.total("pdserve_link_transfers_total") == 0
        assert metrics.total("pdserve_worker_prefilled_tokens_total", role="prefill") == 0


def test_where_that_is_cheaper_a_short_prompt_stays_on_the_decode_worker(
    expected, tiny_llama, tmp_path
):
    """With a long prompt, which goes to a pair, the prefill worker shows how slow it is (V)."""
    # Many small steps: of one, only so much is believed.
    config = make_config(tiny_llama, PAIR, chunk_tokens=16)
    scheduling = replace(
        config.scheduling, local_prefill=LocalPrefill.AUTO, local_prefill_tokens=len(PROMPTS[2])
    )
    config = replace(config, scheduling=scheduling, faults=FaultsConfig(enabled=True))
    with running(config, tiny_llama, tmp_path) as cluster:
        switch = Faults(worker(cluster, "prefill-0").worker.address)
        switch.set(fault("delay", "engine.step", times=0, seconds_per_token=SLOW_S))
        [(long_text, long_reason)] = answers(cluster, PROMPTS[3:])
        assert switch.fired()[0] > 0
        switch.close()
        assert long_reason.startswith("pair: ")
        wait_until(
            lambda: worker(cluster, "prefill-0").report.prefill_per_token_s > SLOW_S / 4,
            10,
            "its speed is not known",
        )
        short = answers(cluster, PROMPTS[1:3])
        assert [text for text, _ in short] + [long_text] == expected[1:]
        assert all(reason.startswith("local, short: ") for _, reason in short), short
        cluster.wait_quiet()
        metrics = metrics_with(cluster, "pdserve_control_grants_local_short_total", len(short))
        prefilled = metrics.total("pdserve_worker_prefilled_tokens_total", role="prefill")
        assert prefilled == len(PROMPTS[3])


def metrics_with(cluster, name, value):
    """Scrape the router once it has heard that a counter of the control plane is so high."""
    wait_until(lambda: cluster.metrics().total(name) >= value, 10, f"{name} is not {value}")
    metrics = cluster.metrics()
    assert metrics.total(name) == value
    return metrics


def worker(cluster, worker_id):
    return next(w for w in cluster.view().workers if w.worker.worker_id == worker_id)
