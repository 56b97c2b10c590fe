"""What one HTTP connection may take before, between and after its requests.

    connection ──too many? 503──▶ head (64 KiB, head_timeout_s) ──▶ request ──▶ next head ...

A peer that sends half a head, reads nothing, or does not close is cut off; a request's own
deadline is the application's business, which finds ``ABORT`` among the scope's extensions. Before
all that a TLS connection shakes hands (``https_listener``), and is counted meanwhile.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.http_errors import plain_error

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from router.shares import Places

logger = logging.getLogger(__name__)

ABORT = "pdserve.abort"
"""Scope extension: a function that drops the connection with all that is not written yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCaps:
    """Bounds of the HTTP door."""

    max_connections: int = 2048
    max_per_address: int = 512
    """Connections of one client's address."""
    max_head_bytes: int = 64 << 10
    head_timeout_s: float = 10.0
    """From the connection, or the end of an answer, to the end of the next request's head; and for
    shaking hands."""
    stall_timeout_s: float = 30.0
    """For a peer to read anything once our buffer is full, and to take the rest at the end."""
    discard_s: float = 1.0
    """How long a refused peer's bytes are dropped, so that it gets to read the answer."""


class GuardedConnection(H11Protocol):
    """uvicorn's connection with bounds."""

    def __init__(
        self,
        *args: Any,
        caps: HttpCaps,
        places: Places,
        lets_go: Callable[[], bool] = lambda: False,
        **kwargs: Any,
    ) -> None:
        """``places`` are those of all connections of the server, or the one that it has.

        ``lets_go``: whether a connection is to end with its next answer.
        """
        super().__init__(*args, **kwargs)
        self._caps = caps
        self._places = places
        self._lets_go = lets_go
        self._address: str | None = None
        """Whose place is taken."""
        self._is_refused = False
        self._head_timer = _Timer(self.loop, self._abort)
        self._stall_timer = _Timer(self.loop, self._abort)
        self._end_timer = _Timer(self.loop, self._abort)

    # ---- asyncio's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, unless there are too many."""
        super().connection_made(transport)
        address = self.client[0] if self.client is not None else ""
        if not self._places.take(address):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections", "cluster_full")
            return
        self._address = address
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of a refused peer are dropped."""
        if self._is_refused:
            return
        super().data_received(data)
        if not self._is_refused:
            self._await_head()

    def pause_writing(self) -> None:
        """Give the peer a while to read something."""
        super().pause_writing()
        self._stall_timer.start(self._caps.stall_timeout_s)

    def resume_writing(self) -> None:
        """The peer reads again."""
        super().resume_writing()
        self._stall_timer.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop every timer and give the place back."""
        if self._address is not None:
            self._places.give_back(self._address)
            self._address = None
        self._head_timer.stop()
        self._end_timer.stop()
        super().connection_lost(exc)
        self._stall_timer.stop()

    # ---- uvicorn's calls

    def handle_events(self) -> None:
        """Pass requests on, each with the means to drop its connection."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self.scope["extensions"] = {ABORT: {"call": self._abort}}
            if self._lets_go():
                # As if the client had asked for it: uvicorn then says so in the answer's head.
                self.scope["headers"] = [*self.scope["headers"], (b"connection", b"close")]

    def on_response_complete(self) -> None:
        """Go on to the next request; a connection that closes may not take for ever."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._end_soon()
        else:
            self._await_head()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        super().timeout_keep_alive_handler()
        self._end_soon()

    def send_400_response(self, msg: str) -> None:
        """Answer a head that is no HTTP, or too large, in our envelope."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", HTTPStatus.BAD_REQUEST)
        if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            self._refuse(status, "the request's head is too large", "request_too_large")
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, "this is no HTTP request", "invalid_request")

    # ---- inside

    def _await_head(self) -> None:
        """Have the head timer run exactly while no request is under way."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_timer.stop()
        else:
            self._head_timer.start(self._caps.head_timeout_s)

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer, send nothing more, and drop what still comes for a moment.

        Closed at once, the peer that is still sending would get a reset in place of the answer.
        """
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._abort()
            return
        self._is_refused = True
        self._head_timer.stop()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        answer = plain_error(status, message, code)
        headers = [*answer.raw_headers, (b"connection", b"close")]
        reason = HTTPStatus(status).phrase.encode()
        response = h11.Response(status_code=status, headers=headers, reason=reason)
        for event in (response, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._end_timer.start(self._caps.discard_s)

    def _end_soon(self) -> None:
        self._end_timer.start(self._caps.stall_timeout_s)

    def _abort(self) -> None:
        self.transport.abort()


class _Timer:
    """Calls something once, unless it is stopped before; starting it twice is starting it once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop = loop
        self._call = call
        self._handle: asyncio.TimerHandle | None = None

    def start(self, delay_s: float) -> None:
        if self._handle is None:
            self._handle = self._loop.call_later(delay_s, self._call)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
