"""Logprobs in both shapes and over both doors: columns of one length, bytes that are the text."""

from __future__ import annotations

import json
import math

import pytest

from cluster.request import FinishReason
from tests.router.doors import events_of, open_doors
from tests.router.fakes import EOS_ID, FakeCluster, make_router, speaks

TEXT = "é😀!"
HI = [{"role": "user", "content": "hi"}]
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "bytes")


@pytest.fixture
async def cluster():
    cluster = FakeCluster()
    cluster.script = speaks([*TEXT.encode(), EOS_ID])
    return cluster


@pytest.fixture
async def doors(cluster):
    async with open_doors(make_router(cluster)) as doors:
        yield doors


def joined(chunks):
    """Return the columns of a stream's chunks as those of one choice, and the text."""
    columns, text = {name: [] for name in COLUMNS}, ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            text += choice["text"]
            for name in COLUMNS:
                columns[name] += (choice["logprobs"] or {}).get(name, [])
    return columns, text


async def streamed(doors, given):
    response = await doors.post({**given, "stream": True})
    *chunks, done = [data for _, data in events_of(response.text)]
    assert done == "[DONE]"
    return chunks


def is_finite(value):
    return value is None or math.isfinite(value)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [None, 1, 4])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("num", [0, 1, 5])
async def test_completions_have_columns_of_one_length(doors, num, echo, max_tokens, n):
    """P-07: prompt and output tokens, offsets into the text, all values finite or null."""
    prompt = "hé"
    given = {"prompt": prompt, "logprobs": num, "echo": echo, "max_tokens": max_tokens, "n": n}
    answer = (await doors.post(given)).json()
    num_prompt = len(prompt.encode()) if echo else 0
    num_output = answer["usage"]["completion_tokens"] // n
    assert num_output == (max_tokens or len(TEXT.encode()) + 1)
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        assert {len(logprobs[name]) for name in COLUMNS} == {num_prompt + num_output}
        assert (logprobs["token_logprobs"][0] is None) is echo
        assert (logprobs["top_logprobs"][0] is None) is echo
        assert None not in logprobs["token_logprobs"][1:]
        assert all(map(is_finite, logprobs["token_logprobs"]))
        for key, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
            if top is not None:
                assert key in top, "the chosen one is always there"
                assert len(top) in (max(1, num), num + 1)
        rebuilt = bytes(byte for token in logprobs["bytes"] for byte in token)
        assert rebuilt.decode(errors="replace") == choice["text"]
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        for offset, token in zip(logprobs["text_offset"], logprobs["bytes"], strict=True):
            if token and bytes(token).isascii():
                assert choice["text"][offset] == bytes(token).decode()
    if n == 1:
        chunks = await streamed(doors, given)
        columns, text = joined(chunks)
        assert text == answer["choices"][0]["text"]
        assert columns == {name: answer["choices"][0]["logprobs"][name] for name in COLUMNS}


async def test_prompts_of_ids_are_echoed_as_text(doors):
    given = {"prompt": list("hé".encode()), "logprobs": 1, "echo": True, "max_tokens": 1}
    logprobs = (await doors.post(given)).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xc3"]


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_0_scores_the_prompt(doors, cluster, stream):
    """P-01: with echo, the prompt's logprobs and nothing else; usage says so."""
    given = {"prompt": "hello", "echo": True, "logprobs": 2, "max_tokens": 0}
    if stream:
        given |= {"stream": True, "stream_options": {"include_usage": True}}
        response = await doors.post(given)
        *chunks, last, _ = [data for _, data in events_of(response.text)]
        usage, (columns, text) = last["usage"], joined(chunks)
        reasons = [c["choices"][0]["finish_reason"] for c in chunks]
        assert [reason for reason in reasons if reason] == ["length"]
    else:
        answer = (await doors.post(given)).json()
        (choice,) = answer["choices"]
        usage, columns, text = answer["usage"], choice["logprobs"], choice["text"]
        assert choice["finish_reason"] == "length"
    assert text == "hello"
    assert columns["tokens"] == list("hello")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 0)


