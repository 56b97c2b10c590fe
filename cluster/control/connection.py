"""One stream to the control plane that comes back by itself, for routers and workers alike."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio

from cluster import tls
from cluster.trust import ClusterToken
from cluster.wire.control_pb2_grpc import ControlStub

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

Up = TypeVar("Up")
Sent = TypeVar("Sent", covariant=True)
Down = TypeVar("Down", contravariant=True)

MAX_MESSAGE_BYTES = 4 << 20
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that hangs without closing its socket is found within these two.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Every attempt is a fresh connection: no shared back-off, no proxy from the environment.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Waits between two attempts: doubled from first to last, with up to a quarter of jitter."""

    first_s: float = 0.05
    last_s: float = 0.5

    def wait_s(self, num_failures: int) -> float:
        """Seconds to wait after ``num_failures`` (>= 1) attempts in a row."""
        doubled = self.first_s * 2.0 ** min(num_failures - 1, 16)
        return min(self.last_s, doubled) * random.uniform(0.75, 1.0)


class StreamEvents(Protocol[Sent, Down]):
    """What the owner of a connection is told, all on the event loop."""

    def on_dialled(self, send: Callable[[Sent], None]) -> None:
        """Say hello, and nothing that must not be lost."""
        ...

    def on_message(self, message: Down) -> None:
        """The other end said something."""
        ...

    def on_lost(self, num_failures: int) -> None:
        """The stream is gone, or was refused; the next attempt follows after the back-off."""
        ...


class Tap(Protocol):
    """Stands in a stream and decides what becomes of each message: for fault injection.

    Called on the event loop with the name of the message's kind, as control.proto has it, and
    ``pass_on``, which lets the message through: not calling it drops the message, calling it
    later delays or reorders it, calling it twice duplicates it. What is passed on after its stream
    was lost is dropped. A stream's first message (who calls) does not come by.
    """

    def outgoing(self, kind: str, pass_on: Callable[[], None]) -> None:
        """A fact is about to be sent."""
        ...

    def incoming(self, kind: str, pass_on: Callable[[], None]) -> None:
        """A decision has come."""
        ...


class Connection(Generic[Up, Down]):
    """Keeps one bidirectional stream open until ``stop``.

    It is open once the other end has spoken: a dial that fails takes nothing with it but the
    hello. Owners keep what ``send`` refuses, and send it when they are welcomed. ``pick`` names
    the method.
    """

    def __init__(
        self,
        address: str,
        pick: Callable[[ControlStub], Callable[..., Any]],
        *,
        events: StreamEvents[Up, Down],
        name: str,
        backoff: Backoff | None = None,
        token: ClusterToken | None = None,
    ) -> None:
        self._address = address
        self._pick = pick
        self._events = events
        self._name = name
        self._backoff = backoff or Backoff()
        self._token = token or ClusterToken()
        self.tap: Tap | None = None
        self.refusal = ""
        """Why the control plane last refused to talk; empty since it did."""
        self._outgoing: asyncio.Queue[Up | None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    def start(self) -> None:
        """Dial, and go on dialling, in the background."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep(), name=self._name)

    def send(self, message: Up) -> bool:
        """Queue a message on the open stream, in order; False, and not sent, where none is."""
        outgoing = self._outgoing
        if outgoing is None:
            return False
        if self.tap is None:
            outgoing.put_nowait(message)
        else:
            # A queue whose stream is lost is read by nobody.
            self.tap.outgoing(_kind(message), lambda: outgoing.put_nowait(message))
        return True

    async def stop(self, flush_s: float = 1.0) -> None:
        """Send what is queued, within ``flush_s``, and hang up for good."""
        task, self._task = self._task, None
        if task is None:
            return
        self._is_stopping = True
        if self._outgoing is not None:
            self._outgoing.put_nowait(None)
            await asyncio.wait([task], timeout=flush_s)
        task.cancel()
        await asyncio.wait({task})

    async def _keep(self) -> None:
        num_failures = 0
        while True:
            was_heard = False
            try:
                was_heard = await self._one_stream()
            except Exception:
                # Whatever goes wrong with one stream, the next one is dialled.
                logger.exception("stream=%s failed to dial", self._name)
            if self._is_stopping:
                return
            num_failures = 1 if was_heard else num_failures + 1
            if num_failures == 1:
                logger.warning("stream=%s control=%s lost", self._name, self._address)
            try:
                self._events.on_lost(num_failures)
            except Exception:
                logger.exception("stream=%s failed on its loss", self._name)
            await asyncio.sleep(self._backoff.wait_s(num_failures))

    def _take(self, message: Down, outgoing: asyncio.Queue[Up | None]) -> None:
        if self.tap is None:
            self._events.on_message(message)
            return

        def pass_on() -> None:
            if self._outgoing is outgoing:
                self._events.on_message(message)

        self.tap.incoming(_kind(message), pass_on)

    def _note_refusal(self, error: grpc.aio.AioRpcError) -> None:
        refusal = tls.refusal(error)
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            refusal = error.details() or "not let in"
        if refusal and refusal != self.refusal:
            logger.error("stream=%s control=%s %s", self._name, self._address, refusal)
            self.refusal = refusal

    async def _one_stream(self) -> bool:
        """Live through one stream; whether the other end spoke."""
        outgoing: asyncio.Queue[Up | None] = asyncio.Queue()
        async with self._token.channel(self._address, CHANNEL_OPTIONS) as channel:
            call = self._pick(ControlStub(channel))(metadata=self._token.metadata)
            writer = asyncio.get_running_loop().create_task(_write(call, outgoing))
            try:
                self._events.on_dialled(outgoing.put_nowait)
                async for message in call:
                    self._outgoing, self.refusal = outgoing, ""
                    self._take(message, outgoing)
            except grpc.aio.AioRpcError as error:
                logger.debug("stream=%s %s %s", self._name, error.code(), error.details())
                self._note_refusal(error)
            except Exception:
                # Ours or theirs, a message that cannot be taken must not end the reconnecting.
                logger.exception("stream=%s failed on a message", self._name)
            finally:
                was_heard, self._outgoing = self._outgoing is not None, None
                writer.cancel()
                call.cancel()
                # Not ``await writer``: its cancellation could not be told from our own.
                await asyncio.wait({writer})
        return was_heard


def _kind(message: Any) -> str:
    return message.WhichOneof("kind") or ""


async def _write(call: Any, outgoing: asyncio.Queue[Any]) -> None:
    """Write until the queue says None, or until the stream is gone."""
    # The reader sees a loss too, with its reason.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
        while (message := await outgoing.get()) is not None:
            await call.write(message)
        await call.done_writing()
