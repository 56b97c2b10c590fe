"""Sending signals from code that cannot wait: each is a task of its own, kept until it is done."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from cluster.errors import PdserveError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from cluster.handoff import LinkSignal
    from cluster.rpc.link import Link

logger = logging.getLogger(__name__)


class Errands:
    """Tasks that nobody awaits; they start in the order in which they were given."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, errand: Coroutine[Any, Any, None]) -> None:
        """Do it soon; it must handle its own errors."""
        task = asyncio.get_running_loop().create_task(errand)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("an errand failed", exc_info=task.exception())

    def tell(self, link: Link, message: LinkSignal) -> None:
        """Send a signal behind those before it; on a lost link nobody is left to hear it."""
        self.run(_signal(link, message))


async def _signal(link: Link, message: LinkSignal) -> None:
    try:
        await link.signal(message)
    except PdserveError as error:
        # The half hears of the loss by on_link_lost.
        logger.debug("peer=%s signal not sent: %s", link.peer.worker_id, error)
