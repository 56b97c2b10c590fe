"""The HTTP door: OpenAI's routes, health and metrics, as a FastAPI app over a ``Service``.

A route reads its body, asks the service, and awaits the first event before it answers, so that
the status can still be an error. After the first byte an error is an SSE ``error`` event, and no
``[DONE]`` follows. A client that leaves is noticed in every phase, streaming or not.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cluster.errors import Cancelled, EngineFault, PdserveError
from router import metrics
from router.answers import Answer, ChatAnswer, TextAnswer
from router.events import Finish
from router.http_body import chat_input, completion_input, read_object, wants_stream
from router.http_errors import envelope, error_response, plain_error
from router.http_guard import ABORT
from router.openai_shapes import Health, ModelCard, ModelList

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping

    from starlette.types import Receive, Scope, Send

    from router.dispatch import Generation
    from router.events import Delta
    from router.given import GenerateInput
    from router.service import Service

logger = logging.getLogger(__name__)

WRITE_GRACE_S = 5.0
"""A client may read so long after its request's deadline, and is cut off then."""


def build_api(service: Service) -> FastAPI:
    """Return the app; the caller starts and stops the service."""
    api = FastAPI(title="pdserve", docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_envelopes(api)
    _add_health(api, service)
    door = _GenerateDoor(service)

    @api.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await door.serve(request, chat_input, ChatAnswer)

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await door.serve(request, completion_input, TextAnswer)

    return api


def _add_envelopes(api: FastAPI) -> None:
    """Make everything that FastAPI and Starlette refuse by themselves look like our errors."""

    @api.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return plain_error(error.status_code, _PLAIN.get(error.status_code, "refused"), "http")

    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return plain_error(400, "the request is not valid", "invalid_request")

    @api.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return error_response(Cancelled("the client left", stage="edge"))

    @api.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(EngineFault("an internal error"))


_PLAIN = {404: "there is no such route", 405: "this route does not take this method"}


def _add_health(api: FastAPI, service: Service) -> None:
    @api.get("/health/live")
    async def live() -> Health:
        return Health(status="live")

    @api.get("/health/ready", response_model=Health)
    async def ready() -> Response:
        readiness = service.readiness()
        status = "ready" if readiness.is_ready else "not ready"
        body = Health(status=status, missing=list(readiness.missing))
        return Response(
            body.model_dump_json(),
            status_code=200 if readiness.is_ready else 503,
            media_type="application/json",
        )

    @api.get("/metrics")
    async def prometheus() -> Response:
        return Response(service.metrics.text(), media_type=metrics.CONTENT_TYPE)

    @api.get("/v1/models")
    async def models() -> ModelList:
        model = service.model
        return ModelList(
            data=[
                ModelCard(id=model.name, created=model.created, max_model_len=model.max_model_len)
            ]
        )


class _GenerateDoor:
    """What the two generating routes have in common."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def serve(
        self,
        request: Request,
        parse: Callable[[Mapping[str, object]], GenerateInput],
        answer_kind: type[Answer],
    ) -> Response:
        """Answer one call, whatever happens, with a response of ours."""
        try:
            with self._service.admission():
                given, is_stream, with_usage = await self._read(request, parse)
                watch = _Watch(request)
                generation = await watch.unless_gone(self._service.generate(given))
        except PdserveError as error:
            return error_response(error)
        if generation is None:
            return error_response(Cancelled("the client left", stage="edge"))
        answer = answer_kind(
            generation.request_id,
            model=self._service.model.name,
            with_usage=with_usage,
            with_timeline=given.timeline is True,
        )
        stream = _Reader(watch, generation, answer)
        if is_stream:
            return await stream.events()
        return await stream.whole()

    async def _read(
        self, request: Request, parse: Callable[[Mapping[str, object]], GenerateInput]
    ) -> tuple[GenerateInput, bool, bool]:
        try:
            body = await read_object(request, max_bytes=self._service.limits.max_body_bytes)
            is_stream, with_usage = wants_stream(body)
            return parse(body), is_stream, with_usage
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


class _Watch:
    """Waits for one client to leave, and then cancels what is being done for it.

    There is one for each call, from its body to its end: two that listen would race.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._cancel: Callable[[], object] = lambda: None
        self._is_gone = False
        self._task = asyncio.create_task(self._wait())

    async def unless_gone(self, work: Coroutine[Any, Any, Generation]) -> Generation | None:
        """Return what the work returns; None, and the work is cancelled, where the client left."""
        task = asyncio.create_task(work)
        self.follow(task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            self.stop()
            if self._is_gone and task.cancelled():
                return None
            task.cancel()
            raise
        except BaseException:
            self.stop()
            raise

    def follow(self, cancel: Callable[[], object]) -> None:
        """Cancel this when the client leaves, or now where it has left."""
        self._cancel = cancel
        if self._is_gone:
            cancel()

    def stop(self) -> None:
        """Listen no more; idempotent."""
        self._task.cancel()

    async def _wait(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self._cancel()


class _Reader:
    """Reads one generation for one HTTP client; however it ends, the work is stopped."""

    def __init__(self, watch: _Watch, generation: Generation, answer: Answer) -> None:
        self._generation = generation
        self._answer = answer
        self._headers = {"x-request-id": generation.request_id}
        self._watch = watch
        self.write_timeout_s = generation.remaining_s + WRITE_GRACE_S
        watch.follow(generation.cancel)

    async def whole(self) -> Response:
        """Return the one body, or the error."""
        pieces = []
        try:
            while not isinstance(event := await self._generation.next(), Finish):
                pieces.append(event.text)
        except PdserveError as error:
            return error_response(error, request_id=self._generation.request_id)
        finally:
            self.stop()
        body = self._answer.whole("".join([*pieces, event.text]), event)
        return Response(body, media_type="application/json", headers=self._headers)

    async def events(self) -> Response:
        """Return the stream when its first event is there, or the error."""
        try:
            first = await self._generation.next()
        except PdserveError as error:
            self.stop()
            return error_response(error, request_id=self._generation.request_id)
        except asyncio.CancelledError:
            self.stop()
            raise
        return _EventStream(self, first, self._headers)

    async def lines(self, event: Delta | Finish) -> AsyncIterator[str]:
        """Yield the SSE lines of the stream, from its first event on."""
        answer = self._answer
        try:
            yield _lines(answer.opening())
            while not isinstance(event, Finish):
                if event.text:
                    yield _lines([answer.delta(event.text)])
                event = await self._generation.next()
            yield _lines([*answer.closing(event), "[DONE]"])
        except PdserveError as error:
            yield _error_event(error)
        except Exception:
            logger.exception("request=%s stream failed", self._generation.request_id)
            yield _error_event(EngineFault("an internal error"))

    def stop(self) -> None:
        """Stop the work, if it isn't over; idempotent."""
        self._generation.cancel()
        self._watch.stop()


class _EventStream(StreamingResponse):
    """Server-sent events, until the end or until the client is too slow for its own deadline."""

    def __init__(self, reader: _Reader, first: Delta | Finish, headers: dict[str, str]) -> None:
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
