"""The proof after a start: one streamed request over HTTP, and calls to paste."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import httpx

from cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.config import DeployConfig

QUESTION = "What is the capital of France?"
_MAX_TOKENS = 48
_TIMEOUT_S = 60.0


def prove(config: DeployConfig) -> str:
    """Stream the answer to ``QUESTION`` to the terminal with its timeline; returns the text.

    Raises StartupError where the cluster does not answer as it should.
    """
    sys.stdout.write(f"> {QUESTION}\n")
    text, timeline = "", None
    for event in _events(config):
        if "error" in event:
            raise StartupError(f"the proof failed: {event['error']['message']}")
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            text += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
        timeline = event.get("timeline") or timeline
    if timeline is None:
        raise StartupError("the proof failed: the stream ended without its timeline")
    sys.stdout.write(f"\n\n{timeline_text(timeline)}\n\n")
    return text


def _events(config: DeployConfig) -> Iterator[dict[str, Any]]:
    endpoints = config.endpoints
    body = {
        "model": config.model.name,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "timeline": True,
    }
    url = f"http://{endpoints.host}:{endpoints.http_port}/v1/chat/completions"
    try:
        with httpx.stream("POST", url, json=body, timeout=_TIMEOUT_S) as response:
            if response.status_code != httpx.codes.OK:
                raise StartupError(f"the proof failed: {response.read().decode()}")
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))
    except httpx.HTTPError as error:
        raise StartupError(f"the proof failed: {error}") from error


def timeline_text(timeline: dict[str, Any]) -> str:
    """Return a response's timeline as aligned lines."""
    prefill, decode = timeline["prefill"], timeline["decode"]
    rows = [
        ("placement", f"{timeline['prefill_worker']} -> {timeline['decode_worker']}"),
        ("reason", timeline["reason"]),
        ("queue", _ms(timeline["queue_s"])),
        ("prefill", f"{_ms(prefill['compute_s'])} after {_ms(prefill['queue_s'])} in its queue"),
        ("first token", _ms(timeline["first_token_s"])),
        ("reserve wait", _ms(prefill["reserve_wait_s"])),
        ("transfer", f"{_ms(prefill['transfer_s'])} for {prefill['transfer_bytes']:,} bytes"),
        ("exposed", _ms(prefill["exposed_s"])),
        ("decode", f"{_ms(decode['compute_s'])} in {decode['num_steps']} steps"),
        ("total", _ms(timeline["total_s"])),
    ]
    return "\n".join(f"  {name:<13} {value}" for name, value in rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def print_calls(config: DeployConfig) -> None:
    """Print calls that work as they stand, and the limits in force."""
    endpoints, limits = config.endpoints, config.limits
    decoding = [pool for pool in config.pools if pool.role.value != "prefill"]
    values = {
        "http": f"http://{endpoints.host}:{endpoints.http_port}",
        "grpc": f"{endpoints.host}:{endpoints.grpc_port}",
        "model": config.model.name,
        "context": config.model.max_model_len,
        "slots": sum(pool.count * pool.max_num_seqs for pool in decoding),
        "kv": sum(pool.count * pool.kv_tokens for pool in decoding),
        "deadline": f"{limits.default_deadline_s:g}",
        "queue": config.scheduling.max_queue_requests,
    }
    sys.stdout.write(_CALLS.format_map(values))


_CALLS = """\
curl {http}/v1/chat/completions -H 'content-type: application/json' -d '{{
  "model": "{model}", "stream": true,
  "messages": [{{"role": "user", "content": "Tell me a short story."}}]}}'

python -c '
import openai
client = openai.OpenAI(base_url="{http}/v1", api_key="none")
answer = client.chat.completions.create(model="{model}",
    messages=[{{"role": "user", "content": "Tell me a short story."}}])
print(answer.choices[0].message.content)'

grpcurl -plaintext -d '{{"prompt": "Once upon a time", "max_tokens": 32}}' \\
  {grpc} pdserve.v1.Inference/Generate

pdserve generate "Tell me a short story."
pdserve status

limits: context {context} tokens, {slots} sequences decode at once, {kv} tokens of KV,
        {queue} requests may wait, deadline {deadline} s unless a request sets timeout

"""
