"""Greedy fp32 output equals transformers', however it is served (CASES P-13)."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from cluster.config import Role
from deploy.client import Client
from tests.e2e import reference
from tests.e2e.plain_cluster import make_config, plain_cluster, running
from tests.factories_model import VOCAB_SIZE

NUM_TOKENS = 32
CONTEXT = 512
SHAPES = {
    "colocated": {"mixed": (Role.MIXED, 1)},
    "1P1D": {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)},
    "2P2D": {"prefill": (Role.PREFILL, 2), "decode": (Role.DECODE, 2)},
}
COLD = "2P2D"
"""Computes every prompt in every pass; the others find it in their caches after the first."""
ALL_TOKENS = 16384
"""KV for all prompts and outputs: with less, what comes again would just have been evicted."""


@pytest.fixture(scope="module")
def prompts():
    return reference.border_prompts(VOCAB_SIZE)


@pytest.fixture(scope="module")
def expected(tiny_llama, prompts):
    return reference.greedy(tiny_llama, prompts, NUM_TOKENS)


def generate(client: Client, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    pieces = client.generate(
        prompt_ids={"ids": prompt}, max_tokens=num_tokens, temperature=0.0, ignore_eos=True
    )
    return [token for piece in pieces for token in piece.token_ids]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.timeout(300)
def test_tokens_equal_transformers(shape, tiny_llama, prompts, expected, tmp_path):
    """CASES P-13, P-17: three passes in the same processes, at concurrency 1 and 8."""
    assert len(prompts) == 50
    with (
        plain_cluster(
            tiny_llama, tmp_path, SHAPES[shape], kv_tokens=ALL_TOKENS, prefix_cache=shape != COLD
        ) as cluster,
        Client(cluster.grpc) as client,
    ):
        for _ in range(3):
            for concurrency in (1, 8):
                with ThreadPoolExecutor(concurrency) as pool:
                    outputs = list(pool.map(lambda prompt: generate(client, prompt), prompts))
                wrong, ties = expected.disagreements(outputs)
                assert not wrong
                assert ties <= len(prompts) * 0.01
        view = cluster.view()
    _assert_who_computed(view, prompts, shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "chunk", "concurrencies"),
    [
        ("colocated", 8, (32, 1, 32)),
        ("1P1D", 8, (32, 32)),
        ("1P1D", 16, (32, 1, 32)),
        ("1P1D", 64, (32, 32)),
        ("2P2D", 64, (32, 1, 32)),
    ],
)
@pytest.mark.timeout(600)
def test_the_last_pass_equals_the_first(shape, chunk, concurrencies, tiny_llama, many, tmp_path):
    """CASES P-13: 200 prompts up to the context's end, in chunks, a pair in those of each size."""
    prompts, expected = many
    config = make_config(
        tiny_llama, SHAPES[shape], kv_tokens=ALL_TOKENS, chunk_tokens=chunk, prefix_cache=False
    )
    config = replace(config, model=replace(config.model, max_model_len=CONTEXT))
    with running(config, tiny_llama, tmp_path) as cluster, Client(cluster.grpc) as client:
        passes = []
        for concurrency in concurrencies:
            with ThreadPoolExecutor(concurrency) as pool:
                asked = pool.map(lambda prompt: generate(client, prompt, room(prompt)), prompts)
                passes.append(list(asked))
            wrong, ties = expected.disagreements(passes[-1])
            assert not wrong
            assert ties <= len(prompts) * 0.01
        assert passes[0] == passes[-1]
        cluster.wait_quiet()


@pytest.fixture(scope="module")
def many(tiny_llama):
    """Prompts at every block border of a context of 512, with as many tokens as it leaves room."""
    lengths = {1, 2, CONTEXT - 2, *(16 * k + d for k in range(1, 32) for d in (-1, 0, 1))}
    dice = random.Random(13)
    twice = (sorted(lengths) * 3)[:200]
    prompts = [[dice.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in twice]
    whole = reference.greedy(tiny_llama, prompts, NUM_TOKENS)
    tokens = [tokens[: room(p)] for p, tokens in zip(prompts, whole.tokens, strict=True)]
    return prompts, reference.Reference(tokens, whole.gaps)


def room(prompt):
    return min(NUM_TOKENS, CONTEXT - len(prompt))


def _assert_who_computed(view, prompts, shape):
    """The decode side computed no prompt, and Gloo moved every block of every prompt."""
    num_passes = 6
    counters = {w.worker.worker_id: w.report.counters for w in view.workers}
    num_tokens = sum(len(prompt) for prompt in prompts) * num_passes
    prefilled, cached = (
        {w: each[name] for w, each in counters.items()}
        for name in ("prefilled_tokens", "cached_tokens")
    )
    assert sum(prefilled.values()) + sum(cached.values()) == num_tokens
    assert (sum(cached.values()) == 0) == (shape == COLD)
    if shape == "colocated":
        return
    assert not any(prefilled[w] or cached[w] for w in counters if "decode" in w)
    block_size = view.workers[0].worker.block_size
    block_bytes = block_size * 2 * 2 * 2 * 16 * 4  # K and V, layers, kv heads, head dim, fp32
    num_blocks = sum(-(-len(prompt) // block_size) for prompt in prompts) * num_passes
    assert sum(link.num_bytes for link in view.links) == num_blocks * block_bytes
