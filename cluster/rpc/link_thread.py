"""The one thread of a link: runs blocking jobs in the order they were given.

A daemon, unlike the threads of an executor: one that is blocked in a transfer whose peer is
silent does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.rpc.link import Link

T = TypeVar("T")

_Job = tuple["Callable[[], Any]", "asyncio.Future[Any] | None"]


class LinkThread:
    """Runs jobs in order; used from one event loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the thread has run its last job."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``job`` after those before it; cancelling the future does not stop it."""
        future: asyncio.Future[T] = self._loop.create_future()
        future.add_done_callback(_seen)
        self._jobs.put((job, future))
        return future

    def stop_after(self, last_job: Callable[[], None]) -> None:
        """Run ``last_job`` when all jobs before it are through, then end; nothing may follow."""
        self._jobs.put((last_job, None))
        self._jobs.put(None)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            result, error = None, None
            try:
                result = job()
            except BaseException as raised:
                error = raised
            if future is not None:
                self._tell(future, result, error)
            del job, future, item, result, error  # an idle thread keeps nothing alive
        self._tell(self.ended, None, None)

    def _tell(self, future: asyncio.Future[Any], result: Any, error: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(_settle, future, result, error)


class LinkThreads:
    """The threads of one side's links, to be waited for when the worker stops.

    A process that ends while one is tearing a channel down may die in it.
    """

    def __init__(self) -> None:
        self._ended: set[asyncio.Future[None]] = set()

    def add(self, link: Link) -> None:
        """Remember the link's thread until it ends."""
        self._ended.add(link.ended)
        link.ended.add_done_callback(self._ended.discard)

    async def wait(self, timeout_s: float = 1.0) -> None:
        """Wait for those of closed links; not for ever: one may be blocked by a silent peer."""
        if self._ended:
            await asyncio.wait(self._ended, timeout=timeout_s)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _seen(future: asyncio.Future[Any]) -> None:
    # A job may outlive whoever asked for it; its error is then nobody's news.
    if not future.cancelled():
        future.exception()
