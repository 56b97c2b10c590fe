"""The API against real workers, disaggregated and colocated: the same answers at both doors."""

from __future__ import annotations

import httpx
import pytest

from cluster.config import Role
from deploy.client import Client
from tests.e2e.plain_cluster import plain_cluster
from tests.factories_model import EOS_ID, MAX_POSITIONS

LAYOUTS = {
    "disaggregated": {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)},
    "colocated": {"mixed": (Role.MIXED, 1)},
}
PROMPT = "The harbour master walked along the pier"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def clusters(tiny_llama, tmp_path_factory):
    """Both layouts, side by side."""
    folders = {name: tmp_path_factory.mktemp(name) for name in LAYOUTS}
    with (
        plain_cluster(tiny_llama, folders["disaggregated"], LAYOUTS["disaggregated"]) as pair,
        plain_cluster(tiny_llama, folders["colocated"], LAYOUTS["colocated"]) as single,
    ):
        yield {"disaggregated": pair, "colocated": single}


@pytest.fixture(params=LAYOUTS)
def cluster(request, clusters):
    cluster = clusters[request.param]
    canary = ask(cluster, prompt=PROMPT, max_tokens=8, **GREEDY)
    yield cluster
    assert ask(cluster, prompt=PROMPT, max_tokens=8, **GREEDY) == canary
    cluster.wait_quiet()


def ask(cluster, path: str = "completions", **body):
    """Ask over HTTP; the answer without what differs from call to call."""
    response = httpx.post(f"{cluster.http}/v1/{path}", json={"model": "tiny", **body}, timeout=60)
    assert response.status_code == 200, response.text
    answer = response.json()
    return {name: answer[name] for name in ("choices", "usage")}


def ask_grpc(cluster, **request):
    with Client(cluster.grpc) as client:
        return client.generate_once(**request)


def text_of(answer, index: int = 0) -> str:
    return answer["choices"][index]["text"]


def test_logprobs_are_those_of_one_worker(clusters):
    """P-07: within 1e-4, of the prompt, the first token and all others; cached or not."""
    for body in (
        {"prompt": PROMPT, "echo": True, "logprobs": 5, "max_tokens": 12, **GREEDY},
        {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 0, **GREEDY},
        {"prompt": PROMPT, "logprobs": 2, "max_tokens": 1, "top_k": 1, **GREEDY},
        {"prompt": PROMPT, "logprobs": 1, "max_tokens": 4, "logit_bias": {"5": -100}, **GREEDY},
    ):
        answers = {
            (name, number): ask(cluster, **body)
            for name, cluster in clusters.items()
            for number in range(2)
        }
        expected = answers["colocated", 0]
        for answer in answers.values():
            ours, theirs = answer["choices"][0]["logprobs"], expected["choices"][0]["logprobs"]
            assert ours["tokens"] == theirs["tokens"]
            assert ours["text_offset"] == theirs["text_offset"]
            for mine, yours in zip(ours["token_logprobs"], theirs["token_logprobs"], strict=True):
                assert (mine is None) is (yours is None)
                assert mine is None or mine == pytest.approx(yours, abs=1e-4)
            for mine, yours in zip(ours["top_logprobs"], theirs["top_logprobs"], strict=True):
                assert mine is yours is None or mine == pytest.approx(yours, abs=1e-4)
            assert len(ours["tokens"]) == sum(
                answer["usage"][name]
                for name in ("prompt_tokens", "completion_tokens")
                if name == "completion_tokens" or body.get("echo")
            )
            assert answer["usage"] == expected["usage"]
            rebuilt = bytes(byte for token in ours["bytes"] for byte in token)
            assert rebuilt.decode(errors="replace") == text_of(answer)


