"""The key check of the HTTP door: in front of every route there is or is not, by one middleware."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.errors import Unauthenticated
from router.given import ANYBODY, Caller
from router.http_errors import error_response

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from router.auth import Keys

OPEN_PATHS = frozenset({"/health/live", "/health/ready"})
"""Whoever watches over a router has no key."""
_CALLER = "pdserve.caller"


class KeyGuard:
    """ASGI middleware: lets through who has a key, and says in the scope whose it is."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the call on."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                scope[_CALLER] = self._keys.caller(_authorization(scope))
            except Unauthenticated as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """Return who was let in."""
    caller = request.scope.get(_CALLER, ANYBODY)
    assert isinstance(caller, Caller)
    return caller


def _authorization(scope: Scope) -> str | None:
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    # Two could be read differently by a proxy and by us.
    return found[0].decode("latin-1") if len(found) == 1 else None