@pytest.mark.parametrize("num", [0, 5, 20])
async def test_chats_have_objects(doors, num):
    """P-07: token, logprob, bytes, and as many best ones as asked for."""
    given = {"messages": HI, "logprobs": True, "top_logprobs": num}
    (choice,) = (await doors.post(given)).json()["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == len(TEXT.encode()) + 1
    rebuilt = bytes(byte for token in content for byte in token["bytes"])
    assert rebuilt.decode() == choice["message"]["content"] == TEXT
    for token in content:
        assert len(token["top_logprobs"]) == num
        assert all(math.isfinite(other["logprob"]) for other in token["top_logprobs"])
    assert (content[-1]["token"], content[-1]["bytes"]) == ("<eos>", [])
    chunks = await streamed(doors, given)
    streamed_content = [
        token
        for chunk in chunks
        for part in chunk["choices"]
        for token in (part["logprobs"] or {"content": []})["content"]
    ]
    assert streamed_content == content


async def test_without_logprobs_there_are_none(doors):
    for given in ({"prompt": "hi"}, {"messages": HI}, {"messages": HI, "logprobs": False}):
        answer = (await doors.post(given)).json()
        assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("source", [{"prompt": "hé"}, {"messages": HI}])
async def test_grpc_tells_the_same(doors, source):
    """P-07: HTTP and gRPC alike, whole and streamed."""
    if "prompt" in source:
        given = {**source, "logprobs": 2, "echo": True}
        (choice,) = (await doors.post(given)).json()["choices"]
        expected = choice["logprobs"]
        (told,) = (await doors.once(given)).choices
        entries = [*told.echo.logprobs, *told.logprobs]
        assert [list(entry.token_bytes) for entry in entries] == expected["bytes"]
        assert [entry.text_offset for entry in entries] == expected["text_offset"]
        got = [entry.logprob if entry.HasField("logprob") else None for entry in entries]
        assert got == expected["token_logprobs"]
        assert told.echo.text + told.text == choice["text"]
    else:
        given = {**source, "logprobs": True, "top_logprobs": 3}
        (choice,) = (await doors.post(given)).json()["choices"]
        (told,) = (await doors.once(given)).choices
        for entry, expected in zip(told.logprobs, choice["logprobs"]["content"], strict=True):
            assert (entry.token, list(entry.token_bytes)) == (expected["token"], expected["bytes"])
            tops = [(top.token, top.logprob) for top in entry.top]
            assert tops == [(t["token"], t["logprob"]) for t in expected["top_logprobs"]]


@pytest.mark.parametrize("stop", ["ello", "o w", " wor", "helloX"])
async def test_no_entry_tells_what_a_stop_string_takes_back(cluster, doors, stop):
    """P-05, P-07: entries come with their text, and none begins after its end."""
    text = "hello world"
    cluster.script = speaks(list(text.encode()), FinishReason.LENGTH)
    given = {"prompt": "hi", "logprobs": 1, "stop": [stop]}
    end = text.find(stop) if stop in text else len(text)
    shown = ""
    for chunk in await streamed(doors, given):
        for choice in chunk["choices"]:
            shown += choice["text"]
            offsets = (choice["logprobs"] or {"text_offset": []})["text_offset"]
            assert all(offset < len(shown) for offset in offsets)
    assert shown == text[:end]
    (choice,) = (await doors.post(given)).json()["choices"]
    assert choice["logprobs"]["tokens"] == list(text[:end])
    assert choice["finish_reason"] == ("stop" if stop in text else "length")


async def test_an_answer_with_logprobs_is_valid_json(doors):
    """P-07: no NaN, no infinity, whatever the tokens are."""
    cluster_bytes = {"prompt": list(range(60)), "logprobs": 5, "echo": True, "max_tokens": 1}
    response = await doors.post(cluster_bytes)
    json.loads(response.text, parse_constant=pytest.fail)
