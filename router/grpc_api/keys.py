"""The key check of the gRPC door: in front of every method there is or is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health

from cluster.errors import Unauthenticated
from router.grpc_api.status import metadata_of
from router.public_errors import public_message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from router.auth import Keys
    from router.given import Caller

_OPEN = f"/{health.SERVICE_NAME}/"
"""Whoever watches over a router has no key."""


class KeyGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not so at run time
    """Lets through who has a key, and health checks."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Pass the call on, or have it end as UNAUTHENTICATED whatever it is."""
        if not handler_call_details.method.startswith(_OPEN):
            try:
                self._keys.caller(_authorization(handler_call_details.invocation_metadata))
            except Unauthenticated as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def caller_of(context: Any, keys: Keys) -> Caller:
    """Return who was let in."""
    return keys.caller(_authorization(context.invocation_metadata()))


def _refusal(error: Unauthenticated) -> Any:
    async def refuse(requests: object, context: Any) -> AsyncIterator[bytes]:
        await context.abort(
            grpc.StatusCode[error.grpc_code], public_message(error), metadata_of(error)
        )
        yield b""

    # A handler of streams fits calls of every kind, and waits for no message.
    return grpc.stream_stream_rpc_method_handler(refuse)


def _authorization(metadata: Iterable[tuple[str, Any]] | None) -> str | None:
    found = [value for name, value in metadata or () if name == "authorization"]
    # Two could be read differently by a proxy and by us.
    return found[0] if len(found) == 1 and isinstance(found[0], str) else None
