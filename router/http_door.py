"""The HTTP door: the API on a port that several routers of one host can share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from cluster.errors import StartupError
from router.http_guard import GuardedConnection, HttpCaps
from router.https_listener import HttpsListener
from router.shares import Shares

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable, Iterator

    from fastapi import FastAPI

    from cluster.tls import DoorTls
    from router.shares import Places

_BACKLOG = 1024
_GRACE_S = 1
_LAST_HEADS_S = 0.25
"""For those who connected just before the door was closed to say what they want."""


class HttpDoor:
    """One HTTP server; the kernel spreads connections over all that listen on the port."""

    def __init__(
        self,
        api: FastAPI,
        *,
        host: str,
        port: int,
        caps: HttpCaps | None = None,
        tls: DoorTls | None = None,
        kind: type[GuardedConnection] = GuardedConnection,
    ) -> None:
        """With ``tls``, nothing else is spoken. ``kind`` is what each connection is."""
        caps = caps or HttpCaps()
        places = Shares(caps.max_connections, caps.max_per_address)
        self._lets_go = False
        connection = functools.partial(kind, caps=caps, lets_go=lambda: self._lets_go)
        self._host = host
        self.port = port
        """Once it is open, where."""
        self._server = _Server(
            uvicorn.Config(
                api,
                # h11 and not httptools: only it bounds a request's head.
                http=cast("Any", connection),
                h11_max_incomplete_event_size=caps.max_head_bytes,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=_GRACE_S,
            ),
            places,
            None if tls is None else tls.context,
            caps.head_timeout_s,
        )
        self._serving: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        """Whether calls are taken."""
        return self._serving is not None and not self._serving.done()

    async def start(self) -> int:
        """Listen and return the port; raises StartupError where the address can't be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # asyncio turns Nagle's delay off, 40 ms for some tokens, only where TCP is named.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((self._host, self.port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise StartupError(
                f"cannot listen on {self._host}:{self.port} for HTTP: {error.strerror}"
            ) from error
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        self.port = int(listener.getsockname()[1])
        return self.port

    def let_go(self) -> None:
        """End each connection with its next answer: its client connects again, elsewhere."""
        self._lets_go = True

    @property
    def has_clients(self) -> bool:
        """Whether anybody is connected whose connection does not end with the call it carries."""
        return self._server.has_idle_connections

    def listen_no_more(self) -> None:
        """Let nobody new in; whoever is connected is served."""
        self._server.listen_no_more()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls and end those that run after ``grace_s``, or a second; idempotent.

        A connection that is kept alive is closed after the call that it carries.
        """
        serving, self._serving = self._serving, None
        if serving is not None:
            self._server.last_heads_s = min(grace_s, _LAST_HEADS_S)
            self._server.config.timeout_graceful_shutdown = max(_GRACE_S, math.ceil(grace_s))
            self._server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    """Listens by our own rules; the rest is uvicorn's."""

    def __init__(
        self,
        config: uvicorn.Config,
        places: Shares,
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        super().__init__(config)
        self._places = places
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self.last_heads_s = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on the sockets."""
        self.servers = [await self._listen(each) for each in sockets or ()]
        self.started = True

    async def _listen(self, listener: socket.socket) -> Any:
        if self._tls is not None:
            return HttpsListener(
                listener,
                self._tls,
                make=self._make,
                places=self._places,
                handshake_timeout_s=self._handshake_timeout_s,
            )
        make = functools.partial(self._make, self._places)
        loop = asyncio.get_running_loop()
        return await loop.create_server(make, sock=listener, backlog=_BACKLOG)

    def _make(self, places: Places) -> asyncio.Protocol:
        protocol: asyncio.Protocol = cast("Any", self.config.http_protocol_class)(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            places=places,
        )
        return protocol

    @property
    def has_idle_connections(self) -> bool:
        """Whether there are connections without a call."""
        open_now: Iterable[Any] = self.server_state.connections
        return any(each.cycle is None or each.cycle.response_complete for each in open_now)

    def listen_no_more(self) -> None:
        """Close the door; idempotent."""
        for server in self.servers:
            server.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the door, and after a moment each connection without a call.

        Who listens on a socket closes it.
        """
        self.listen_no_more()
        await asyncio.sleep(self.last_heads_s)
        await super().shutdown(None if self._tls is not None else sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever hosts the router."""
        yield
