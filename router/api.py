"""The HTTP door: OpenAI's routes, health, metrics and the cluster, as an app over a ``Service``.

    key? ──401──▶
      │
      ▼
    route ─▶ ``http_generate`` (chat, completions) · ``http_info`` (everything else)

Whatever is refused, by us, FastAPI or Starlette, has one envelope.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response  # noqa: TC002 (FastAPI looks it up)
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cluster.errors import Cancelled, EngineFault
from router import openapi
from router.answers import ChatAnswer, TextAnswer
from router.http_auth import KeyGuard
from router.http_body import BodyReader, chat_input, completion_input
from router.http_errors import error_response, plain_error
from router.http_generate import GenerateDoor
from router.http_info import add_health, add_models

if TYPE_CHECKING:
    from router.service import Service

_PLAIN = {404: "there is no such route", 405: "this route does not take this method"}


def build_api(service: Service) -> FastAPI:
    """Return the app; the caller starts and stops the service."""
    api = FastAPI(title="pdserve", docs_url=None, redoc_url=None, redirect_slashes=False)
    api.add_middleware(KeyGuard, keys=service.keys)
    _add_envelopes(api)
    add_health(api, service)
    bodies = BodyReader(service.limits)
    add_models(api, service, bodies)
    door = GenerateDoor(service, bodies)

    @api.post("/v1/chat/completions", **openapi.chat(service.model, service.limits))
    async def chat_completions(request: Request) -> Response:
        """The assistant's next turn in a chat."""
        return await door.serve(request, chat_input, ChatAnswer)

    @api.post("/v1/completions", **openapi.completions(service.model, service.limits))
    async def completions(request: Request) -> Response:
        """How a text goes on."""
        return await door.serve(request, completion_input, TextAnswer)

    openapi.add_document(api, service.keys)
    return api


def _add_envelopes(api: FastAPI) -> None:
    """Make everything that FastAPI and Starlette refuse by themselves look like our errors."""

    @api.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        answer = plain_error(error.status_code, _PLAIN.get(error.status_code, "refused"), "http")
        answer.headers.update(error.headers or {})
        return answer

    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return plain_error(400, "the request is not valid", "invalid_request")

    @api.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return error_response(Cancelled("the client left", stage="edge"))

    @api.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(EngineFault("an internal error"))
