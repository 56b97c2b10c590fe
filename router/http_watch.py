"""Notices that an HTTP client has left, in whatever phase its call is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fastapi import Request

T = TypeVar("T")


class Watch:
    """Waits for one client to leave, and then cancels what is being done for it.

    There is one for each call, from its body to its end: two that listen would race.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._cancel: Callable[[], object] = lambda: None
        self._is_gone = False
        self._task = asyncio.create_task(self._wait())

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return what the work returns; None, and the work is cancelled, where the client left.

        Work that begins something else says by ``follow`` how that is cancelled.
        """
        task = asyncio.create_task(work)
        self.follow(task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            self.stop()
            if self._is_gone and task.cancelled():
                return None
            # The work, or what it has begun and nobody will read.
            self._cancel()
            raise
        except BaseException:
            self.stop()
            raise

    def follow(self, cancel: Callable[[], object]) -> None:
        """Cancel this when the client leaves, or now where it has left."""
        self._cancel = cancel
        if self._is_gone:
            cancel()

    def stop(self) -> None:
        """Listen no more; idempotent."""
        self._task.cancel()

    async def _wait(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self._cancel()
