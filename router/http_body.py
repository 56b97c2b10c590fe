"""A request's bytes into a ``GenerateInput``: bounded, strict JSON, values still unchecked."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from cluster.errors import ClusterFull, InvalidRequest, PdserveError, RequestTooLarge
from router import strict_json
from router.given import GenerateInput, TokenizeInput
from router.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import Request

    from cluster.config import LimitsConfig

READ_TIMEOUT_S = 30.0
PROMPT_S = 1.0
"""A body that takes longer is slow, and needs one of few places."""
_MAX_SLOW, _MAX_SLOW_EACH = 256, 64
"""Slow bodies at a time: in one router, and from one address."""
_DRAIN_BYTES = 64 << 20
_DRAIN_S = 2.0

CLIENT_ID_HEADER = "x-client-request-id"
"""An id of the client's own, echoed, by which its tenant can cancel the call."""


class UnsupportedMediaType(PdserveError):
    """The body is not declared as JSON."""

    code = "unsupported_media_type"
    http_status = 415
    grpc_code = "INVALID_ARGUMENT"


class BodyReader:
    """Reads the bodies of one router."""

    def __init__(self, limits: LimitsConfig, slow: Shares | None = None) -> None:
        self._limits = limits
        self._slow = slow or Shares(_MAX_SLOW, _MAX_SLOW_EACH)

    async def read_object(self, request: Request) -> dict[str, object]:
        """Read a JSON object; raises RequestTooLarge, UnsupportedMediaType or InvalidRequest, and
        ClusterFull where it is slow and too many others are.

        A body without a length is cut off at the same cap. NaN and infinities are no JSON.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise UnsupportedMediaType("the content-type must be application/json")
        return _parse(await self._read(request), self._limits.max_json_depth)

    async def _read(self, request: Request) -> bytes:
        place = _SlowPlace(self._slow, request.client.host if request.client else "")
        try:
            async with asyncio.timeout(READ_TIMEOUT_S) as due:
                place.take_later(due)
                return await _read(request, self._limits.max_body_bytes)
        except TimeoutError as error:
            if place.is_refused:
                reason = "too many bodies are slow to arrive"
                raise ClusterFull(reason, stage="edge", retry_after_s=1.0) from error
            reason = f"the body did not arrive within {READ_TIMEOUT_S:g} s"
            raise InvalidRequest(reason) from error
        finally:
            place.leave()


class _SlowPlace:
    """One body's place among the slow ones, should it come to that."""

    def __init__(self, places: Shares, address: str) -> None:
        self._places = places
        self._address = address
        self._timer: asyncio.TimerHandle | None = None
        self._has_place = False
        self.is_refused = False

    def take_later(self, due: asyncio.Timeout) -> None:
        """Take it when the body is late; ``due`` ends at once where there is none."""
        self._timer = asyncio.get_running_loop().call_later(PROMPT_S, self._take, due)

    def leave(self) -> None:
        """Give it back, if it was needed."""
        if self._timer is not None:
            self._timer.cancel()
        if self._has_place:
            self._places.give_back(self._address)

    def _take(self, due: asyncio.Timeout) -> None:
        self._has_place = self._places.take(self._address)
        if not self._has_place:
            self.is_refused = True
            due.reschedule(asyncio.get_running_loop().time())


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


def _parse(body: bytes, max_depth: int) -> dict[str, object]:
    tree = strict_json.parse(body, max_depth=max_depth, what="the body")
    if not isinstance(tree, dict):
        raise InvalidRequest("the body must be a JSON object")
    return tree


_FIELDS = (
    "model", "n", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p",
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "seed", "stop", "stop_token_ids", "ignore_eos", "echo", "logprobs", "top_logprobs", "user",
    "priority", "expected_tokens", "timeout_s", "timeline", "tools", "tool_choice",
)  # fmt: skip


def chat_input(body: Mapping[str, object], client_request_id: str | None) -> GenerateInput:
    """Return what a /v1/chat/completions body asks for."""
    messages = body.get("messages")
    if messages is None:
        raise InvalidRequest("messages is missing", field="messages")
    return _input(body, client_request_id, messages=messages)


def completion_input(body: Mapping[str, object], client_request_id: str | None) -> GenerateInput:
    """Return what a /v1/completions body asks for."""
    return _input(body, client_request_id, prompt=body.get("prompt"))


def tokenize_input(body: Mapping[str, object]) -> TokenizeInput:
    """Return what a /tokenize body asks for."""
    names = ("model", "prompt", "messages", "tools", "add_special_tokens")
    return TokenizeInput(**{name: body.get(name) for name in names}, extras=body)


def _input(
    body: Mapping[str, object], client_request_id: str | None, **source: object
) -> GenerateInput:
    fields: dict[str, Any] = {name: body.get(name) for name in _FIELDS} | source
    return GenerateInput(**fields, client_request_id=client_request_id or None, extras=body)


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
