"""Values of sampling at their edges, and seeds, over the whole path."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.api.ask import WAYS

TEN = [11, 48, 85, 22, 59, 96, 33, 70, 107, 44]
LONG = [(5 + 37 * i) % 500 + 5 for i in range(50)]
"""Some whole blocks, which the prefix cache keeps."""
PENALTIES = ("presence_penalty", "frequency_penalty")
NUMBERS = ("temperature", "top_p", "min_p", *PENALTIES, "repetition_penalty")
NO_NUMBERS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b'"1"', b"true", b"[]")
OUTSIDE = {
    "temperature": (-0.1, 2.0001), "top_p": (0, -1, 1.0001), "min_p": (-0.1, 1.0001),
    "top_k": (-2,), "repetition_penalty": (0, -1, 2.01, 1e-45),
    **dict.fromkeys(PENALTIES, (-2.01, 2.01)),
}  # fmt: skip
SAME_AS_GREEDY = (
    {"temperature": 0}, {"temperature": -0.0}, {"temperature": 1e-45},
    {"temperature": 1e-6, "top_k": 10**9}, {"temperature": 0, "top_k": -1, "top_p": 1e-9},
    {"temperature": 2, "top_k": 1}, {"temperature": 1, "min_p": 1},
    {"temperature": 1, "top_p": 1e-9},
)  # fmt: skip


def test_values_at_their_edges_beside_a_neighbour(caller):
    """CASES P-03: bad ones are a 400 in valid JSON, at both doors alike; nobody is poisoned."""
    neighbour = {"prompt": LONG, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    alone = caller.ask("gRPC stream", neighbour).choices[0].ids
    beside = []
    thread = threading.Thread(
        target=lambda: beside.append(caller.ask("gRPC stream", neighbour).choices[0].ids)
    )
    thread.start()
    body = json.dumps({"prompt": TEN, "max_tokens": 1}).encode()
    for name in NUMBERS:
        for raw in NO_NUMBERS:
            bad = body[:-1] + b', "%s": %s}' % (name.encode(), raw)
            verdict = caller.http_verdict(bad)
            # What is no JSON at all has no fields.
            assert (verdict.status, verdict.param) in ((400, name), (400, None)), bad
        for value in (float("nan"), float("inf"), -float("inf")):
            verdict = caller.grpc_verdict({"prompt": TEN, "max_tokens": 1, name: value})
            assert (verdict.status, verdict.param) == (400, name), (name, value)
    for name, outside in OUTSIDE.items():
        for value in outside:
            given = {"prompt": TEN, "max_tokens": 1, name: value}
            verdict = caller.http_verdict(given)
            assert (verdict.status, verdict.param) == (400, name), given
            assert caller.grpc_verdict(given) == verdict, given
    thread.join()
    assert beside == [alone]


def test_what_is_greedy_is_greedy(caller):
    """CASES P-03: tiny temperatures, a top_k of one, a tiny top_p: the ids of temperature 0."""
    ask = {"prompt": TEN, "max_tokens": 16, "ignore_eos": True, "seed": 1}
    found = [caller.ask("gRPC", {**ask, **options}).choices[0].ids for options in SAME_AS_GREEDY]
    assert found == [found[0]] * len(SAME_AS_GREEDY)


def test_extremes_that_are_legal_are_served(caller):
    """CASES P-03: no infinity comes out of them."""
    extremes = {
        "temperature": 2.0, "presence_penalty": -2.0, "frequency_penalty": 2.0, "logprobs": 5,
        "repetition_penalty": 0.1, "min_p": 0.0, "logit_bias": {"9": 100, "10": -100}, "seed": -1,
    }  # fmt: skip
    answers = caller.ask_all({"prompt": TEN, "max_tokens": 24, "ignore_eos": True, **extremes})
    assert len({tuple(answer.texts) for answer in answers.values()}) == 1
    (choice,) = answers["HTTP"].choices
    assert all(score.logprob > -1e30 for score in choice.logprobs)


def test_a_seed_is_the_same_in_each_shape_way_and_place(colocated, disaggregated):
    """CASES P-04: colocated, on either decode worker, from the cache, streamed or not."""
    ask = {
        "prompt": LONG, "seed": 42, "temperature": 0.9, "max_tokens": 48, "ignore_eos": True,
        "frequency_penalty": 0.5, "repetition_penalty": 1.2, "timeline": True,
    }  # fmt: skip
    expected = colocated.ask("HTTP", ask).texts
    for way in WAYS:
        assert disaggregated.ask(way, ask).texts == expected, way
    with ThreadPoolExecutor(8) as pool:  # so many at once spread over both decode workers
        answers = list(pool.map(lambda _: disaggregated.ask("HTTP", ask), range(8)))
    answers.append(disaggregated.ask("SSE", {**ask, "prompt": LONG[::-1]}))
    assert [answer.texts for answer in answers[:-1]] == [expected] * 8
    timelines = [answer.timelines[0] for answer in answers]
    assert {timeline["decode_worker"] for timeline in timelines} == {"decode-0", "decode-1"}
    cached = [timeline["prefill"]["num_cached_tokens"] for timeline in timelines]
    assert (min(cached), max(cached)) == (0, 48)


def test_two_choices_differ_and_come_again(colocated, disaggregated):
    """CASES P-04: n=2 twice: another text each, the same pair again, in each shape and way."""
    ask = {"prompt": TEN, "n": 2, "seed": 42, "temperature": 0.9, "max_tokens": 24}
    ask["ignore_eos"] = True
    answers = [
        shape.ask(way, ask).texts for shape in (colocated, disaggregated) for way in WAYS * 2
    ]
    assert answers == [answers[0]] * len(answers)
    assert answers[0][0] != answers[0][1]


@pytest.mark.parametrize("way", ["HTTP", "gRPC"])
def test_without_a_seed_choices_differ(caller, way):
    """CASES P-04."""
    ask = {"prompt": TEN, "n": 2, "temperature": 1.5, "max_tokens": 24, "ignore_eos": True}
    texts = [text for _ in range(2) for text in caller.ask(way, ask).texts]
    assert len(set(texts)) == 4
