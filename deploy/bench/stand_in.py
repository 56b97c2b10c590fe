"""A router whose cluster is a stand-in: placed at once, and a worker that speaks in steps; or full.

What is left is the router's own work. The worker's messages come as objects, so taking them off
the wire is not in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.clock import SystemClock
from cluster.config import LimitsConfig, PoolConfig, Role
from cluster.control.capacity import Capacity
from cluster.control.facts import (
    BlockCounts,
    ClusterView,
    Grant,
    Health,
    Placed,
    Registration,
    Want,
    WorkerReport,
    WorkerView,
)
from cluster.request import Beat, FinishReason, LegEnd, LegKey, Token
from cluster.rpc.client import LegEvents
from router.api import build_api
from router.dispatch import Dispatcher
from router.grpc_api.door import GrpcDoor
from router.http_door import HttpDoor
from router.http_guard import GuardedConnection, HttpCaps
from router.legs import Workers
from router.metrics import RouterMetrics
from router.served import served_model
from router.service import Service
from router.text import TextCodec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import grpc.aio

    from cluster.handoff import AbortCause
    from cluster.request import Leg, Peer, Redirect

_STEP_S = 0.002
"""Between two steps; only so long that the client can read."""
_WORKER_ID = "stand-in"
_MAX_MODEL_LEN = 2048
_NUM_SLOTS = 64
_MAX_CLIENTS = 2000
_START_S = 30.0


class _Route:
    """Grants at once, or never where ``max_waiting`` may wait."""

    def __init__(self, max_waiting: int) -> None:
        self.view: ClusterView | None = _view(max_waiting)
        self._is_full = max_waiting > 0
        self.prefix_key = b""
        self.awaits_first_view = False
        self._num_grants = 0

    def view_age_s(self, now: float) -> float:
        return 0.0

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def want(self, want: Want) -> Grant:
        if self._is_full:
            await asyncio.Event().wait()
        self._num_grants += 1
        placed = Placed(worker_id=_WORKER_ID, incarnation="1", address="stand-in:1", pool="mixed")
        return Grant(
            term=1, grant_id=str(self._num_grants), request_id=want.request_id,
            attempt=want.attempt, prefill=None, decode=placed, handoff_id="", reason="the only one",
            predicted_s=0.0,
        )  # fmt: skip

    def done(
        self, grant_id: str, num_output_tokens: int, *, whole_output_tokens: int = 0
    ) -> None: ...

    async def cancel_request(self, request_id: str, timeout_s: float) -> bool:
        return False


@dataclass(slots=True)
class _Speech:
    max_tokens: int
    num_said: int = 0


@dataclass(slots=True)
class _Worker:
    """Says one token of each leg in each step, as continuous batching does."""

    events: LegEvents
    ids: Sequence[int]
    _speeches: dict[LegKey, _Speech] = field(default_factory=dict)
    _speaking: asyncio.Task[None] | None = None

    async def start_leg(self, leg: Leg) -> None:
        self.events.on_beat(Beat())
        self._speeches[leg.key] = _Speech(leg.params.max_tokens)
        if self._speaking is None:
            self._speaking = asyncio.create_task(self._speak())

    async def abort_leg(self, key: LegKey, cause: AbortCause, grant_id: str = "") -> None:
        self._speeches.pop(key, None)

    async def redirect_leg(self, redirect: Redirect) -> None: ...

    async def close(self) -> None:
        if self._speaking is not None:
            self._speaking.cancel()

    async def _speak(self) -> None:
        while self._speeches:
            tokens, ends = [], []
            for key, speech in list(self._speeches.items()):
                token_id = self.ids[speech.num_said % len(self.ids)]
                tokens.append(Token(key, speech.num_said, token_id))
                speech.num_said += 1
                if speech.num_said == speech.max_tokens:
                    del self._speeches[key]
                    ends.append(LegEnd(key=key, finish_reason=FinishReason.LENGTH))
            self.events.on_tokens(tokens, ends)
            if self._speeches:
                await asyncio.sleep(_STEP_S)
        self._speaking = None


class StandInRouter:
    """A router's doors, on a loop in a thread of its own; made by ``serving``."""

    def __init__(
        self,
        folder: Path,
        text: str,
        *,
        max_waiting: int = 0,
        connection: type[GuardedConnection] = GuardedConnection,
    ) -> None:
        """``text`` is what the worker says, again and again.

        With ``max_waiting`` there is no worker with room: so many requests wait, and no more.
        ``connection``: what each of the HTTP door is.
        """
        model = served_model(folder, name="bench", max_model_len=_MAX_MODEL_LEN)
        self.codec = TextCodec.load(folder, eos_ids=model.eos_ids)
        self.port = 0
        self.ids = self.codec.encode(text, has_special_tokens=False).ids
        pools = (PoolConfig(name="mixed", role=Role.MIXED, max_num_seqs=_NUM_SLOTS),)
        dispatcher = Dispatcher(
            route=lambda events: _Route(max_waiting),
            workers=Workers(self._connect),
            clock=SystemClock(),
            metrics=RouterMetrics("bench"),
        )
        self._service = Service(
            model=model, limits=LimitsConfig(), codec=self.codec, dispatcher=dispatcher,
            capacity=Capacity.of(pools, max_model_len=model.max_model_len),
            max_open_calls=2 * _NUM_SLOTS + max_waiting,
        )  # fmt: skip
        self.api = build_api(self._service)
        self._caps = HttpCaps(max_per_address=_MAX_CLIENTS)
        self._connection = connection
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="router", daemon=True)

    @property
    def num_open(self) -> int:
        """Calls that have not ended."""
        return self._service.dispatcher.num_open

    def cpu_s(self) -> float:
        """Return the CPU time that the router's loop has taken so far."""

        async def read() -> float:
            return time.thread_time()

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result(_START_S)

    def start(self) -> None:
        """Open the door; ``port`` is known then."""
        self._thread.start()
        self._door = HttpDoor(
            self.api, host="127.0.0.1", port=0, caps=self._caps, kind=self._connection
        )

        async def start() -> int:
            await self._service.start()
            return await self._door.start()

        self.port = asyncio.run_coroutine_threadsafe(start(), self._loop).result(_START_S)

    def open_grpc(self, interceptor: grpc.aio.ServerInterceptor) -> int:  # type: ignore[type-arg]
        """Open the gRPC door too, for this process's life; returns its port."""

        async def start() -> int:
            self._grpc_door = GrpcDoor(
                self._service, host="127.0.0.1", port=0, interceptors=(interceptor,)
            )
            return await self._grpc_door.start()

        return asyncio.run_coroutine_threadsafe(start(), self._loop).result(_START_S)

    def stop(self) -> None:
        """Close the door and end the thread."""

        async def stop() -> None:
            await self._door.stop()
            await self._service.stop()

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(_START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)
        self._loop.close()

    def _connect(self, peer: Peer, events: LegEvents) -> _Worker:
        return _Worker(events, self.ids)


