"""The gRPC door: pdserve.v1.Inference over a ``Service``, with health and reflection.

Codes and details are set and the handler returns; nothing is raised through gRPC. An error's
``code`` and field travel in the trailing metadata, as the HTTP body has them. A call's own gRPC
deadline counts as well as ``timeout_s``; a call that is cancelled stops its work.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]
from grpc_reflection.v1alpha import reflection

from cluster.errors import EngineFault, InvalidRequest, PdserveError, StartupError
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from router.events import Finish
from router.given import GenerateInput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cluster.lifetime import LegTimes, Timeline
    from router.events import Delta
    from router.service import Service

logger = logging.getLogger(__name__)

_SERVICE = "pdserve.v1.Inference"
_MAX_ID_CHARS = 128
_MAX_METADATA_BYTES = 16 << 10
_MIN_PING_INTERVAL_MS = 5000


class GrpcDoor:
    """One gRPC server. Several routers on a host share a port: the kernel spreads connections."""

    def __init__(self, service: Service, *, host: str, port: int) -> None:
        self._service = service
        self._address = f"{host}:{port}"
        self._server: grpc.aio.Server | None = None
        self._health = health_aio.HealthServicer()

    async def start(self) -> int:
        """Listen and return the port; raises StartupError where the address can't be had."""
        server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 1),
                ("grpc.max_receive_message_length", self._service.limits.max_body_bytes),
                ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
                ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
                ("grpc.keepalive_permit_without_calls", 1),
            )
        )
        pb_grpc.add_InferenceServicer_to_server(_Inference(self._service), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            port = server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {self._address} for gRPC") from error
        await server.start()
        for name in ("", _SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._server = server
        return int(port)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls and end those that run after ``grace_s``; idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await self._health.enter_graceful_shutdown()
            await server.stop(grace_s)


class _Inference(pb_grpc.InferenceServicer):
    def __init__(self, service: Service) -> None:
        self._service = service

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Stream one choice."""
        try:
            generation = await self._service.generate(_given(request, context.time_remaining()))
        except PdserveError as error:
            _fail(context, error)
            return
        request_id = generation.request_id
        # The handler may be at rest in a write when the client cancels: this is told anyway.
        context.add_done_callback(lambda _: generation.cancel())
        try:
            await context.send_initial_metadata((("x-request-id", request_id),))
            while not isinstance(event := await generation.next(), Finish):
                yield _delta(request_id, event)
            yield _last(request_id, event, with_timeline=request.timeline)
        except PdserveError as error:
            _fail(context, error)
        except Exception:
            logger.exception("request=%s stream failed", request_id)
            _fail(context, EngineFault("an internal error"))
        finally:
            generation.cancel()

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        """Stop a request of this router or of another."""
        try:
            if not 0 < len(request.request_id) <= _MAX_ID_CHARS:
                raise InvalidRequest("request_id is missing or too long", field="request_id")
            was_running = await self._service.cancel(request.request_id)
        except PdserveError as error:
            _fail(context, error)
            return pb.CancelResponse()
        return pb.CancelResponse(was_running=was_running)


def _given(request: pb.GenerateRequest, call_remaining_s: float | None) -> GenerateInput:
    """Return what a message asks for; what is not set in it is absent."""

    def value(name: str) -> Any:
        return getattr(request, name) if request.HasField(name) else None  # type: ignore[arg-type]

    kind = request.WhichOneof("input")
    turns = [{"role": turn.role, "content": turn.content} for turn in request.chat.messages]
    return GenerateInput(
        model=request.model or None,
        prompt=request.prompt if kind == "prompt" else None,
        messages=turns if kind == "chat" else None,
        prompt_ids=list(request.prompt_ids.ids) if kind == "prompt_ids" else None,
        max_tokens=value("max_tokens"),
        temperature=value("temperature"),
        top_p=value("top_p"),
        top_k=value("top_k"),
        seed=value("seed"),
        stop=list(request.stop),
        ignore_eos=value("ignore_eos"),
        timeout_s=value("timeout_s"),
        call_remaining_s=call_remaining_s,
        timeline=request.timeline,
    )


def _fail(context: Any, error: PdserveError) -> None:
    """Set the call's status; workers' names and causes stay here."""
    context.set_code(grpc.StatusCode[error.grpc_code])
    context.set_details(error.message)
    metadata = [("pdserve-code", error.code)]
    if error.field is not None:
        metadata.append(("pdserve-param", error.field))
    if error.retry_after_s is not None:
        metadata.append(("retry-after", str(max(1, math.ceil(error.retry_after_s)))))
    context.set_trailing_metadata(tuple(metadata))


def _delta(request_id: str, delta: Delta) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id=request_id, text=delta.text, token_ids=delta.token_ids)


def _last(request_id: str, finish: Finish, *, with_timeline: bool) -> pb.GenerateResponse:
    prompt, output = finish.num_prompt_tokens, finish.num_output_tokens
    return pb.GenerateResponse(
        request_id=request_id,
        text=finish.text,
        finish_reason=finish.finish_reason.value,
        usage=pb.Usage(
            prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output
        ),
        timeline=_timeline(finish.timeline) if with_timeline else None,
    )


def _timeline(timeline: Timeline) -> pb.Timeline:
    return pb.Timeline(
        total_s=timeline.total_s,
        first_token_s=timeline.first_token_s,
        queue_s=timeline.queue_s,
        prefill_worker=timeline.prefill_worker,
        decode_worker=timeline.decode_worker,
        reason=timeline.reason,
        prefill=_leg_times(timeline.prefill),
        decode=_leg_times(timeline.decode),
        num_attempts=timeline.num_attempts,
    )


def _leg_times(times: LegTimes) -> pb.LegTimes:
    return pb.LegTimes(
        queue_s=times.queue_s,
        compute_s=times.compute_s,
        reserve_wait_s=times.reserve_wait_s,
        transfer_s=times.transfer_s,
        exposed_s=times.exposed_s,
        transfer_bytes=times.transfer_bytes,
        num_steps=times.num_steps,
        num_computed_tokens=times.num_computed_tokens,
        num_cached_tokens=times.num_cached_tokens,
        num_preemptions=times.num_preemptions,
    )
