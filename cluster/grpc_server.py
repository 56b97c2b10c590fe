"""A grpc.aio server that stays open.

A call whose path is no UTF-8 makes grpc.aio 1.85 stop accepting: its port closes for everybody,
while the calls that run go on. Nobody needs a key to do that, so another server takes the port.
It then also cancels the tasks in which it asks its core for the next calls, and frees with them
what the core writes to when it answers: those tasks are kept until it has, and so is the loop that
its events name.

grpc logs each value of metadata that is no UTF-8, with a traceback: what clients send is no news,
and may be a secret, so that is dropped.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING, Any

from grpc._cython import cygrpc
from grpc.aio import _server

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    import grpc.aio

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_ASKS_FOR_A_CALL = ("_request_call", "_request_registered_call")
_GRPC_LOGGER, _ODD_VALUE = "grpc._cython.cygrpc", "Invalid encoding on"


def make_server(
    *,
    interceptors: Sequence[Any] = (),
    options: Sequence[tuple[str, Any]] = (),
    maximum_concurrent_rpcs: int | None = None,
) -> grpc.aio.Server:
    """Return what ``grpc.aio.server`` would; call it in the loop that is to serve."""
    return _Server(interceptors, options, maximum_concurrent_rpcs)  # type: ignore[return-value]


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
        logging.getLogger(_GRPC_LOGGER).addFilter(_tells_no_value)
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


class _Server(_server.Server):
    """grpc.aio's server on a loop of ours; nothing in its interface takes one."""

    def __init__(
        self,
        interceptors: Sequence[Any],
        options: Sequence[tuple[str, Any]],
        maximum_concurrent_rpcs: int | None,
    ) -> None:
        self._loop = _asking_loop(asyncio.get_running_loop())
        augmented = _server._augment_channel_arguments(options, None)
        self._server = cygrpc.AioServer(
            self._loop, None, (), tuple(interceptors), augmented, maximum_concurrent_rpcs
        )


class _AskingLoop:
    """An event loop whose tasks that ask for a call outlive their cancellation."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asking: set[asyncio.Task[Any]] = set()

    def create_task(self, what: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Future[Any]:
        task = self._loop.create_task(what, **options)
        if getattr(what, "__name__", "") not in _ASKS_FOR_A_CALL:
            return task
        self._asking.add(task)
        task.add_done_callback(self._end)
        return asyncio.shield(task)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._asking.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it too, or no longer wants it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


@functools.cache
def _asking_loop(loop: asyncio.AbstractEventLoop) -> _AskingLoop:
    """One for each loop, and for ever: the core's events point to it, and do not hold it."""
    return _AskingLoop(loop)


def _tells_no_value(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_ODD_VALUE)


def _is_accepting(server: grpc.aio.Server) -> bool:
    return bool(server._server.is_running())  # type: ignore[attr-defined]
