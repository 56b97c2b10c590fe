"""How long an answer gets, what it ends with, and what is counted of it."""

import threading

import pytest

from tests.e2e.api.ask import WAYS
from tests.e2e.api.conftest import CONTEXT
from tests.factories_model import EOS_ID, VOCAB_SIZE

TEN = [11, 48, 85, 22, 59, 96, 33, 70, 107, 44]
ROOM = CONTEXT - len(TEN)
HI = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_at_every_edge(caller, name):
    """CASES P-01: exact where there is room, a 400 that names the field where there is none."""
    ask = {"prompt": TEN, **GREEDY}
    for value in (-1, 1.5, "7", True, 0, ROOM + 1, 2**31, 2**63):
        for given in ({**ask, name: value}, {"messages": HI, name: value}):
            for stream in (False, True):
                verdict = caller.http_verdict({**given, "stream": stream})
                assert (verdict.status, verdict.param) == (400, name), (given, verdict)
    ways = WAYS if name == "max_tokens" else WAYS[:2]  # the newer name is HTTP's
    for value in (1, 2, ROOM):
        for way in ways if value < ROOM else ways[1::2]:
            (choice,) = (answer := caller.ask(way, {**ask, name: value})).choices
            assert (answer.usage, choice.finish_reason) == ((len(TEN), value), "length"), way
    null = caller.ask("HTTP", {**ask, name: None})
    assert null.usage == (len(TEN), ROOM)
    if name == "max_completion_tokens":
        both = {**ask, "max_tokens": 3, name: 3}
        assert caller.ask("SSE", both).usage == (len(TEN), 3)
        assert caller.http_verdict({**both, name: 4}).param == name


def test_a_prompt_is_scored_without_a_token(caller):
    """CASES P-01: max_tokens 0 with echo is the one documented answer, in each way the same."""
    ask = {"prompt": "the quiet pier", "max_tokens": 0, "echo": True, "logprobs": 1}
    answers = caller.ask_all(ask)
    (expected,) = answers["HTTP"].choices
    assert expected.text == "the quiet pier"
    for way, answer in answers.items():
        assert answer.texts == [("the quiet pier", "length")], way
        assert answer.usage == (len(expected.logprobs), 0), way
    verdicts = [caller.http_verdict({**ask, "echo": False, "stream": s}) for s in (False, True)]
    assert verdicts[0] == verdicts[1] == caller.grpc_verdict({**ask, "echo": False})
    assert verdicts[0].param == "max_tokens"


BAD_PROMPTS = (
    "", [], [""], [[]], [-1], [VOCAB_SIZE], [2**40], [1.5], ["a", [1]], [[1], [VOCAB_SIZE]],
    [7] * CONTEXT, [7] * (CONTEXT + 1), "x " * 4000, None, {"a": 1},
)  # fmt: skip
GOOD_PROMPTS = {
    "the last row": ([VOCAB_SIZE - 1], 1),
    "two lists": ([[1], [2]], 2),
    "two texts": (["one", "two"], 2),
    "as long as can be": ([7] * (CONTEXT - 1), 1),
}


def test_prompts_of_every_kind_beside_a_good_one(caller):
    """CASES P-02: bad ones are a 400, good ones get tokens; the neighbour's are as if alone."""
    neighbour = {"prompt": TEN, "max_tokens": 200, **GREEDY}
    alone = caller.ask("gRPC stream", neighbour).choices[0].ids
    beside = []

    def stream() -> None:
        beside.append(caller.ask("gRPC stream", neighbour).choices[0].ids)

    for batch in (BAD_PROMPTS, tuple(GOOD_PROMPTS)):
        thread = threading.Thread(target=stream)
        thread.start()
        for prompt in batch:
            if batch is not BAD_PROMPTS:
                given, num_choices = GOOD_PROMPTS[prompt]
                for answer in caller.ask_all({"prompt": given, "max_tokens": 1}).values():
                    assert len(answer.choices) == num_choices, prompt
                    assert answer.usage[1] == num_choices, prompt
            else:
                verdict = caller.http_verdict({"prompt": prompt, "max_tokens": 1})
                assert (verdict.status, verdict.param) == (400, "prompt"), prompt
        thread.join()
    assert beside == [alone, alone]


ENDS = {
    "one token": ({"max_tokens": 1, "ignore_eos": True}, 1, "length"),
    "two tokens": ({"max_tokens": 2, "ignore_eos": True}, 2, "length"),
    "eight tokens": ({"max_tokens": 8, "ignore_eos": True}, 8, "length"),
    "EOS at once": ({"max_tokens": 8, "logit_bias": {str(EOS_ID): 100}}, 1, "stop"),
    "EOS ignored": (
        {"max_tokens": 8, "logit_bias": {str(EOS_ID): 100}, "ignore_eos": True}, 8, "length",
    ),
    "EOS after min_tokens": (
        {"max_tokens": 8, "min_tokens": 4, "logit_bias": {str(EOS_ID): 100}}, 5, "stop",
    ),
    "EOS as the last": (
        {"max_tokens": 5, "min_tokens": 4, "logit_bias": {str(EOS_ID): 100}}, 5, "stop",
    ),
    "a stop token": ({"max_tokens": 8, "stop_token_ids": [7], "logit_bias": {"7": 100}}, 1, "stop"),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_each_end_is_told_once_and_counted_right(end, caller, counted):
    """CASES P-08: the same finish and usage in each way, and in what router and workers count."""
    options, num_tokens, reason = ENDS[end]
    before = counted()
    ask = {"prompt": TEN, "temperature": 0, **options}
    for way, answer in caller.ask_all(ask).items():
        (choice,) = answer.choices
        assert (choice.finish_reason, answer.usage) == (reason, (len(TEN), num_tokens)), way
        if way.startswith("gRPC"):
            assert len(choice.ids) == num_tokens
    more = counted() - before
    assert more["pdserve_generated_tokens_total"] == len(WAYS) * num_tokens
    assert more["worker generated_tokens"] == len(WAYS) * num_tokens
    assert more["pdserve_prompt_tokens_total"] == len(WAYS) * len(TEN)


def test_three_choices_have_three_ends_and_one_prompt(caller):
    """CASES P-08: n=3; a best_of that is more is refused."""
    ask = {"prompt": TEN, "n": 3, "seed": 5, "max_tokens": 4, "ignore_eos": True}
    answers = caller.ask_all(ask)
    assert len({tuple(answer.texts) for answer in answers.values()}) == 1
    for answer in answers.values():
        assert answer.usage == (len(TEN), 12)
        assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
    assert caller.http_verdict({**ask, "n": 2, "best_of": 3}).param == "best_of"
    options = {"stream_options": {"include_usage": True}}
    assert caller.http_verdict({**ask, **options}).param == "stream_options"


def test_a_stop_string_at_max_tokens_is_a_stop(caller, tokenizer):
    """CASES P-08: hit by the very last token."""
    ask = {"prompt": TEN, "max_tokens": 6, **GREEDY}
    (choice,) = caller.ask("gRPC", ask).choices
    last = tokenizer.decode(choice.ids[:6])[len(tokenizer.decode(choice.ids[:5])) :]
    assert last, "the last token has no text: choose another prompt"
    assert choice.text.find(last) == len(choice.text) - len(last)
    for way, answer in caller.ask_all({**ask, "stop": [last]}).items():
        assert answer.texts == [(choice.text.removesuffix(last), "stop")], way
        assert answer.usage == (len(TEN), 6), way
