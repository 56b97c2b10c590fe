"""The calls that a started cluster prints: each works as it stands in any shell of the machine."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from cluster.config import Role
from deploy import commands
from deploy.client import KEY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.config import DeployConfig


def print_calls(config: DeployConfig, arguments: Sequence[str] = ()) -> None:
    """Print the calls, and the limits in force; ``arguments`` chose the config."""
    sys.stdout.write(calls_text(config, arguments))


def calls_text(config: DeployConfig, arguments: Sequence[str] = ()) -> str:
    """Return curl, Python, grpcurl and our own commands for this cluster, and its limits."""
    endpoints, limits = config.endpoints, config.limits
    decoding = [pool for pool in config.pools if pool.role is not Role.PREFILL]
    values = {
        "http": f"http://{endpoints.host}:{endpoints.http_port}",
        "grpc": f"{endpoints.host}:{endpoints.grpc_port}",
        "model": config.model.name,
        "python": commands.python(),
        "generate": commands.pdserve("generate", *arguments, "Tell me a short story."),
        "status": commands.pdserve("status", *arguments),
        "context": config.model.max_model_len,
        "slots": sum(pool.count * pool.max_num_seqs for pool in decoding),
        "kv": sum(pool.count * pool.kv_tokens for pool in decoding),
        "deadline": f"{limits.default_deadline_s:g}",
        "queue": config.scheduling.max_queue_requests,
    }
    values["body"] = shlex.quote(_BODY.format_map(values))
    values["keys"], values["curl_key"], values["grpcurl_key"] = _keys(config)
    return _CALLS.format_map(values)


def _keys(config: DeployConfig) -> tuple[str, str, str]:
    """Return what is said of API keys, and how curl and grpcurl give one."""
    if not (config.auth.keys_file or config.auth.keys_env):
        return "any API key", "", ""
    entry = f'-H "authorization: Bearer ${KEY_VARIABLE}"'
    return f"an API key, the calls above take it from {KEY_VARIABLE}", f" {entry}", f" {entry}"


_BODY = """{{
  "model": "{model}", "stream": true,
  "messages": [{{"role": "user", "content": "Tell me a short story."}}]}}"""

_CALLS = """\
curl {http}/v1/chat/completions -H 'content-type: application/json'{curl_key} -d {body}

{python} -c '
from deploy.client import Client
with Client("{grpc}") as client:
    for piece in client.generate(messages=[("user", "Tell me a short story.")], max_tokens=64):
        print(piece.text, end="", flush=True)
print()'

grpcurl -plaintext{grpcurl_key} -d '{{"prompt": "Once upon a time", "max_tokens": 32}}' \\
  {grpc} pdserve.v1.Inference/Generate

{generate}
{status}

OpenAI clients take base_url {http}/v1 and {keys}.
limits: context {context} tokens, {slots} sequences decode at once, {kv} tokens of KV,
        {queue} requests may wait, deadline {deadline} s unless a request sets timeout_s

"""
