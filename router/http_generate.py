"""One generating call over HTTP: read, asked of the service, answered whole or as a stream.

The first event is awaited before the answer begins, so that its status can still be an error.
After the first byte an error is an SSE ``error`` event, and no ``[DONE]`` follows. A client that
leaves is noticed in every phase, streaming or not.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect

from cluster.errors import Cancelled, EngineFault, PdserveError
from router.http_auth import caller_of
from router.http_body import CLIENT_ID_HEADER, wants_stream
from router.http_errors import envelope, error_response
from router.http_guard import ABORT
from router.http_watch import Watch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

    from fastapi import Request
    from starlette.types import Receive, Scope, Send

    from router.answers import Answer
    from router.calls import Call, Event
    from router.given import Caller, GenerateInput
    from router.http_body import BodyReader
    from router.service import Service

    Parse = Callable[[Mapping[str, object], str | None], GenerateInput]

logger = logging.getLogger(__name__)

WRITE_GRACE_S = 5.0
"""A client may read so long after its request's deadline, and is cut off then."""


class GenerateDoor:
    """What the two generating routes have in common."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service = service
        self._bodies = bodies

    async def serve(self, request: Request, parse: Parse, answer_kind: type[Answer]) -> Response:
        """Answer one call, whatever happens, with a response of ours."""
        caller, service = caller_of(request), self._service
        try:
            given, is_stream, with_usage = await self._read(request, parse, caller)
            with service.admission(caller):
                watch = Watch(request)
                call = await watch.unless_gone(self._begin(given, caller, watch))
        except PdserveError as error:
            return error_response(error)
        if call is None:
            return error_response(Cancelled("the client left", stage="edge"))
        answer = answer_kind(
            call, model=service.model.name, codec=service.codec, with_usage=with_usage
        )
        stream = _Reader(watch, call, answer)
        if is_stream:
            return await stream.events()
        return await stream.whole()

    async def _begin(self, given: GenerateInput, caller: Caller, watch: Watch) -> Call:
        call = await self._service.generate(given, caller)
        watch.follow(call.cancel)
        return call

    async def _read(
        self, request: Request, parse: Parse, caller: Caller
    ) -> tuple[GenerateInput, bool, bool]:
        try:
            with self._service.reading(caller, generates=True):
                body = await self._bodies.read_object(request)
            is_stream, with_usage = wants_stream(body)
            return parse(body, request.headers.get(CLIENT_ID_HEADER)), is_stream, with_usage
        except PdserveError as error:
            self._service.refused(error)
            raise
        except (ClientDisconnect, asyncio.CancelledError):
            raise
        except Exception:
            logger.exception("a body could not be read")
            fault = EngineFault("a body could not be read", stage="edge")
            self._service.refused(fault)
            raise fault from None


class _Reader:
    """Reads one call for one HTTP client; however it ends, the work is stopped."""

    def __init__(self, watch: Watch, call: Call, answer: Answer) -> None:
        self._call = call
        self._answer = answer
        self._headers = {"x-request-id": call.request_id}
        if call.client_request_id:
            self._headers[CLIENT_ID_HEADER] = call.client_request_id
        self._watch = watch
        self.write_timeout_s = call.remaining_s + WRITE_GRACE_S

    async def whole(self) -> Response:
        """Return the one body, or the error."""
        try:
            while not self._answer.is_whole:
                self._answer.take(await self._call.next())
            # A hundred thousand logprobs take seconds to write: the others' tokens don't wait.
            whole, is_long = self._answer.whole, self._call.shows.logprobs
            body = await asyncio.to_thread(whole) if is_long else whole()
        except PdserveError as error:
            return error_response(error, request_id=self._call.request_id)
        finally:
            self.stop()
        return Response(body, media_type="application/json", headers=self._headers)

    async def events(self) -> Response:
        """Return the stream when its first event is there, or the error."""
        try:
            first = await self._call.next()
        except PdserveError as error:
            self.stop()
            return error_response(error, request_id=self._call.request_id)
        except asyncio.CancelledError:
            self.stop()
            raise
        return _EventStream(self, first, self._headers)

    async def lines(self, event: Event) -> AsyncIterator[str]:
        """Yield the SSE lines of the stream, from its first event on."""
        answer = self._answer
        try:
            while True:
                if bodies := answer.chunks(event):
                    yield _lines(bodies)
                if answer.is_whole:
                    break
                event = await self._call.next()
            yield _lines([*answer.closing(), "[DONE]"])
        except PdserveError as error:
            yield _error_event(error)
        except Exception:
            logger.exception("request=%s stream failed", self._call.request_id)
            yield _error_event(EngineFault("an internal error"))

    def stop(self) -> None:
        """Stop the work, if it isn't over; idempotent."""
        self._call.cancel()
        self._watch.stop()


class _EventStream(StreamingResponse):
    """Server-sent events, until the end or until the client is too slow for its own deadline."""

    def __init__(self, reader: _Reader, first: Event, headers: dict[str, str]) -> None:
        super().__init__(
            reader.lines(first),
            media_type="text/event-stream",
            headers={**headers, "cache-control": "no-store"},
        )
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._reader.write_timeout_s):
                await self.stream_response(send)
        except TimeoutError:
            logger.warning("a client that reads too slowly is cut off")
            abort = scope.get("extensions", {}).get(ABORT, {}).get("call")
            if abort is not None:
                abort()
        except OSError:
            logger.info("a client left its stream")
        finally:
            self._reader.stop()


def _lines(bodies: Iterable[str]) -> str:
    return "".join(f"data: {body}\n\n" for body in bodies)


def _error_event(error: PdserveError) -> str:
    return f"event: error\ndata: {envelope(error).model_dump_json()}\n\n"
