"""All requests of one router: each is a ``Life`` with a task of its own; and the readers' ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from cluster.errors import PdserveError
from router.life import Life
from router.parts import Parts
from router.prefix import PrefixNames

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.clock import Clock
    from cluster.control.route_client import RouteEvents
    from router.events import Accepted, Delta, Finish, Scored
    from router.legs import Workers
    from router.metrics import RouterMetrics
    from router.route import Route

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""How often the workers with open legs are looked at."""


class Generation:
    """The reader's end of one request. Whoever holds it must ``cancel`` it when leaving."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self.request_id = life.request.request_id
        self.remaining_s = life.remaining_s()
        """Of its deadline, when it was made."""
        self.num_prompt_tokens = len(life.request.prompt_ids)

    @property
    def prefilled_on(self) -> str:
        """Incarnation that has computed the prompt, or is at it; empty before there is one."""
        return self._life.prefilled_on

    async def next(self) -> Delta | Finish | Scored:
        """Return the next event; nothing follows a Finish. Raises the PdserveError that ended it.

        One reader at a time.
        """
        event = await self._life.events.get()
        if isinstance(event, PdserveError):
            raise event
        return event

    def cancel(self) -> None:
        """Stop the work, wherever it is; nothing happens where it is over. Idempotent."""
        self._life.cancel()


class Dispatcher:
    """All requests of one router; hears the control plane's events."""

    def __init__(
        self,
        *,
        route: Callable[[RouteEvents], Route],
        workers: Workers,
        clock: Clock,
        metrics: RouterMetrics,
        prefixes: PrefixNames | None = None,
        resumes: bool = True,
    ) -> None:
        """``resumes``: a choice goes on with other workers after its first token."""
        self.route = route(self)
        self.clock = clock
        self.workers = workers
        self.metrics = metrics
        self._parts = Parts(
            route=self.route,
            workers=workers,
            clock=clock,
            metrics=metrics,
            prefixes=prefixes or PrefixNames("", ()),
            resumes=resumes,
        )
        self._lives: dict[str, tuple[Life, asyncio.Task[None]]] = {}
        self._watching: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        """Requests that are not over."""
        return len(self._lives)

    async def start(self) -> None:
        """Connect to the control plane, and look after the workers from now on."""
        await self.route.start()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """Cancel everything that runs, give it back, and leave; idempotent."""
        running = list(self._lives.values())
        for life, _ in running:
            life.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        await self.workers.close()
        await self.route.stop()

    def submit(self, accepted: Accepted) -> Generation:
        """Start a request's life; its events come through the returned Generation."""
        (accepted.counter or self.metrics).started()
        life = Life(accepted, self._parts)
        task = asyncio.get_running_loop().create_task(life.run())
        life.task = task
        request_id = accepted.request.request_id
        self._lives[request_id] = (life, task)
        task.add_done_callback(lambda _: self._lives.pop(request_id, None))
        return Generation(life)

    def on_cancel(self, request_id: str) -> bool:
        """Cancel a request if it runs here; whether it did."""
        entry = self._lives.get(request_id)
        return entry is not None and entry[0].cancel()

    def on_worker_dead(self, worker_id: str, incarnation: str) -> None:
        """Take a dead worker's legs as lost."""
        self.workers.lost(worker_id, incarnation, "declared dead by the control plane")

    def on_leg_missed(self, request_id: str, attempt: int, error: PdserveError) -> None:
        """Pass on to a request that a living worker has never heard of its leg."""
        entry = self._lives.get(request_id)
        if entry is not None:
            entry[0].on_leg_missed(attempt, error)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.workers.tick(self.clock.now())
            except Exception:
                logger.exception("looking after the workers failed")
