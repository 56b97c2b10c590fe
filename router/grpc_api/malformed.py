"""Messages that are no protobuf: refused as what they are, the client's mistake.

grpc.aio would end such a call as UNKNOWN, and log an exception of ours.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from cluster.errors import InvalidRequest
from router.grpc_api.status import metadata_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

_MALFORMED = object()
"""Stands for a message that could not be read."""


class MessageGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not so at run time
    """Lets no handler see such a message."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Return the handler with a check in front of it; None where there is no such method."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        kind = _kind(handler)
        return handler._replace(
            request_deserializer=functools.partial(_read, handler.request_deserializer),
            **{kind: _guarded(getattr(handler, kind), is_stream=handler.request_streaming)},
        )


def _kind(handler: Any) -> str:
    names = [
        ("unary", "stream")[part]
        for part in (handler.request_streaming, handler.response_streaming)
    ]
    return "_".join(names)


def _read(deserialize: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return deserialize(data)
    except DecodeError:
        return _MALFORMED


def _guarded(behave: Callable[[Any, Any], Any], *, is_stream: bool) -> Callable[[Any, Any], Any]:
    """Return ``behave`` for messages that could be read, of the same kind: grpc.aio looks at it."""

    async def answer(request: Any, context: Any) -> Any:
        return await behave(await _checked(request, context, is_stream=is_stream), context)

    async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
        checked = await _checked(request, context, is_stream=is_stream)
        async for message in behave(checked, context):
            yield message

    return answers if inspect.isasyncgenfunction(behave) else answer


async def _checked(request: Any, context: Any, *, is_stream: bool) -> Any:
    """Return the message, or the stream of them; ends the call where there is none to read."""
    if is_stream:
        return _checked_stream(request, context)
    if request is _MALFORMED:
        error = InvalidRequest("the message is no protobuf of this method")
        code = grpc.StatusCode[error.grpc_code]
        await context.abort(code, error.message, metadata_of(error))
    return request


async def _checked_stream(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield await _checked(request, context, is_stream=False)
