"""Clients that others made, against the trial cluster as ``make run`` starts it."""

import asyncio
import json
import os
import shutil
import subprocess

import openai
import pytest

from cluster import config as deploy_config
from deploy.cli import TRIAL_CONFIG
from deploy.model_source import resolve_model
from deploy.trial_model import TRIAL_NAME
from tests.e2e.clients.aiperf import run_aiperf
from tests.e2e.plain_cluster import free_ports
from tests.e2e.ray_cluster import ray_cluster

pytestmark = [pytest.mark.clients, pytest.mark.ray, pytest.mark.timeout(400)]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"model": TRIAL_NAME, "messages": QUESTION, "max_tokens": 20, "temperature": 0}
ANSWER = "The capital of France is Paris."
BUF = os.environ.get("BUF") or shutil.which("buf")


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """The trial on free ports, otherwise as it is shipped."""
    doors = ("http_port", "grpc_port", "control_port")
    ports = zip(doors, free_ports(len(doors)), strict=True)
    changes = [f"endpoints.{door}={port}" for door, port in ports]
    config = deploy_config.load(TRIAL_CONFIG, changes)
    with ray_cluster(config, tmp_path_factory.mktemp("trial")) as cluster:
        yield cluster


def test_openai_whole_streamed_and_side_by_side(trial):
    """Sync and async."""
    base_url = f"{trial.http}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [TRIAL_NAME]
        whole = client.chat.completions.create(**GREEDY)
        assert whole.choices[0].message.content == ANSWER
        stream = client.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        chunks = list(stream)
        told = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert told == ANSWER
        counts = [(u.prompt_tokens, u.completion_tokens) for u in (chunks[-1].usage, whole.usage)]
        assert counts[0] == counts[1], "but for what was cached"

    async def read_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

            async def read() -> str:
                stream = await client.chat.completions.create(stream=True, **GREEDY)
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return await asyncio.gather(*(read() for _ in range(6)))

    assert set(asyncio.run(read_all())) == {ANSWER}


def said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(trial):
    as_json = ("-H", "content-type: application/json", "-d", json.dumps(GREEDY))
    answer = json.loads(said("curl", "-sS", *as_json, f"{trial.http}/v1/chat/completions"))
    assert answer["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.skipif(BUF is None, reason="buf is not installed")
def test_buf_curl(trial):
    asked = {
        "chat": {"messages": QUESTION}, "maxTokens": 20, "temperature": 0, "timeline": True
    }  # fmt: skip
    url = f"http://{trial.grpc}/pdserve.v1.Inference/GenerateOnce"
    call = (str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge")
    answer = json.loads(said(*call, "--data", json.dumps(asked), url))
    assert answer["choices"][0]["text"] == ANSWER


@pytest.mark.parametrize("program", ["aiperf"], indirect=True)
def test_aiperf(program, trial, tmp_path):
    folder = resolve_model("trial").folder
    run_aiperf(
        program, trial, tmp_path, model=TRIAL_NAME, tokenizer=folder, endpoint="chat"
    )  # fmt: skip
