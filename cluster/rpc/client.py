"""A router's side of a worker: one Attach stream to one incarnation of it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

import grpc

from cluster.errors import WorkerLost
from cluster.rpc import convert
from cluster.rpc.options import CHANNEL_OPTIONS, INCARNATION_METADATA
from cluster.wire import worker_pb2 as wire
from cluster.wire import worker_pb2_grpc as wire_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from cluster.handoff import AbortCause
    from cluster.request import Leg, LegEnd, LegKey, Peer, Token

    AttachCall = grpc.aio.StreamStreamCall[wire.RouterMessage, wire.TokenBatch]

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0
MAX_QUEUED_MESSAGES = 4096


class LegEvents(Protocol):
    """Who hears what legs emit; called on the event loop, in order."""

    def on_tokens(self, tokens: Sequence[Token], ends: Sequence[LegEnd]) -> None:
        """Take what one step of one worker has for this router."""
        ...

    def on_worker_lost(self, peer: Peer, reason: str) -> None:
        """Give up every leg on this incarnation; told once, and nothing follows it."""
        ...


class WorkerClient:
    """Connects at the first leg. Lost once, lost for ever: a new incarnation is a new client."""

    def __init__(self, peer: Peer, *, router_id: str, incarnation: str, events: LegEvents) -> None:
        self.peer = peer
        self._hello = wire.RouterHello(router_id=router_id, incarnation=incarnation)
        self._events = events
        self._outgoing: asyncio.Queue[wire.RouterMessage] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self._stream: asyncio.Task[None] | None = None
        self._is_over = False

    @property
    def is_lost(self) -> bool:
        """Whether the worker was lost or the client closed: no leg can be started any more."""
        return self._is_over

    async def start_leg(self, leg: Leg) -> None:
        """Send a leg; raises WorkerLost once the worker is lost. Its answers are events."""
        if self._is_over:
            raise WorkerLost("the worker is gone", worker_id=self.peer.worker_id)
        if self._stream is None:
            self._stream = asyncio.ensure_future(self._run())
        if not self._send(wire.RouterMessage(start=convert.leg_to_wire(leg))):
            raise WorkerLost("the worker reads nothing", worker_id=self.peer.worker_id)

    async def abort_leg(self, key: LegKey, cause: AbortCause) -> None:
        """Give a leg up; nothing to do where the worker is lost."""
        if self._is_over or self._stream is None:
            return
        abort = wire.AbortLeg(key=convert.key_to_wire(key), cause=convert.cause_to_wire(cause))
        self._send(wire.RouterMessage(abort=abort))

    async def close(self) -> None:
        """End the stream, and with it all its legs; no event follows. Idempotent."""
        self._is_over = True
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)

    def _send(self, message: wire.RouterMessage) -> bool:
        """Queue a message. A worker that lets the queue fill up is lost: nobody waits for it."""
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self._lose(f"it does not read: {MAX_QUEUED_MESSAGES} messages wait")
            if self._stream is not None:
                self._stream.cancel()
            return False
        return True

    async def _run(self) -> None:
        reason = "the stream was cut"
        try:
            reason = await self._attach()
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except (TimeoutError, WorkerLost) as error:
            reason = str(error) or f"no answer within {CONNECT_TIMEOUT_S:g} s"
        except Exception as error:
            logger.exception("worker=%s its stream failed here", self.peer.worker_id)
            reason = f"its stream failed here: {type(error).__name__}"
        finally:
            # However it ends, whoever has a leg there must hear of it.
            self._lose(reason)

    async def _attach(self) -> str:
        """Carry the stream until its end; returns why it ended."""
        async with grpc.aio.insecure_channel(self.peer.address, options=CHANNEL_OPTIONS) as channel:
            call = wire_grpc.WorkerStub(channel).Attach(
                self._messages(), metadata=((INCARNATION_METADATA, self.peer.incarnation),)
            )
            try:
                await self._check_incarnation(call)
                async for batch in call:
                    self._deliver(batch)
            finally:
                call.cancel()
        return "the stream ended"

    async def _check_incarnation(self, call: AttachCall) -> None:
        metadata = await asyncio.wait_for(call.initial_metadata(), CONNECT_TIMEOUT_S)
        reached = {str(name): str(value) for name, value in metadata}.get(INCARNATION_METADATA)
        if reached is not None and reached != self.peer.incarnation:
            raise WorkerLost(f"incarnation {reached} answers at {self.peer.address}")

    async def _messages(self) -> AsyncIterator[wire.RouterMessage]:
        yield wire.RouterMessage(hello=self._hello)
        while True:
            yield await self._outgoing.get()

    def _deliver(self, batch: wire.TokenBatch) -> None:
        tokens = [convert.token_from_wire(token) for token in batch.tokens]
        ends = [convert.end_from_wire(end) for end in batch.ends]
        self._events.on_tokens(tokens, ends)

    def _lose(self, reason: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        logger.warning("worker=%s lost: %s", self.peer.worker_id, reason)
        self._events.on_worker_lost(self.peer, reason)
