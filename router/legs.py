"""The router's connections to workers, and which leg hears which token.

One connection per worker incarnation, made at its first leg and dropped when it is lost: when its
stream broke for good, the control plane declared it dead, or its ``Pulse`` says that it hangs. A
leg always ends with one ``LegEnd``: of the worker's, or made here when the worker is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from cluster.errors import IN_STEP, PdserveError, WorkerLost
from cluster.handoff import AbortCause
from cluster.request import (
    Beat,
    Leg,
    LegEnd,
    LegKey,
    LegKind,
    LegNotice,
    Peer,
    PromptLogprobs,
    Redirect,
    Token,
)
from router.pulse import Pulse

if TYPE_CHECKING:
    from cluster.rpc.client import LegEvents

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 1.0
"""For the last messages to all workers together, and then for their goodbyes."""


Said = Token | LegEnd | LegNotice | PromptLogprobs


@dataclass(frozen=True, slots=True)
class LegNews:
    """Something a leg said; the incarnation tells legs of one kind apart."""

    kind: LegKind
    incarnation: str
    said: Said
    is_death: bool = False
    """The worker had the leg when it was lost, or in the step that it died of."""


Hear = Callable[[LegNews], None]


class WorkerConnection(Protocol):
    """What is needed of ``cluster.rpc.client.WorkerClient``."""

    async def start_leg(self, leg: Leg) -> None:
        """Send a leg; raises WorkerLost."""
        ...

    async def abort_leg(self, key: LegKey, cause: AbortCause, grant_id: str) -> None:
        """Give up the leg of a grant; its end is said whatever became of it."""
        ...

    async def redirect_leg(self, redirect: Redirect) -> None:
        """Pass the export of a leg to another decode worker."""
        ...

    async def close(self) -> None:
        """End the stream."""
        ...


Connect = Callable[[Peer, "LegEvents"], WorkerConnection]


@dataclass(frozen=True, slots=True)
class _OpenLeg:
    """A leg that has not ended, and who listens to it."""

    kind: LegKind
    hear: Hear
    grant_id: str


@dataclass(slots=True)
class _Worker:
    """One incarnation: its connection and who listens to its open legs."""

    peer: Peer
    drop: Callable[[str], None]
    legs: dict[LegKey, _OpenLeg] = field(default_factory=dict)
    connection: WorkerConnection | None = None
    pulse: Pulse = field(default_factory=Pulse)
    has_answered: bool = False

    def on_beat(self, beat: Beat) -> None:
        """Note a sign of life; one comes with everything else that the worker says."""
        self.has_answered = True
        self.pulse.heard(beat)

    def on_tokens(
        self,
        tokens: Sequence[Token],
        ends: Sequence[LegEnd],
        notices: Sequence[LegNotice] = (),
        prompts: Sequence[PromptLogprobs] = (),
    ) -> None:
        """Pass one step on; what nobody listens to crossed with an abort."""
        self.has_answered = True
        for said in (*prompts, *tokens, *notices):
            self._tell(said, self.legs.get(said.key))
        for end in ends:
            leg = self.legs.get(end.key)
            # The answer to an abort that crossed with its leg's end is none to a leg after that.
            if leg is not None and end.grant_id in ("", leg.grant_id):
                del self.legs[end.key]
                self._tell(end, leg)

    def on_worker_lost(self, peer: Peer, reason: str, *, is_alive: bool = False) -> None:
        """End every leg here with WorkerLost; no leg has killed a worker that ``is_alive``."""
        self.drop(peer.incarnation)
        legs, self.legs = self.legs, {}
        for key, leg in legs.items():
            logger.warning("leg=%s worker=%s lost: %s", key, peer.worker_id, reason)
            # A worker that does both is a decode worker that prefills by itself.
            stage = (leg.kind if leg.kind is LegKind.PREFILL else LegKind.DECODE).value
            error = WorkerLost(
                f"the {stage} worker was lost", stage=stage, worker_id=peer.worker_id
            )
            end = LegEnd(key=key, error=error)
            is_death = self.has_answered and not is_alive
            leg.hear(LegNews(leg.kind, peer.incarnation, end, is_death=is_death))

    def _tell(self, said: Said, leg: _OpenLeg | None) -> None:
        if leg is None:
            return
        is_death = False
        if isinstance(said, LegEnd) and (error := said.error) is not None:
            is_death = isinstance(error, WorkerLost) and error.stage == IN_STEP
            _name(error, self.peer)
        leg.hear(LegNews(leg.kind, self.peer.incarnation, said, is_death=is_death))


class Workers:
    """All connections of one router."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._workers: dict[str, _Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, leg: Leg, peer: Peer, hear: Hear) -> None:
        """Start a leg; everything about it, a failure to start too, comes through ``hear``."""
        worker = self._workers.get(peer.incarnation)
        if worker is None:
            worker = _Worker(peer, self._drop)
            worker.connection = self._connect(peer, worker)
            self._workers[peer.incarnation] = worker
        worker.legs[leg.key] = _OpenLeg(leg.kind, hear, leg.grant_id)
        assert worker.connection is not None
        try:
            await worker.connection.start_leg(leg)
        except PdserveError as error:
            if isinstance(error, WorkerLost):
                self._drop(peer.incarnation)
            _name(error, peer)
            if worker.legs.pop(leg.key, None) is not None:
                hear(LegNews(leg.kind, peer.incarnation, LegEnd(key=leg.key, error=error)))
        except BaseException:
            # Not sent: nobody will say its end.
            worker.legs.pop(leg.key, None)
            raise

    def redirect(self, peer: Peer, redirect: Redirect) -> None:
        """Have the worker of a PREFILL leg pass its export on; nothing where the leg has ended."""
        worker = self._workers.get(peer.incarnation)
        if worker is not None and redirect.key in worker.legs:
            assert worker.connection is not None
            self._run(worker.connection.redirect_leg(redirect))

    def abort(self, peer: Peer, key: LegKey, cause: AbortCause) -> None:
        """Tell the worker to give a leg up, unless it has ended; what it still says is heard."""
        worker = self._workers.get(peer.incarnation)
        leg = worker.legs.get(key) if worker is not None else None
        if worker is None or leg is None:
            return
        assert worker.connection is not None
        self._run(worker.connection.abort_leg(key, cause, leg.grant_id))

    def forget(self, peer: Peer, key: LegKey) -> None:
        """Give up a leg that its worker has never had: nobody will say its end."""
        self.abort(peer, key, AbortCause.FAULT)
        worker = self._workers.get(peer.incarnation)
        if worker is not None:
            worker.legs.pop(key, None)

    def pass_to(self, peer: Peer, key: LegKey, hear: Hear) -> None:
        """Let another listen to a leg from now on, if it has not ended."""
        worker = self._workers.get(peer.incarnation)
        if worker is not None and key in worker.legs:
            worker.legs[key] = replace(worker.legs[key], hear=hear)

    def tick(self, now: float) -> None:
        """Take workers that hang, with legs open, as lost; to be called a few times a second."""
        for incarnation, worker in list(self._workers.items()):
            if worker.legs and (flaw := worker.pulse.look(now)) is not None:
                self.lost(worker.peer.worker_id, incarnation, flaw)

    def lost(self, worker_id: str, incarnation: str, reason: str) -> None:
        """Drop a worker, whatever its connection says."""
        worker = self._workers.get(incarnation)
        if worker is None:
            return
        peer = Peer(worker_id=worker_id, incarnation=incarnation, address=worker.peer.address)
        worker.on_worker_lost(peer, reason)
        if worker.connection is not None:
            self._run(worker.connection.close())

    async def close(self) -> None:
        """Close every connection, whatever its worker does; idempotent."""
        workers, self._workers = list(self._workers.values()), {}
        # The last aborts go out first; a worker that takes no more may not keep us.
        await _within(CLOSE_GRACE_S, self._tasks)
        loop = asyncio.get_running_loop()
        closing = {loop.create_task(w.connection.close()) for w in workers if w.connection}
        await _within(CLOSE_GRACE_S, closing)

    def _drop(self, incarnation: str) -> None:
        self._workers.pop(incarnation, None)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a message to a worker failed: %r", error)


def _name(error: PdserveError, peer: Peer) -> None:
    """Say whose an error is that names nobody."""
    error.worker_id = error.worker_id or peer.worker_id


async def _within(timeout_s: float, tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait for tasks, whatever their outcome; those that are late are cancelled."""
    if not (open_tasks := set(tasks)):
        return
    _, late = await asyncio.wait(open_tasks, timeout=timeout_s)
    for task in late:
        task.cancel()
    if late:
        logger.warning("%d messages to workers were given up", len(late))
    for task in open_tasks - late:
        # A failure to say goodbye is of no interest, but has to be looked at.
        _ = task.cancelled() or task.exception()
