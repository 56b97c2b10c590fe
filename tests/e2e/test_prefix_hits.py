"""Prompts that begin as earlier ones did: on the prefill worker, on the decode worker, on both."""

import random

import pytest

from cluster.config import Role
from deploy.client import Client
from tests.e2e import reference
from tests.e2e.plain_cluster import make_config, running, with_pool
from tests.factories_model import VOCAB_SIZE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
BLOCK = 16
NUM_TOKENS = 12
LENGTHS = [BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 9 * BLOCK]


@pytest.fixture(scope="module", params=["prefill only", "both"])
def cluster(request, tiny_llama, tmp_path_factory):
    """A pair; with "prefill only" its decode worker keeps nothing."""
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    config = make_config(tiny_llama, pools)
    if request.param == "prefill only":
        config = with_pool(config, "decode", prefix_cache=False)
    with running(config, tiny_llama, tmp_path_factory.mktemp("pair")) as cluster:
        yield cluster
        cluster.wait_quiet()


def make_prompt(length, seed):
    dice = random.Random(seed)
    return [dice.randrange(5, VOCAB_SIZE) for _ in range(length)]


def other(token):
    return 5 + (token - 4) % (VOCAB_SIZE - 5)


def ask(cluster, prompt, **options):
    """Ids and cached tokens of one greedy answer, checked against transformers' (rules W and N)."""
    options = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, **options}
    with Client(cluster.grpc) as client:
        pieces = list(client.generate(prompt_ids={"ids": prompt}, timeline=True, **options))
    ids = [token for piece in pieces for token in piece.token_ids]
    wrong, _ = reference.greedy(cluster.model, [prompt], NUM_TOKENS).disagreements([ids])
    assert not wrong
    timeline = next(p.timeline for p in reversed(pieces) if p.HasField("timeline"))
    cached = timeline.prefill.num_cached_tokens + timeline.decode.num_cached_tokens
    assert cached <= len(prompt) - 1
    return ids, cached, timeline


@pytest.mark.parametrize("length", LENGTHS)
def test_at_block_edges(cluster, length):
    """CASES P-17: k x BS and k x BS +- 1, three times; then one more token, or another one."""
    prompt = make_prompt(length, length)
    answers = [ask(cluster, prompt) for _ in range(3)]
    found = (length - 1) // BLOCK * BLOCK
    assert [cached for _, cached, _ in answers] == [0, found, found]
    assert answers[0][0] == answers[1][0] == answers[2][0]
    _, cached, _ = ask(cluster, [*prompt, 77])
    assert cached == length // BLOCK * BLOCK
    _, cached, _ = ask(cluster, [*prompt[:-1], other(prompt[-1])])
    assert cached == found
    _, cached, _ = ask(cluster, [other(prompt[0]), *prompt[1:]])
    assert cached == 0


def test_with_logprobs_and_echo(cluster):
    """CASES P-17, P-07: a prompt's own logprobs are computed, whatever is cached; the same ones."""
    prompt = make_prompt(3 * BLOCK, 99)
    options = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    with Client(cluster.grpc) as client:
        told = [
            client.generate_once(
                prompt_ids={"ids": prompt}, logprobs=2, echo=True, timeline=True, **options
            ).choices[0]
            for _ in range(2)
        ]
    assert [choice.timeline.prefill.num_cached_tokens for choice in told] == [0, 0]
    scores = [[entry.logprob for entry in choice.echo.logprobs[1:]] for choice in told]
    assert len(scores[0]) == len(prompt) - 1
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    _, cached, _ = ask(cluster, prompt)
    assert cached == 2 * BLOCK, "what it computed serves others"


def test_on_the_decode_worker_alone(tiny_llama, tmp_path):
    """CASES P-17: what a handoff brought is found when it prefills by itself."""
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    with running(make_config(tiny_llama, pools), tiny_llama, tmp_path) as cluster:
        prompts = [make_prompt(length, -length) for length in LENGTHS]
        first = [ask(cluster, prompt)[0] for prompt in prompts]
        cluster.wait_quiet()
        cluster.kill("prefill-0")
        for prompt, ids in zip(prompts, first, strict=True):
            again, cached, timeline = ask(cluster, prompt)
            assert again == ids
            assert cached == timeline.decode.num_cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
        cluster.wait_quiet()
