"""Work that nobody waits for: tasks, signals, and calls from other threads.

What fails here would otherwise be seen by nobody while legs wait for ever, so it is handed to
``on_failure``: in a worker that is its fault, and its process is replaced.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from cluster.errors import PdserveError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from cluster.handoff import LinkSignal
    from cluster.rpc.link import Link

    CallSoon = Callable[[Callable[[], None]], object]

logger = logging.getLogger(__name__)


class Errands:
    """Runs what was given, in its order; used on one event loop but for ``soon``."""

    def __init__(self, *, call_soon: CallSoon, on_failure: Callable[[BaseException], None]) -> None:
        """``call_soon`` brings a call from any thread to the event loop."""
        self._call_soon = call_soon
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, errand: Coroutine[Any, Any, None]) -> None:
        """Start a task; it handles the errors that can be expected."""
        task = asyncio.get_running_loop().create_task(errand)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def tell(self, link: Link, message: LinkSignal) -> None:
        """Send a signal behind those before it; on a lost link nobody is left to hear it."""
        try:
            link.signal(message)
        except PdserveError as error:
            # The half hears of the loss by on_link_lost.
            logger.debug("peer=%s signal not sent: %s", link.peer.worker_id, error)

    def soon(self, call: Callable[[], None]) -> None:
        """Make a call on the event loop, from any thread."""
        self._call_soon(lambda: self.guard(call))

    def guard(self, call: Callable[[], None]) -> None:
        """Make a call now."""
        try:
            call()
        except Exception as error:
            self._failed(error)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        logger.error("an errand failed", exc_info=error)
        self._on_failure(error)
