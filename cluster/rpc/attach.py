"""A worker's side of Attach: sessions of routers, and the streams that carry them.

A stream that is cut leaves its session for ``KEEP_S``, with its legs running and its tail kept; a
new stream of the same router incarnation that asks for the next batch goes on with it. Else the
legs are given up: at the end of that time, and at once where the router says goodbye, reads too
slowly, breaks the protocol, or attaches anew.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc

from cluster.errors import InvalidRequest, PdserveError
from cluster.request import Beat, LegEnd
from cluster.rpc import convert
from cluster.rpc.session import Seat, Session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from cluster.rpc.legs import LegHandler
    from cluster.wire import worker_pb2 as wire

    AttachContext = grpc.aio.ServicerContext[wire.RouterMessage, wire.TokenBatch]

logger = logging.getLogger(__name__)

KEEP_S = 1.0
"""How long a router may take to come back after its stream was cut."""


class Attachments:
    """All routers of one worker; event loop only."""

    def __init__(self, legs: LegHandler, beat: Callable[[], Beat] | None = None) -> None:
        """``beat`` says how far the engine is."""
        self._legs = legs
        self._beat = beat or Beat
        self._sessions: dict[tuple[str, str], Session] = {}
        self._is_closed = False

    def close(self) -> None:
        """Let every stream send what is queued and end; take no more."""
        self._is_closed = True
        for session in list(self._sessions.values()):
            session.close()
            if session.seat is None or session.seat.is_left:
                self._end(session)

    async def serve(
        self, messages: AsyncIterator[wire.RouterMessage], context: AttachContext
    ) -> None:
        """Carry one stream until it ends, and leave its session to the next one or end it."""
        try:
            seat = await self._seat(messages)
        except PdserveError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        if seat is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no such attach is here")
        session = seat.session
        reader = asyncio.ensure_future(self._read(messages, seat))
        reader.add_done_callback(lambda _: seat.leave())
        try:
            while await seat.write(context.write):
                pass
        finally:
            self._left(seat, may_return=not session.is_closed and _may_return(reader))
            reader.cancel()
            (result,) = await asyncio.gather(reader, return_exceptions=True)
        if session.is_overrun:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the router reads too slowly")
        if isinstance(result, PdserveError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, result.message)
        if isinstance(result, Exception):
            logger.error("an attach failed", exc_info=result)
            await context.abort(grpc.StatusCode.INTERNAL, "the worker failed on a message")

    async def _seat(self, messages: AsyncIterator[wire.RouterMessage]) -> Seat | None:
        """Read the hello; return the seat that it asks for, None where that is not here."""
        hello = None
        async for message in messages:
            if message.WhichOneof("kind") == "hello":
                hello = message.hello
            break
        if hello is None:
            raise InvalidRequest("an attach begins with its one hello", field="hello")
        key = (hello.router_id, hello.incarnation)
        session = self._sessions.get(key)
        if hello.next_batch:
            if session is None or session.is_closed:
                return None
            logger.info("router=%s goes on at batch=%d", session.name, hello.next_batch)
            return session.sit(hello.next_batch)
        if session is not None:
            self._end(session)
        if self._is_closed:
            return None
        session = Session("/".join(key), self._beat)
        self._sessions[key] = session
        logger.info("router=%s attached", session.name)
        return session.sit(0)

    async def _read(self, messages: AsyncIterator[wire.RouterMessage], seat: Seat) -> bool:
        """Take messages until the stream ends; whether it ended with a goodbye."""
        session = seat.session
        async for message in messages:
            if seat.is_left:
                # Another stream has the seat, and was told what was taken: this comes there again.
                return False
            kind = message.WhichOneof("kind")
            if kind == "next_batch":
                session.acknowledged(message.next_batch)
                continue
            if kind == "goodbye":
                return True
            self._take(message, session)
            session.taken()
        return False

    def _take(self, message: wire.RouterMessage, session: Session) -> None:
        kind = message.WhichOneof("kind")
        if kind == "hello":
            raise InvalidRequest("an attach begins with its one hello", field="hello")
        if kind == "start":
            self._start(message.start, session)
        elif kind == "abort":
            abort = message.abort
            key, cause = convert.key_from_wire(abort.key), convert.cause_from_wire(abort.cause)
            self._legs.abort_leg(key, cause, abort.grant_id, session)
        elif kind == "redirect":
            self._legs.redirect_leg(convert.redirect_from_wire(message.redirect))

    def _start(self, message: wire.Leg, session: Session) -> None:
        try:
            leg = convert.leg_from_wire(message)
        except PdserveError as error:
            key = convert.key_from_wire(message.key)
            session.emit((), (LegEnd(key=key, error=error),))
            return
        self._legs.start_leg(leg, session)

    def _left(self, seat: Seat, *, may_return: bool) -> None:
        """A stream is over: its session waits for another one, unless it has one or is over."""
        session = seat.session
        seat.leave()
        if session.seat is not seat:
            return
        if not may_return:
            self._end(session)
            return
        logger.info("router=%s cut off", session.name)
        loop = asyncio.get_running_loop()
        loop.call_later(KEEP_S, self._give_up, seat)

    def _give_up(self, seat: Seat) -> None:
        if seat.session.seat is seat:
            self._end(seat.session)

    def _end(self, session: Session) -> None:
        """Give up all legs of a router, once."""
        key = next((k for k, s in self._sessions.items() if s is session), None)
        if key is None:
            return
        del self._sessions[key]
        session.close()
        if session.seat is not None:
            session.seat.leave()
        logger.info("router=%s detached", session.name)
        self._legs.router_lost(session)


def _may_return(reader: asyncio.Future[bool]) -> bool:
    """Whether a stream whose messages were read so far was cut: no goodbye, and no mistake."""
    if not reader.done():
        return True
    return reader.exception() is None and not reader.result()