def test_a_chat_has_logprobs_through_both_doors(cluster):
    """P-07: as many best ones as asked for, the same over gRPC."""
    messages = [{"role": "user", "content": "What is the capital?"}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 20, "max_tokens": 6, **GREEDY}
    (choice,) = ask(cluster, "chat/completions", **body)["choices"]
    content = choice["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [20] * 6
    told = ask_grpc(
        cluster,
        messages=[("user", "What is the capital?")],
        top_logprobs=20,
        max_tokens=6,
        **GREEDY,
    )
    (mine,) = told.choices
    assert mine.text == choice["message"]["content"]
    assert [entry.logprob for entry in mine.logprobs] == pytest.approx(
        [token["logprob"] for token in content], abs=1e-4
    )


def test_the_context_is_filled_to_its_last_token(cluster):
    """P-01: L minus the prompt ends with exactly so many; one more is a 400; null is absent."""
    prompt = list(range(10, 20))
    room = MAX_POSITIONS - len(prompt)
    for max_tokens in (room, None):
        answer = ask(cluster, prompt=prompt, max_tokens=max_tokens, **GREEDY)
        assert answer["usage"]["completion_tokens"] == room
        assert answer["choices"][0]["finish_reason"] == "length"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": room + 1}
    refused = httpx.post(f"{cluster.http}/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_choices_differ_and_come_again(cluster):
    """P-04: n=2 gives two choices, and the same pair again, through either door."""
    body = {"prompt": PROMPT, "n": 2, "seed": 42, "temperature": 0.9, "max_tokens": 24}
    first, second = ask(cluster, ignore_eos=True, **body), ask(cluster, ignore_eos=True, **body)
    assert first == second
    assert text_of(first, 0) != text_of(first, 1)
    assert first["usage"]["completion_tokens"] == 48
    told = ask_grpc(cluster, ignore_eos=True, **body)
    assert [choice.text for choice in told.choices] == [text_of(first, 0), text_of(first, 1)]
    alone = ask(cluster, ignore_eos=True, **{**body, "n": 1})
    assert text_of(alone) == text_of(first, 0)
    several = ask(cluster, ignore_eos=True, **{**body, "prompt": [PROMPT, "One, two"]})
    assert [text_of(several, i) for i in (0, 1)] == [text_of(first, i) for i in (0, 1)]


@pytest.mark.parametrize("num_tokens", [1, 2, 8])
def test_usage_counts_what_was_generated(cluster, num_tokens):
    """P-08: both halves have the first token, and it counts once."""
    answer = ask(cluster, prompt=PROMPT, max_tokens=num_tokens, **GREEDY)
    assert answer["usage"]["completion_tokens"] == num_tokens
    assert answer["choices"][0]["finish_reason"] == "length"


def test_ends_at_the_first_token_and_not_before_min_tokens(cluster):
    """P-08: an EOS that bias makes sure of, at token 1, ignored, and kept away by min_tokens."""
    bias = {"prompt": PROMPT, "temperature": 0.0, "logit_bias": {str(EOS_ID): 100}}
    answer = ask(cluster, max_tokens=8, **bias)
    assert (answer["usage"]["completion_tokens"], text_of(answer)) == (1, "")
    assert answer["choices"][0]["finish_reason"] == "stop"
    answer = ask(cluster, max_tokens=8, ignore_eos=True, **bias)
    assert (answer["usage"]["completion_tokens"], text_of(answer)) == (8, "")
    assert answer["choices"][0]["finish_reason"] == "length"
    answer = ask(cluster, max_tokens=8, min_tokens=4, **bias)
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_stop_strings_amid_tokens_and_stop_ids(cluster):
    """P-05: from a real text, cut inside tokens; the ids that make the text stop it as well."""
    whole = ask(cluster, prompt=PROMPT, max_tokens=24, logprobs=0, **GREEDY)
    text, offsets = text_of(whole), whole["choices"][0]["logprobs"]["text_offset"]
    # Begins inside a token of several characters, or with one, and ends inside a later one.
    spans = [(offsets[i] + 1, offsets[i + 2] + 1) for i in range(3, 20)]
    stop = next(
        text[begin:end]
        for begin, end in spans
        if end - begin > 1 and "\ufffd" not in text[begin:end]
    )
    expected = text[: text.find(stop)]
    answer = ask(cluster, prompt=PROMPT, max_tokens=24, stop=[stop], **GREEDY)
    assert (text_of(answer), answer["choices"][0]["finish_reason"]) == (expected, "stop")
    told = ask_grpc(cluster, prompt=PROMPT, max_tokens=24, stop=[stop], **GREEDY)
    assert told.choices[0].text == expected
    ids = list(ask_grpc(cluster, prompt=PROMPT, max_tokens=24, **GREEDY).choices[0].token_ids)
    stopper = ids[5]
    answer = ask(cluster, prompt=PROMPT, max_tokens=24, stop_token_ids=[stopper], **GREEDY)
    assert answer["usage"]["completion_tokens"] == ids.index(stopper) + 1
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_sampling_values_at_their_edges(clusters):
    """P-03: a tiny temperature is greedy, each rule has its effect, alike on both layouts."""
    asks = {
        "greedy": {"temperature": 0.0},
        "tiny": {"temperature": 1e-45},
        "top_k 1": {"top_k": 1, "seed": 1},
        "min_p 1": {"min_p": 1.0, "seed": 2},
        "top_p tiny": {"top_p": 1e-9, "seed": 3},
        "penalties": {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        "repetition": {"temperature": 0.0, "repetition_penalty": 2.0},
        "bias": {"temperature": 0.0, "logit_bias": {"200": 100}},
        "sampled": {"temperature": 2.0, "seed": 4, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    }
    texts = {
        name: [
            text_of(ask(cluster, prompt=PROMPT, max_tokens=40, ignore_eos=True, **values))
            for cluster in clusters.values()
        ]
        for name, values in asks.items()
    }
    for name, (pair, single) in texts.items():
        assert pair == single, name
    greedy = texts["greedy"][0]
    for name in ("tiny", "top_k 1", "min_p 1", "top_p tiny"):
        assert texts[name][0] == greedy, name
    for name in ("penalties", "repetition", "bias", "sampled"):
        assert texts[name][0] != greedy, name
