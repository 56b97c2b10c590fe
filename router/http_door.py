"""The HTTP door: the API on a port that several routers of one host can share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import uvicorn

from cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastapi import FastAPI

_BACKLOG = 1024
_GRACE_S = 1


class HttpDoor:
    """One HTTP server; the kernel spreads connections over all that listen on the port."""

    def __init__(self, api: FastAPI, *, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._server = _Server(
            uvicorn.Config(
                api, log_config=None, access_log=False, timeout_graceful_shutdown=_GRACE_S
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen and return the port; raises StartupError where the address can't be had."""
        listener = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((self._host, self._port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise StartupError(
                f"cannot listen on {self._host}:{self._port} for HTTP: {error.strerror}"
            ) from error
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        """Refuse new calls and end those that run after a second; idempotent."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever hosts the router."""
        yield