@contextlib.contextmanager
def serving(folder: Path, text: str) -> Iterator[StandInRouter]:
    """Serve for the time of a ``with``; raises StartupError for a folder that is no model."""
    router = StandInRouter(folder, text)
    router.start()
    try:
        yield router
    finally:
        router.stop()


def _view(max_waiting: int) -> ClusterView:
    registration = Registration(
        worker_id=_WORKER_ID, incarnation="1", pool="mixed", role=Role.MIXED, address="stand-in:1",
        num_slots=_NUM_SLOTS, num_blocks=4096, block_size=16, max_model_len=_MAX_MODEL_LEN,
        layout="", step_base_s=0.01, step_per_seq_s=0.001, prefill_per_token_s=0.001, pid=1,
        transport="loopback",
    )  # fmt: skip
    worker = WorkerView(
        worker=registration, report=WorkerReport(blocks=BlockCounts(free=4096)),
        health=Health.ALIVE, report_age_s=0.0, num_granted=_NUM_SLOTS if max_waiting else 0,
    )  # fmt: skip
    return ClusterView(
        term=1, workers=(worker,), links=(), num_waiting=0, waiting_tokens=0, num_granted=0,
        num_routers=1, max_queue_requests=max_waiting or 256, retry_after_s=1.0,
    )  # fmt: skip
