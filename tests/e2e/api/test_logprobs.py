"""Logprobs of tokens that two workers drew, against one worker's."""

import itertools

import pytest

from tests.e2e.api.ask import WAYS

PROMPT = "the harbour master walked along the quiet pier and counted the boats"
CHAT = [{"role": "user", "content": "which boats came home?"}]
EQUAL = 1e-4
"""In fp32, disaggregated or not, over HTTP or gRPC."""


def assert_close(mine, theirs, num_best: int) -> None:
    """Tokens are the same, and so are their best ones; numbers are near, of tied ones as well.

    Completions over HTTP tell the chosen one among the best ones, if need be as one more.
    """
    assert [score.token_bytes for score in mine] == [score.token_bytes for score in theirs]
    for a, b in zip(mine, theirs, strict=True):
        assert (a.logprob is None) == (b.logprob is None)
        if a.logprob is None:
            continue
        assert a.logprob == pytest.approx(b.logprob, abs=EQUAL)
        ours, others = (sorted((lp for _, lp in score.top), reverse=True) for score in (a, b))
        assert num_best <= min(len(ours), len(others))
        assert ours[:num_best] == pytest.approx(others[:num_best], abs=EQUAL)


COMPLETIONS = [
    {"logprobs": num, "echo": echo, "max_tokens": max_tokens, **more}
    for num, echo, max_tokens, more in [
        (0, False, 4, {}), (1, False, 1, {}), (5, False, 4, {}), (0, True, 4, {}),
        (1, True, 1, {}), (5, True, 4, {"top_k": 1}), (5, True, 0, {}),
        (3, False, 8, {"logit_bias": {str(i): -100 for i in range(3, 200)}}),
        (2, False, 8, {"temperature": 0.8, "seed": 7, "n": 2, "frequency_penalty": 1.0}),
    ]
]  # fmt: skip
CHATS = [
    {"messages": CHAT, "logprobs": True, "top_logprobs": num, "max_tokens": max_tokens}
    for num, max_tokens in ((0, 4), (5, 1), (20, 4))
]


@pytest.mark.parametrize("number", range(len(COMPLETIONS) + len(CHATS)))
def test_each_way_and_shape_tells_the_same_logprobs(number, colocated, disaggregated):
    """CASES P-07: columns of one length, finite values, the chosen token, from both workers."""
    ask = [*COMPLETIONS, *CHATS][number]
    ask = {"temperature": 0, "ignore_eos": True, **ask}
    if "messages" not in ask:
        ask["prompt"] = PROMPT
    num_best = ask["top_logprobs"] if "messages" in ask else ask["logprobs"]
    expected = colocated.ask("HTTP", ask)
    for way, shape in itertools.product(WAYS, (colocated, disaggregated)):
        answer = shape.ask(way, ask)
        assert answer.texts == expected.texts
        for mine, theirs in zip(answer.choices, expected.choices, strict=True):
            assert_close(mine.logprobs, theirs.logprobs, num_best)
            check_shape(mine, ask, answer.usage)


def check_shape(choice, ask, usage) -> None:
    is_echoed = ask.get("echo", False)
    num_prompt = usage[0] if is_echoed else 0
    assert len(choice.logprobs) == num_prompt + ask["max_tokens"]
    if "messages" not in ask:
        assert choice.offsets == sorted(choice.offsets)
        assert choice.offsets[0] == 0
    for at, score in enumerate(choice.logprobs):
        if at == 0 and is_echoed:
            assert (score.logprob, score.top) == (None, ())
            continue
        assert -1e30 < score.logprob <= EQUAL
        assert all(-1e30 < lp <= EQUAL for _, lp in score.top)
    spoken = b"".join(score.token_bytes for score in choice.logprobs)
    assert spoken.decode(errors="replace") == choice.text


def test_the_prefix_cache_hides_no_logprobs(caller):
    """CASES P-07: asked again, the prompt's positions are told again, the same."""
    ask = {"prompt": PROMPT * 2, "logprobs": 1, "echo": True, "max_tokens": 2, "temperature": 0}
    plain = {**ask, "echo": False, "timeline": True}
    first = caller.ask("HTTP", ask).choices[0]
    cached = caller.ask("HTTP", plain).timelines[0]
    num_cached = [cached[half]["num_cached_tokens"] for half in ("prefill", "decode")]
    assert max(num_cached) > 0, "nothing was cached"
    assert_close(caller.ask("SSE", ask).choices[0].logprobs, first.logprobs, 1)


REFUSED = [
    ({"prompt": PROMPT, "logprobs": 6}, "logprobs"),
    ({"prompt": PROMPT, "logprobs": -1}, "logprobs"),
    ({"prompt": PROMPT, "logprobs": True}, "logprobs"),
    ({"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
]


def test_above_the_limits_there_are_none(caller):
    """CASES P-07: 400, by name, streamed or not."""
    for given, field in REFUSED:
        for stream in (False, True):
            verdict = caller.http_verdict({**given, "stream": stream})
            assert (verdict.status, verdict.param) == (400, field), given
