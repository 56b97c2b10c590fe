"""A request's bytes into a ``GenerateInput``: bounded, strict JSON, values still unchecked."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, NoReturn, TypedDict

from cluster.errors import InvalidRequest, PdserveError, RequestTooLarge
from router.given import GenerateInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import Request

READ_TIMEOUT_S = 30.0
_DRAIN_BYTES = 64 << 20
_DRAIN_S = 2.0


class _Shared(TypedDict):
    model: object
    temperature: object
    top_p: object
    top_k: object
    seed: object
    stop: object
    ignore_eos: object
    timeout_s: object
    timeline: object


class UnsupportedMediaType(PdserveError):
    """The body is not declared as JSON."""

    code = "unsupported_media_type"
    http_status = 415
    grpc_code = "INVALID_ARGUMENT"


async def read_object(request: Request, *, max_bytes: int) -> dict[str, object]:
    """Read a JSON object; raises RequestTooLarge, UnsupportedMediaType or InvalidRequest.

    A body without a length is cut off at the same cap. NaN and infinities are no JSON.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType("the content-type must be application/json")
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            body = await _read(request, max_bytes)
    except TimeoutError as error:
        reason = f"the body did not arrive within {READ_TIMEOUT_S:g} s"
        raise InvalidRequest(reason) from error
    return _parse(body)


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "")
    declared = int(length) if length.isascii() and length.isdigit() else 0
    body = bytearray()
    chunks = request.stream()
    if declared <= max_bytes:
        async for chunk in chunks:
            body += chunk
            if len(body) > max_bytes:
                break
        else:
            return bytes(body)
    # Most clients read the answer only when they have sent all: take some of the rest.
    num_bytes = len(body)
    body.clear()
    try:
        async with asyncio.timeout(_DRAIN_S):
            async for chunk in chunks:
                num_bytes += len(chunk)
                if num_bytes > _DRAIN_BYTES:
                    break
    except TimeoutError:
        pass
    raise RequestTooLarge(f"the body is larger than {max_bytes} bytes")


def _parse(body: bytes) -> dict[str, object]:
    try:
        tree = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequest("the body is not valid JSON") from error
    if not isinstance(tree, dict):
        raise InvalidRequest("the body must be a JSON object")
    return tree


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def chat_input(body: Mapping[str, object]) -> GenerateInput:
    """Return what a /v1/chat/completions body asks for."""
    field, max_tokens = _max_tokens(body)
    messages = body.get("messages")
    if messages is None:
        raise InvalidRequest("messages is missing", field="messages")
    return GenerateInput(
        messages=messages,
        max_tokens=max_tokens,
        max_tokens_field=field,
        extras=body,
        **_shared(body),
    )


def completion_input(body: Mapping[str, object]) -> GenerateInput:
    """Return what a /v1/completions body asks for; raises InvalidRequest for several prompts."""
    field, max_tokens = _max_tokens(body)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise InvalidRequest("prompt: several prompts are not supported", field="prompt")
        prompt = prompt[0]
    is_ids = isinstance(prompt, list)
    return GenerateInput(
        prompt=None if is_ids else prompt,
        prompt_ids=prompt if is_ids else None,
        max_tokens=max_tokens,
        max_tokens_field=field,
        extras=body,
        **_shared(body),
    )


def wants_stream(body: Mapping[str, object]) -> tuple[bool, bool]:
    """Return whether to stream, and whether the usage comes in a last chunk."""
    stream, options = body.get("stream"), body.get("stream_options")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidRequest("stream must be true or false", field="stream")
    if options is None:
        return bool(stream), False
    if not stream:
        raise InvalidRequest("stream_options needs stream", field="stream_options")
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options must be an object", field="stream_options")
    include = options.get("include_usage")
    if include is not None and not isinstance(include, bool):
        name = "stream_options.include_usage"
        raise InvalidRequest(f"{name} must be true or false", field=name)
    return True, bool(include)


def _shared(body: Mapping[str, object]) -> _Shared:
    return _Shared(
        model=body.get("model"),
        temperature=body.get("temperature"),
        top_p=body.get("top_p"),
        top_k=body.get("top_k"),
        seed=body.get("seed"),
        stop=body.get("stop"),
        ignore_eos=body.get("ignore_eos"),
        timeout_s=body.get("timeout_s"),
        timeline=body.get("timeline"),
    )


def _max_tokens(body: Mapping[str, object]) -> tuple[str, object]:
    """Return the client's name for the limit, and its value; two that differ are a mistake."""
    old, new = body.get("max_tokens"), body.get("max_completion_tokens")
    if new is None:
        return "max_tokens", old
    if old is not None and old != new:
        name = "max_completion_tokens"
        raise InvalidRequest(f"max_tokens and {name} differ", field=name)
    return "max_completion_tokens", new
