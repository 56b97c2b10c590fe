"""A router's side of a worker: one Attach to one incarnation of it, over a stream that may be cut.

A stream that broke is dialled once more, within ``RECONNECT_S``: the worker keeps what it has for
this router a little longer, sends again what has not come, and is sent again what it has not
taken. Where that fails, or the worker itself ended the stream, the worker is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Protocol

import grpc

from cluster.errors import WorkerLost
from cluster.request import Beat
from cluster.rpc import convert
from cluster.rpc.options import CHANNEL_OPTIONS, INCARNATION_METADATA
from cluster.trust import ClusterToken
from cluster.wire import worker_pb2 as wire
from cluster.wire import worker_pb2_grpc as wire_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from cluster.handoff import AbortCause
    from cluster.request import (
        Leg,
        LegEnd,
        LegKey,
        LegNotice,
        Peer,
        PromptLogprobs,
        Redirect,
        Token,
    )

    AttachCall = grpc.aio.StreamStreamCall[wire.RouterMessage, wire.TokenBatch]

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0
RECONNECT_S = 1.0
"""As long as the worker keeps a router's legs after their stream was cut."""
GOODBYE_S = 0.5
"""How long a worker may take to end the stream after a goodbye."""
MAX_QUEUED_MESSAGES = 4096
ACK_EVERY = 16
"""Batches after which the worker is told that they came."""

_CUT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,  # also what a write ends with that the cut came in the way of
    }
)
"""How a stream ends that nobody ended on purpose."""


class LegEvents(Protocol):
    """Who hears what legs emit; called on the event loop, in order."""

    def on_beat(self, beat: Beat) -> None:
        """Take a sign of life; one comes before everything else, and at least each second."""
        ...

    def on_tokens(
        self,
        tokens: Sequence[Token],
        ends: Sequence[LegEnd],
        notices: Sequence[LegNotice] = (),
        prompts: Sequence[PromptLogprobs] = (),
    ) -> None:
        """Take what one step of one worker has for this router."""
        ...

    def on_worker_lost(self, peer: Peer, reason: str, *, is_alive: bool = False) -> None:
        """Give up every leg on this incarnation; told once, and nothing follows it.

        ``is_alive``: it answers, but has given this router up, which may have been away.
        """
        ...


