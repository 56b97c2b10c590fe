"""The openai client and curl, as their users have them, on a disaggregated cluster."""

import asyncio
import json
import shutil
import subprocess

import openai
import pytest

CHAT = [{"role": "user", "content": "which boats came home?"}]
PROMPT = "the harbour master"
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12}


@pytest.fixture
def base_url(disaggregated):
    return f"{disaggregated.cluster.http}/v1"


@pytest.fixture
def client(base_url):
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_chats_whole_and_streamed(client):
    whole = client.chat.completions.create(messages=CHAT, **GREEDY)
    stream = client.chat.completions.create(
        messages=CHAT, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *chunks, last = stream
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == (
        whole.choices[0].message.content
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert last.choices == []
    counts = [
        (u.prompt_tokens, u.completion_tokens, u.total_tokens) for u in (last.usage, whole.usage)
    ]
    assert counts[0] == counts[1], "but for what was cached"


def test_completions_with_choices_logprobs_echo_and_stops(client):
    ask = {**GREEDY, "prompt": [PROMPT, "a quiet pier"], "n": 2, "logprobs": 2, "echo": True}
    whole = client.completions.create(**{**ask, "temperature": 0.8, "seed": 3})
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for choice in whole.choices:
        assert choice.text.startswith(PROMPT if choice.index < 2 else "a quiet pier")
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
        assert choice.logprobs.token_logprobs[0] is None
    (plain,) = client.completions.create(prompt=PROMPT, **GREEDY).choices
    stop = plain.text[3:5]
    (cut,) = client.completions.create(prompt=PROMPT, stop=[stop], **GREEDY).choices
    assert (cut.text, cut.finish_reason) == (plain.text[: plain.text.find(stop)], "stop")
    chat = client.chat.completions.create(
        messages=CHAT, logprobs=True, top_logprobs=3, n=2, seed=1, **GREEDY
    )
    for choice in chat.choices:
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [3] * 12


def test_models_and_errors(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(prompt=PROMPT, **{**GREEDY, "model": "other"})
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(messages=CHAT, **{**GREEDY, "temperature": 9})
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(
            messages=CHAT, response_format={"type": "json_object"}, **GREEDY
        )


async def test_async_streams_side_by_side_and_left_early(base_url, disaggregated):
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

        async def read() -> str:
            stream = await client.completions.create(prompt=PROMPT, stream=True, **GREEDY)
            return "".join([chunk.choices[0].text async for chunk in stream])

        assert len(set(await asyncio.gather(*(read() for _ in range(4))))) == 1
        long = {**GREEDY, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
        stream = await client.completions.create(prompt=PROMPT, stream=True, **long)
        async for _ in stream:
            break
        await stream.close()
    await asyncio.to_thread(disaggregated.cluster.wait_quiet, 5)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_transcripts(base_url):
    def curl(path: str, *options: str) -> tuple[str, str]:
        command = ["curl", "-sSN", "-w", "\n%{http_code}", *options, f"{base_url}{path}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        body, _, status = done.stdout.rpartition("\n")
        return status, body

    as_json = ("-H", "content-type: application/json", "-d")
    status, body = curl("/completions", *as_json, json.dumps({**GREEDY, "prompt": PROMPT}))
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == ("200", 12)
    streamed = json.dumps({**GREEDY, "messages": CHAT, "stream": True})
    status, body = curl("/chat/completions", *as_json, streamed)
    assert status == "200"
    assert body.rstrip().endswith("data: [DONE]")
    status, body = curl("/models")
    assert (status, json.loads(body)["data"][0]["id"]) == ("200", "tiny")
    status, body = curl("/completions", *as_json, "{")
    assert (status, json.loads(body)["error"]["code"]) == ("400", "invalid_request")
    status, body = curl("/completions", "-d", "{}")  # curl's own type is a form's
    assert (status, json.loads(body)["error"]["type"]) == ("415", "invalid_request_error")
