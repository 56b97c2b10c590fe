"""The routes that generate nothing: health, metrics, models, tokens, the cluster."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from fastapi import Request  # noqa: TC002 (FastAPI looks it up)
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from cluster.errors import EngineFault, PdserveError
from router import metrics, openapi
from router.cluster_body import ClusterBody, cluster_body
from router.http_auth import caller_of
from router.http_body import tokenize_input
from router.http_errors import error_response
from router.openai_shapes import (
    DetokenizeAnswer,
    Health,
    ModelCard,
    ModelList,
    TokenizeAnswer,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fastapi import FastAPI
    from pydantic import BaseModel

    from router.http_body import BodyReader
    from router.service import Service

logger = logging.getLogger(__name__)


def add_health(api: FastAPI, service: Service) -> None:
    """Add what tells how the router is."""

    @api.get("/health/live")
    async def live() -> Health:
        """Whether this process answers."""
        return Health(status="live")

    @api.get("/health/ready", response_model=Health, responses=openapi.NOT_READY)
    async def ready() -> Response:
        """Whether requests can be served now; if not, what is missing."""
        readiness = service.readiness()
        status = "ready" if readiness.is_ready else "not ready"
        body = Health(
            status=status, missing=list(readiness.missing), reasons=list(readiness.reasons)
        )
        return _json(body, 200 if readiness.is_ready else 503)

    @api.get("/metrics", response_class=Response, responses=openapi.METRICS)
    async def prometheus() -> Response:
        """Prometheus' text format: this router's counters, and the cluster as all see it."""
        return Response(service.metrics.text(), media_type=metrics.CONTENT_TYPE)


def add_models(api: FastAPI, service: Service, bodies: BodyReader) -> None:
    """Add what tells about the model and its tokens, and about the cluster."""

    @api.get("/v1/models", responses=openapi.errors(401))
    async def models() -> ModelList:
        """The one model that is served."""
        model = service.model
        return ModelList(
            data=[
                ModelCard(id=model.name, created=model.created, max_model_len=model.max_model_len)
            ]
        )

    @api.get("/v1/cluster", response_model=ClusterBody, responses=openapi.errors(401, 503))
    async def cluster() -> Response:
        """Workers, links and queue as the control plane sees them."""
        try:
            return _json(cluster_body(service.view()))
        except PdserveError as error:
            return error_response(error)

    @api.post("/tokenize", **openapi.tokenize(service.limits))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or a chat."""

        async def answer(body: dict[str, object]) -> BaseModel:
            ids = list(await service.tokenise(tokenize_input(body)))
            longest = service.model.max_model_len
            return TokenizeAnswer(count=len(ids), max_model_len=longest, tokens=ids)

        return await _answer(request, service, bodies, answer)

    @api.post("/detokenize", **openapi.detokenize(service.model))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""

        async def answer(body: dict[str, object]) -> BaseModel:
            text = await service.detokenise(body.get("model"), body.get("tokens"))
            return DetokenizeAnswer(prompt=text)

        return await _answer(request, service, bodies, answer)


async def _answer(
    request: Request,
    service: Service,
    bodies: BodyReader,
    answer: Callable[[dict[str, object]], Awaitable[BaseModel]],
) -> Response:
    """Read a body and answer it, whatever happens, with a response of ours."""
    caller = caller_of(request)
    try:
        with service.reading(caller, generates=False):
            body = await bodies.read_object(request)
        with service.edge(caller):
            return _json(await answer(body))
    except PdserveError as error:
        return error_response(error)
    except (ClientDisconnect, asyncio.CancelledError):
        raise
    except Exception:
        logger.exception("a call failed at the edge")
        return error_response(EngineFault("a call failed at the edge", stage="edge"))


def _json(body: BaseModel, status: int = 200) -> Response:
    return Response(body.model_dump_json(), status_code=status, media_type="application/json")
