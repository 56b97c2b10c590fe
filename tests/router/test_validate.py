"""One table of inputs, played over HTTP and gRPC: value by value the same verdict."""

from __future__ import annotations

import pytest

from tests.router.doors import JSON, Verdict, open_doors
from tests.router.fakes import (
    EOS_ID,
    VOCAB_SIZE,
    FakeCluster,
    assert_conserved,
    make_router,
    speaks,
)

INF, NAN = float("inf"), float("nan")
ROOM = 64 - len(b"hello")  # the context, less the prompt
HI = [{"role": "user", "content": "hi"}]
PENALTIES = ("presence_penalty", "frequency_penalty")

GOOD = [
    {},
    {"max_tokens": 1},
    {"max_tokens": ROOM},
    {"max_tokens": ROOM - 1},
    {"max_tokens": 0, "echo": True},
    {"min_tokens": 0},
    {"min_tokens": 4, "max_tokens": 4},
    {"temperature": 0.0},
    {"temperature": -0.0},
    {"temperature": 1e-45},
    {"temperature": 1e-5},
    {"temperature": 2.0},
    {"top_p": 1.0},
    {"top_p": 1e-9},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 1},
    {"top_k": 10**9},
    {"min_p": 0.0},
    {"min_p": 1.0},
    *({name: value} for name in PENALTIES for value in (-2.0, -1.0, 0.0, 2.0)),
    {"repetition_penalty": 0.1},
    {"repetition_penalty": 2.0},
    {"logit_bias": {}},
    {"logit_bias": {"0": -100.0, str(VOCAB_SIZE - 1): 100.0}},
    {"seed": 0},
    {"seed": -1},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"stop": []},
    {"stop": "one"},
    {"stop": ["a", "b", "c", "d"]},
    {"stop": ["x" * 256]},
    {"stop_token_ids": []},
    {"stop_token_ids": [0, VOCAB_SIZE - 1]},
    {"ignore_eos": True},
    {"echo": True},
    {"logprobs": 0},
    {"logprobs": 5},
    {"logprobs": 1, "echo": True, "top_k": 1},
    {"n": 1},
    {"n": 3},
    {"user": "me"},
    {"priority": 0},
    {"priority": "default"},
    {"expected_tokens": 1},
    {"timeout_s": 600.0},
    {"model": "tiny"},
    {"prompt": [0, VOCAB_SIZE - 1]},
    {"prompt": [1] * 63, "max_tokens": 1},
    {"prompt": ["one"]},
    {"prompt": [[1], [2]]},
    {"prompt": ["a", "b"], "n": 2},
    {"messages": HI, "logprobs": True, "top_logprobs": 0},
    {"messages": HI, "logprobs": True, "top_logprobs": 20},
]
BAD = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": ROOM + 1}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": 2**63 - 1}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": 1, "max_tokens": 0, "echo": True}, "min_tokens"),
    ({"min_tokens": 10**9}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.0001}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.0001}, "top_p"),
    ({"top_p": -1.0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    *(({name: value}, name) for name in PENALTIES for value in (-2.01, 2.01)),
    *(({"repetition_penalty": value}, "repetition_penalty") for value in (0.0, -1.0, 1e-45, 2.01)),
    ({"logit_bias": {"-1": 1.0}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB_SIZE): 1.0}}, "logit_bias"),
    ({"logit_bias": {str(2**40): 1.0}}, "logit_bias"),
    ({"logit_bias": {"5": 100.1}}, "logit_bias"),
    ({"logit_bias": {"5": -101.0}}, "logit_bias"),
    ({"logit_bias": {str(i): 1.0 for i in range(301)}}, "logit_bias"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ["x" * 257]}, "stop"),
    ({"stop": ["x" * 10_000]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 10**9}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"messages": HI, "echo": True}, "echo"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 17}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 16, "prompt": ["a"] * 5}, "n"),
    ({"user": "x" * 129}, "user"),
    ({"priority": 1}, "priority"),
    ({"priority": "batch"}, "priority"),
    ({"expected_tokens": 0}, "expected_tokens"),
    ({"timeout_s": 0.0}, "timeout_s"),
    ({"timeout_s": -1.0}, "timeout_s"),
    ({"timeout_s": 601.0}, "timeout_s"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": "x" * 64}, "prompt"),
    ({"prompt": "x" * 10_000}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [VOCAB_SIZE]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": [1] * 64}, "prompt"),
    ({"prompt": [1] * 65}, "prompt"),
    ({"prompt": ["a"] * 33}, "prompt"),
]
# Numbers that JSON has no words for: 1e999 is read as infinity, NaN is no JSON at all.
FLOATS = ("temperature", "top_p", "min_p", *PENALTIES, "repetition_penalty", "timeout_s")
# What only JSON can say.
BAD_JSON = [
    *(({name: value}, name) for name in FLOATS for value in ("1", True, [1], {})),
    *(
        ({name: value}, name)
        for name in (
            "max_tokens",
            "min_tokens",
            "top_k",
            "seed",
            "n",
            "logprobs",
            "expected_tokens",
        )
        for value in (1.5, "7", True, 2**63, 10**30, [1])
        if (name, value) != ("logprobs", 1.5)
    ),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": "7"}, "max_completion_tokens"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"05": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": {"\u0665": 1}}, "logit_bias"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": ["\ud800"]}, "stop"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": ["5"]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"echo": "yes"}, "echo"),
    ({"timeline": "yes"}, "timeline"),
    ({"user": 5}, "user"),
    ({"user": "\ud800"}, "user"),
    ({"priority": True}, "priority"),
    ({"priority": [0]}, "priority"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": "half \ud83d"}, "prompt"),
    ({"prompt": ["half \ud83d"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], ["a"]]}, "prompt"),
    ({"prompt": [[[1]]]}, "prompt"),
    ({"model": 5}, "model"),
    ({"messages": HI, "top_logprobs": 5}, "top_logprobs"),
    ({"messages": HI, "logprobs": 5}, "logprobs"),
    ({"messages": HI, "logprobs": False, "top_logprobs": 1}, "top_logprobs"),
]
# Refused by name, never ignored: what would change the answer, and what is not for clients.
UNSERVED = {
    "best_of": (3, 0, "1", True),
    "suffix": ("x",),
    "response_format": ({"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, 5),
    "structured_outputs": ({"regex": "(a+)+b"},),
    "guided_json": ({},),
    "guided_regex": ("(a+)+b",),
    "functions": ([{"name": "f"}],),
    "function_call": ({"name": "f"},),
    "modalities": (["audio"],),
    "chat_template": ("{{ 1 }}",),
    "prompt_embeds": ("AAAA", {}),
    "logits_processors": (["os.system"],),
    "custom_logit_processor": ("gASV",),
    "kv_transfer_params": ({"remote_host": "127.0.0.1", "remote_port": 1}, {}),
    "bootstrap_host": ("127.0.0.1",),
    "bootstrap_room": (7,),
    "target_worker": ("d0",),
    "handoff_id": ("h1",),
    "output_ids": ([1],),
    "cache_salt": ("x",),
    "allowed_token_ids": ([1],),
    "bad_words": (["x"],),
    "stop_regex": ("x+",),
    "include_stop_str_in_output": (True,),
    "structural_tag": ({},),
    "documents": ([{"text": "x"}],),
    "return_token_ids": (True,),
    "add_special_tokens": (5, "no"),
}
GOOD_JSON = [
    {"max_tokens": None},
    {"max_completion_tokens": 1},
    {"max_tokens": 1, "max_completion_tokens": 1},
    {"temperature": 1},
    dict.fromkeys([*FLOATS, "top_k", "seed", "stop", "n", "logit_bias", "echo", "logprobs"]),
    {"logprobs": False, "presence_penalty": 0, "frequency_penalty": 0.0, "echo": False},
    {"tools": [], "response_format": {"type": "text"}, "tool_choice": "auto", "best_of": 1},
    {"n": 2, "best_of": 2},
    {"include_stop_str_in_output": False, "bad_words": [], "add_special_tokens": True},
    {"user": "me", "metadata": {"a": 1}, "no_such_field": [1], "stream_options": None},
    dict.fromkeys(UNSERVED),
]


@pytest.fixture
async def doors():
    cluster = FakeCluster()
    cluster.script = speaks([*b"ok", EOS_ID])
    async with open_doors(make_router(cluster)) as doors:
        yield doors


def with_prompt(given):
    return given if "messages" in given else {"prompt": "hello", **given}


async def test_good_values_are_good_at_both_doors(doors):
    """P-01, P-02, P-03: limits themselves are legal."""
    for given in map(with_prompt, GOOD):
        assert await doors.http_verdict(given) == Verdict(200), given
        assert await doors.grpc_verdict(given) == Verdict(200), given
    assert_conserved(doors.service)


async def test_bad_values_are_refused_alike_at_both_doors(doors):
    """P-01, P-02, P-03, P-05, P-07: 400, naming the same field and rule in the same words."""
    for given, field in BAD:
        verdict = await doors.http_verdict(with_prompt(given))
        assert (verdict.status, verdict.param) == (400, field), (given, verdict)
        assert await doors.grpc_verdict(with_prompt(given)) == verdict, given
        response = await doors.post({"stream": True, **with_prompt(given)})
        assert response.json()["error"]["message"] == verdict.message, "streamed or not"
    assert_conserved(doors.service)


async def test_numbers_that_are_no_numbers(doors):
    """P-03: NaN is false in every comparison; the refusal is itself valid JSON."""
    for name in FLOATS:
        for value in (NAN, INF, -INF):
            verdict = await doors.grpc_verdict({"prompt": "hello", name: value})
            assert (verdict.status, verdict.param) == (400, name)
            assert (await doors.http_verdict({"prompt": "hello", name: value})).status == 400
    for name in (*FLOATS, "top_k", "max_tokens", "seed", "n", "logprobs"):
        body = f'{{"prompt": "hello", "{name}": 1e999}}'
        response = await doors.http.post("/v1/completions", content=body, headers=JSON)
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_what_only_json_can_say(doors):
    """P-01, P-02, P-03, P-08, P-10: wrong types are refused, unknown fields ignored."""
    for given, field in BAD_JSON:
        verdict = await doors.http_verdict(with_prompt(given))
        assert (verdict.status, verdict.param) == (400, field), (given, verdict)
    for given in GOOD_JSON:
        assert await doors.http_verdict(with_prompt(given)) == Verdict(200), given
    assert_conserved(doors.service)


@pytest.mark.parametrize("name", UNSERVED)
async def test_what_is_not_served_is_refused_by_name(doors, name):
    """S-07, S-08, S-11, S-15, P-08, P-09: no tensors, code, grammars or internal fields."""
    for value in UNSERVED[name]:
        for source in ({"prompt": "hello"}, {"messages": HI}):
            verdict = await doors.http_verdict({**source, name: value})
            assert (verdict.status, verdict.param) == (400, name), value


async def test_special_tokens_are_the_models_or_the_templates(doors):
    """P-02: a prompt without its first token, or a chat with two, would be another prompt."""
    for source, asked in (({"prompt": "hello"}, False), ({"messages": HI}, True)):
        verdict = await doors.http_verdict({**source, "add_special_tokens": asked})
        assert (verdict.status, verdict.param) == (400, "add_special_tokens")
        assert await doors.http_verdict({**source, "add_special_tokens": not asked}) == Verdict(200)


async def test_what_is_too_large_for_64_bits_is_told_so(doors):
    """P-03: "at least" would be the wrong advice."""
    for name in ("seed", "max_tokens", "top_k"):
        verdict = await doors.http_verdict(with_prompt({name: 2**64}))
        assert f"to {2**63 - 1}" in verdict.message


async def test_unknown_model_is_not_found_at_both_doors(doors):
    """P-10."""
    verdict = await doors.http_verdict({"prompt": "hello", "model": "gpt-5"})
    assert (verdict.status, verdict.param) == (404, "model")
    assert await doors.grpc_verdict({"prompt": "hello", "model": "gpt-5"}) == verdict


async def test_nothing_to_generate_from_is_refused(doors):
    verdict = await doors.http_verdict({}, "/v1/completions")
    assert (verdict.status, verdict.param) == (400, "prompt")
    assert await doors.grpc_verdict({}) == verdict
    assert (await doors.http_verdict({}, "/v1/chat/completions")).param == "messages"
