"""The sending side of one open stream of the server."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

Message = TypeVar("Message")


class Session(Generic[Message]):
    """What goes down one stream, in order; a view that was not sent yet gives way to a newer."""

    def __init__(self, name: str, incarnation: str) -> None:
        self.name = name
        self.incarnation = incarnation
        self._messages: deque[Message] = deque()
        self._view: Message | None = None
        self._is_closed = False
        self._last_number = 0
        self._wake = asyncio.Event()

    def put(self, message: Message) -> None:
        """Queue a message."""
        self._messages.append(message)
        self._wake.set()

    def put_view(self, message: Message) -> None:
        """Queue a view behind the messages, in place of an unsent one."""
        self._view = message
        self._wake.set()

    def close(self) -> None:
        """End the stream once everything queued is out."""
        self._is_closed = True
        self._wake.set()

    def is_next(self, number: int) -> bool:
        """Tell whether a numbered message is newer than all before it; 0 is not numbered."""
        if number != 0 and number <= self._last_number:
            return False
        self._last_number = max(number, self._last_number)
        return True

    async def serve(
        self,
        facts: AsyncIterator[Any],
        on_fact: Callable[[Any], None],
        write: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Read and write until either side ends; raises what reading raises."""
        loop = asyncio.get_running_loop()
        reader = loop.create_task(_read(facts, on_fact))
        writer = loop.create_task(self._drain(write))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, writer):
                task.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def messages(self) -> AsyncIterator[Message]:
        """Yield what is queued until the session is closed."""
        while True:
            self._wake.clear()
            while self._messages:
                yield self._messages.popleft()
            if self._view is not None:
                view, self._view = self._view, None
                yield view
            elif self._is_closed:
                return
            elif not self._messages:
                await self._wake.wait()

    async def _drain(self, write: Callable[[Message], Awaitable[None]]) -> None:
        async for message in self.messages():
            await write(message)


async def _read(facts: AsyncIterator[Any], on_fact: Callable[[Any], None]) -> None:
    async for fact in facts:
        on_fact(fact)
