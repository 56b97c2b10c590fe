"""Errors as OpenAI's clients read them: one envelope for everything that goes wrong over HTTP."""

from __future__ import annotations

import math
from http import HTTPStatus

from fastapi.responses import Response
from pydantic import BaseModel

from cluster.errors import NoWorker, PdserveError, QueueFull, Unauthenticated
from router.public_errors import public_message

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ErrorBody(BaseModel):
    """What went wrong; ``param`` names the field of a client's mistake."""

    message: str
    type: str
    param: str | None = None
    code: str


class ErrorEnvelope(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorBody


def error_type(status: int) -> str:
    """Return OpenAI's word for a status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def envelope(error: PdserveError) -> ErrorEnvelope:
    """Return the body for an error of ours."""
    kind = error_type(error.http_status)
    body = ErrorBody(message=public_message(error), type=kind, param=error.field, code=error.code)
    return ErrorEnvelope(error=body)


def error_response(error: PdserveError, *, request_id: str | None = None) -> Response:
    """Return the answer for an error of ours."""
    headers = {} if request_id is None else {"x-request-id": request_id}
    if isinstance(error, QueueFull | NoWorker) or error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return _json(envelope(error), error.http_status, headers)


def plain_error(status: int, message: str, code: str) -> Response:
    """Return the answer for what HTTP itself refuses: routes, methods, heads, connections."""
    headers = {"retry-after": "1"} if status == HTTPStatus.SERVICE_UNAVAILABLE else {}
    body = ErrorBody(message=message, type=error_type(status), code=code)
    return _json(ErrorEnvelope(error=body), status, headers)


def _json(body: BaseModel, status: int, headers: dict[str, str]) -> Response:
    content = body.model_dump_json()
    return Response(content, status_code=status, headers=headers, media_type="application/json")
