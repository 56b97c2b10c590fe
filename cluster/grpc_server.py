"""A grpc.aio server that stays open.

A call whose path is no UTF-8 makes grpc.aio 1.85 stop accepting: its port closes for everybody,
while the calls that run go on. Nobody needs a key to do that, so another server takes the port.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc.aio

logger = logging.getLogger(__name__)

_LOOK_S = 0.1


class StandingServer:
    """``make`` returns a server that is bound to a port, and not started; 0 asks for any."""

    def __init__(self, make: Callable[[int], tuple[grpc.aio.Server, int]]) -> None:
        self._make = make
        self._server: grpc.aio.Server | None = None
        self._ended: list[grpc.aio.Server] = []
        self._watching: asyncio.Task[None] | None = None
        self.num_reopened = 0

    @property
    def is_serving(self) -> bool:
        """Whether calls are taken, or will be in a moment."""
        return self._watching is not None and not self._watching.done()

    async def start(self, port: int = 0) -> int:
        """Listen and return the port; raises what ``make`` raises."""
        self._server, port = self._make(port)
        await self._server.start()
        self._watching = asyncio.create_task(self._watch(port))
        return port

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuse new calls and end those that run after ``grace_s``; idempotent."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait([watching])
        servers, self._server, self._ended = [self._server, *self._ended], None, []
        for server in servers:
            if server is not None:
                await server.stop(grace_s)

    async def _watch(self, port: int) -> None:
        while True:
            # grpc.aio tells nobody: its own wait_for_termination waits for the calls that run.
            await asyncio.sleep(_LOOK_S)
            if self._server is not None and not _is_accepting(self._server):
                self._ended.append(self._server)
                self._server = None
            if self._server is None:
                await self._reopen(port)

    async def _reopen(self, port: int) -> None:
        try:
            server, _ = self._make(port)
            await server.start()
        except Exception:
            logger.exception("port=%d gRPC is shut and cannot be opened again yet", port)
            return
        self._server = server
        self.num_reopened += 1
        logger.error("port=%d gRPC had stopped accepting calls and is open again", port)


def _is_accepting(server: grpc.aio.Server) -> bool:
    return bool(server._server.is_running())  # type: ignore[attr-defined]