class WorkerClient:
    """Connects at the first leg. Lost once, lost for ever: a new incarnation is a new client."""

    def __init__(
        self,
        peer: Peer,
        *,
        router_id: str,
        incarnation: str,
        events: LegEvents,
        token: ClusterToken | None = None,
    ) -> None:
        self.peer = peer
        self._router = (router_id, incarnation)
        self._events = events
        self._token = token or ClusterToken()
        self._outgoing = _Outgoing()
        self._next_batch = 1
        self._is_attached = False
        self._stream: asyncio.Task[None] | None = None
        self._is_over = False
        self._is_alive = False  # it answered, with a no

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

    async def abort_leg(self, key: LegKey, cause: AbortCause, grant_id: str = "") -> None:
        """Give up the leg of a grant, or whichever has the key; nothing where the worker is lost.

        Its end is always said, also of one that the worker does not have.
        """
        abort = wire.AbortLeg(
            key=convert.key_to_wire(key), cause=convert.cause_to_wire(cause), grant_id=grant_id
        )
        self._send_if_open(wire.RouterMessage(abort=abort))

    async def redirect_leg(self, redirect: Redirect) -> None:
        """Pass the export of a PREFILL leg on; nothing to do where the worker is lost."""
        message = wire.RouterMessage(redirect=convert.redirect_to_wire(redirect))
        self._send_if_open(message)

    async def close(self) -> None:
        """End the stream, and with it all its legs; no event follows. Idempotent."""
        self._is_over = True
        stream, self._stream = self._stream, None
        if stream is not None:
            self._outgoing.say_goodbye()
            if self._is_attached:
                await asyncio.wait({stream}, timeout=GOODBYE_S)
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)

    def _send_if_open(self, message: wire.RouterMessage) -> None:
        if not self._is_over and self._stream is not None:
            self._send(message)

    def _send(self, message: wire.RouterMessage) -> bool:
        """Queue a message. A worker that lets the queue fill up is lost: nobody waits for it."""
        if self._outgoing.put(message):
            return True
        self._lose(f"it does not read: {MAX_QUEUED_MESSAGES} messages wait")
        if self._stream is not None:
            self._stream.cancel()
        return False

    async def _run(self) -> None:
        reason = "the stream was cut"
        try:
            reason = await self._attach_twice()
        except grpc.aio.AioRpcError as error:
            self._is_alive = self._is_alive or error.code() not in _CUT
            reason = f"{error.code().name}: {error.details()}"
        except (TimeoutError, WorkerLost) as error:
            reason = str(error) or "no answer in time"
        except Exception as error:
            logger.exception("worker=%s its stream failed here", self.peer.worker_id)
            reason = f"its stream failed here: {type(error).__name__}"
        finally:
            # However it ends, whoever has a leg there must hear of it.
            self._lose(reason)

    async def _attach_twice(self) -> str:
        """Carry the stream, and another one for each that is cut; returns why the worker ended it.

        A stream counts once it has carried something; one that has not is not tried again.
        """
        cut: grpc.aio.AioRpcError | None = None
        while True:
            try:
                return await self._attach(is_return=cut is not None)
            except grpc.aio.AioRpcError as error:
                if not self._is_attached and cut is not None:
                    self._is_alive = error.code() not in _CUT
                    raise cut from error  # what came first says more
                if not self._is_attached or self._is_over or error.code() not in _CUT:
                    raise
                cut = error
                logger.warning("worker=%s cut off: %s", self.peer.worker_id, error.details())

    async def _attach(self, *, is_return: bool) -> str:
        """Carry one stream until its end; returns why it ended."""
        self._is_attached = False
        messages = self._messages(self._outgoing.turn(), is_return=is_return)
        async with self._token.channel(self.peer.address, CHANNEL_OPTIONS) as channel:
            call = wire_grpc.WorkerStub(channel).Attach(
                messages,
                metadata=((INCARNATION_METADATA, self.peer.incarnation), *self._token.metadata),
            )
            try:
                timeout_s = RECONNECT_S if is_return else CONNECT_TIMEOUT_S
                async with asyncio.timeout(timeout_s):
                    await self._check_incarnation(call)
                async for batch in call:
                    self._deliver(batch)
            finally:
                call.cancel()
        return "the stream ended"

    async def _check_incarnation(self, call: AttachCall) -> None:
        metadata = await call.initial_metadata()
        reached = {str(name): str(value) for name, value in metadata}.get(INCARNATION_METADATA)
        if reached is not None and reached != self.peer.incarnation:
            raise WorkerLost(f"incarnation {reached} answers at {self.peer.address}")

    async def _messages(self, turn: int, *, is_return: bool) -> AsyncIterator[wire.RouterMessage]:
        router_id, incarnation = self._router
        hello = wire.RouterHello(
            router_id=router_id,
            incarnation=incarnation,
            next_batch=self._next_batch if is_return else 0,
        )
        yield wire.RouterMessage(hello=hello)
        while (message := await self._outgoing.take(turn)) is not None:
            yield message

    def _deliver(self, batch: wire.TokenBatch) -> None:
        if self._is_over:
            return
        self._is_attached = True
        self._outgoing.taken(batch.num_taken)
        self._events.on_beat(Beat(batch.beat.num_steps, batch.beat.patience_s))
        if not batch.number:
            self._outgoing.tell(self._next_batch)
            return
        if batch.number != self._next_batch:
            raise WorkerLost(f"batch {batch.number} came in place of {self._next_batch}")
        self._next_batch += 1
        if batch.number % ACK_EVERY == 0:
            self._outgoing.tell(self._next_batch)
        self._events.on_tokens(
            [convert.token_from_wire(token) for token in batch.tokens],
            [convert.end_from_wire(end) for end in batch.ends],
            [
                *map(convert.waiting_from_wire, batch.waiting),
                *map(convert.preempted_from_wire, batch.preempted),
            ],
            [convert.prompts_from_wire(run) for run in batch.prompts],
        )

    def _lose(self, reason: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        logger.warning("worker=%s lost: %s", self.peer.worker_id, reason)
        self._events.on_worker_lost(self.peer, reason, is_alive=self._is_alive)


class _Outgoing:
    """Messages for the worker, each kept until it was taken; one stream at a time sends them.

    Regions of ``_kept``:   | sent on this stream, not known to be taken | to be sent |
    """

    def __init__(self) -> None:
        self._kept: deque[wire.RouterMessage] = deque()
        self._num_taken = 0
        self._num_sent = 0  # of all there ever were, as the one above
        self._turn = 0
        self._may_send = True
        self._next_batch = self._told_batch = 1
        self._is_leaving = False
        self._wake = asyncio.Event()

    def put(self, message: wire.RouterMessage) -> bool:
        """Queue a message; False where too many were not taken."""
        if len(self._kept) >= MAX_QUEUED_MESSAGES:
            return False
        self._kept.append(message)
        self._wake.set()
        return True

    def turn(self) -> int:
        """Let a new stream send; what the last one sent may have to be sent again."""
        # Until it is known what was taken of it.
        self._may_send = self._turn == 0
        self._num_sent = self._num_taken
        self._turn += 1
        self._wake.set()
        return self._turn

    def taken(self, num_taken: int) -> None:
        """Forget what the worker has taken, of all messages."""
        while self._kept and self._num_taken < num_taken:
            self._kept.popleft()
            self._num_taken += 1
        self._num_sent = max(self._num_sent, self._num_taken)
        if not self._may_send:
            self._may_send = True
            self._wake.set()

    def tell(self, next_batch: int) -> None:
        """Say, before anything else, which batches have come."""
        self._next_batch = next_batch
        if self._next_batch != self._told_batch:
            self._wake.set()

    def say_goodbye(self) -> None:
        """Send what waits, and that it was all."""
        self._is_leaving = True
        self._wake.set()

    async def take(self, turn: int) -> wire.RouterMessage | None:
        """Wait for the next message; None after the goodbye, or when another stream sends."""
        while turn == self._turn:
            if self._next_batch != self._told_batch:
                self._told_batch = self._next_batch
                return wire.RouterMessage(next_batch=self._next_batch)
            at = self._num_sent - self._num_taken
            if self._may_send and at < len(self._kept):
                self._num_sent += 1
                return self._kept[at]
            if self._is_leaving:
                self._turn += 1
                return wire.RouterMessage(goodbye=wire.Goodbye())
            self._wake.clear()
            await self._wake.wait()
        return None
