"""The calls that a started cluster prints: each works as it stands in any shell of the machine."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from cluster.config import Role
from deploy import commands
from deploy.client import CERTIFICATE_VARIABLE, KEY_FILE_VARIABLE, KEY_VARIABLE
from deploy.doors import http_url

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
        "http": http_url(config, by_name=True),
        "grpc": f"{endpoints.host}:{endpoints.grpc_port}",
        "model": config.model.name,
        "python": commands.python(),
        "generate": commands.pdserve("generate", *arguments, "Tell me a short story."),
        "status": commands.pdserve("status", *arguments),
        "context": config.model.max_model_len,
        "slots": sum(pool.max_count * pool.max_num_seqs for pool in decoding),
        "kv": sum(pool.max_count * pool.kv_tokens for pool in decoding),
        "deadline": f"{limits.default_deadline_s:g}",
        "queue": config.scheduling.max_queue_requests,
    }
    values["body"] = shlex.quote(_BODY.format_map(values))
    values["keys"], values["curl_key"], values["grpcurl_key"] = _keys(config)
    return _CALLS.format_map(values | _tls(config))


def _keys(config: DeployConfig) -> tuple[str, str, str]:
    """Return what is said of API keys, and how curl and grpcurl give one."""
    if not (config.auth.keys_file or config.auth.keys_env):
        return "any API key", "", ""
    entry = f'-H "authorization: Bearer ${KEY_VARIABLE}"'
    return f"an API key, the calls above take it from {KEY_VARIABLE}", f" {entry}", f" {entry}"


def _tls(config: DeployConfig) -> dict[str, str]:
    """Return how curl, grpcurl and the Python client are told whom to trust, and what to show."""
    security, endpoints = config.security, config.endpoints
    if not security.has_door_tls:
        return {"curl_tls": "", "grpcurl_tls": " -plaintext", "tls": "", "with_tls": ""}
    curl = grpcurl = ""
    if security.door_ca_file:
        ca_file = shlex.quote(security.door_ca_file)
        curl, grpcurl = f" --cacert {ca_file}", f" -cacert {ca_file}"
    if name := security.door_certificate_name:
        curl += f" --connect-to ::{endpoints.host}:{endpoints.http_port}"
        grpcurl += f" -authority {name}"
    if security.door_clients_ca_file:
        own = f'"${CERTIFICATE_VARIABLE}"', f'"${KEY_FILE_VARIABLE}"'
        curl += " --cert {} --key {}".format(*own)
        grpcurl += " -cert {} -key {}".format(*own)
    tls = f', tls=ClientTls(ca_file="{security.door_ca_file}", server_name="{name}")'
    return {"curl_tls": curl, "grpcurl_tls": grpcurl, "tls": tls, "with_tls": ", ClientTls"}


_BODY = """{{
  "model": "{model}", "stream": true,
  "messages": [{{"role": "user", "content": "Tell me a short story."}}]}}"""

_CALLS = """\
curl {http}/v1/chat/completions -H 'content-type: application/json'{curl_key}{curl_tls} -d {body}

{python} -c '
from deploy.client import Client{with_tls}
with Client("{grpc}"{tls}) as client:
    for piece in client.generate(messages=[("user", "Tell me a short story.")], max_tokens=64):
        print(piece.text, end="", flush=True)
print()'

grpcurl{grpcurl_tls}{grpcurl_key} -d '{{"prompt": "Once upon a time", "max_tokens": 32}}' \\
  {grpc} pdserve.v1.Inference/Generate

{generate}
{status}

OpenAI clients take base_url {http}/v1 and {keys}.
limits: context {context} tokens, {slots} sequences decode at once, {kv} tokens of KV,
        {queue} requests may wait, deadline {deadline} s unless a request sets timeout_s

"""
