"""The search for a decode worker that takes an export whose own one was lost or refused it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cluster.errors import PdserveError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.control.facts import Grant, Want
    from router.parts import Parts


class Search:
    """One want for an export; its answer comes through ``on_found``, unless it is stopped."""

    def __init__(
        self,
        want: Callable[[], Want],
        error: PdserveError,
        *,
        parts: Parts,
        on_found: Callable[[Grant | PdserveError], None],
        pause_s: float = 0.0,
    ) -> None:
        """``want`` makes the want when ``pause_s`` is over.

        ``error`` is why the export needs another decode worker.
        """
        self.error = error
        self._parts = parts
        self._on_found = on_found
        self._is_stopped = False
        self._task = asyncio.get_running_loop().create_task(self._run(want, pause_s))

    def stop(self) -> None:
        """Withdraw the want, or give back the grant that crosses with this."""
        self._is_stopped = True
        self._task.cancel()

    async def _run(self, want: Callable[[], Want], pause_s: float) -> None:
        answer: Grant | PdserveError
        try:
            with self._parts.metrics.waiting_handoff():
                if pause_s > 0:
                    await asyncio.sleep(pause_s)
                answer = await self._parts.route.want(want())
        except PdserveError as error:
            answer = error
        if not self._is_stopped:
            self._on_found(answer)
        elif not isinstance(answer, PdserveError):
            self._parts.route.done(answer.grant_id, 0)
