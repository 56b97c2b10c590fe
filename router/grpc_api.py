"""The gRPC door: pdserve.v1.Inference over a ``Service``, with health and reflection.

Codes and details are set and the handler returns; nothing is raised through gRPC. An error's
``code`` and field travel in the trailing metadata, as the HTTP body has them. A call's own gRPC
deadline counts as well as ``timeout_s``; a call that is cancelled stops its work.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]
from grpc_reflection.v1alpha import reflection

from cluster.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    PdserveError,
    StartupError,
)
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from router.events import Finish
from router.given import GenerateInput
from router.public_errors import public_message

if TYPE_CHECKING:
    from cluster.lifetime import LegTimes, Timeline
    from router.dispatch import Generation
    from router.events import Delta
    from router.service import Service

logger = logging.getLogger(__name__)

_SERVICE = "pdserve.v1.Inference"
_MAX_ID_CHARS = 128
_MAX_METADATA_BYTES = 16 << 10
_MIN_PING_INTERVAL_MS = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcCaps:
    """Bounds of the gRPC door."""

    health_beat_s: float = 1.0
    """Between two looks at the cluster's readiness."""
    keepalive_s: float = 10.0
    """Between two pings to a silent client."""
    ping_timeout_s: float = 5.0
    """For its answer: a client that is stopped is found after both."""
    write_grace_s: float = 5.0
    """A client may read so long after its request's deadline."""
    connection_age_s: float = 900.0
    """Then a client is asked to connect again, and cut off when the longest deadline is over:
    grpc.aio can't reset one stream that its client doesn't read."""
    max_streams: int = 1024
    """Of one connection."""


class GrpcDoor:
    """One gRPC server. Several routers on a host share a port: the kernel spreads connections."""

    def __init__(
        self, service: Service, *, host: str, port: int, caps: GrpcCaps | None = None
    ) -> None:
        self._service = service
        self._address = f"{host}:{port}"
        self._caps = caps or GrpcCaps()
        self._server: grpc.aio.Server | None = None
        self._health = health_aio.HealthServicer()
        self._beat: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        """Whether calls are taken and health is told."""
        return self._server is not None and self._beat is not None and not self._beat.done()

    async def start(self) -> int:
        """Listen and return the port; raises StartupError where the address can't be had."""
        server = grpc.aio.server(options=self._options())
        pb_grpc.add_InferenceServicer_to_server(_Inference(self._service, self._caps), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            port = server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {self._address} for gRPC") from error
        await self._tell_health()
        await server.start()
        self._server = server
        self._beat = asyncio.create_task(self._keep_health())
        return int(port)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls and end those that run after ``grace_s``; idempotent."""
        server, self._server = self._server, None
        if server is not None:
            if self._beat is not None:
                self._beat.cancel()
                await asyncio.wait([self._beat])
            await self._health.enter_graceful_shutdown()
            await server.stop(grace_s)

    def _options(self) -> tuple[tuple[str, int], ...]:
        caps, limits = self._caps, self._service.limits
        last_words_s = limits.max_deadline_s + caps.write_grace_s
        return (
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", limits.max_body_bytes),
            ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
            ("grpc.max_concurrent_streams", caps.max_streams),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.ping_timeout_ms", _ms(caps.ping_timeout_s)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", _ms(caps.keepalive_s)),
            ("grpc.keepalive_timeout_ms", _ms(caps.ping_timeout_s)),
            ("grpc.max_connection_age_ms", _ms(caps.connection_age_s)),
            ("grpc.max_connection_age_grace_ms", _ms(last_words_s)),
        )

    async def _keep_health(self) -> None:
        told: bool | None = None
        while True:
            is_ready = self._service.readiness().is_ready
            if is_ready is not told:
                await self._tell_health()
                told = is_ready
            await asyncio.sleep(self._caps.health_beat_s)

    async def _tell_health(self) -> None:
        """Say whether a request could be placed, as /health/ready does."""
        is_ready = self._service.readiness().is_ready
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if is_ready else statuses.NOT_SERVING
        for name in ("", _SERVICE):
            await self._health.set(name, status)


class _Inference(pb_grpc.InferenceServicer):
    def __init__(self, service: Service, caps: GrpcCaps) -> None:
        self._service = service
        self._caps = caps

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        """Stream one choice."""
        try:
            with self._service.admission():
                generation = await self._service.generate(_given(request, context.time_remaining()))
        except Exception as error:
            _fail(context, error)
            return
        # The handler may be at rest in a write when the client cancels: this is told anyway.
        context.add_done_callback(lambda _: generation.cancel())
        try:
            async with asyncio.timeout(generation.remaining_s + self._caps.write_grace_s):
                await _stream(generation, context, with_timeline=request.timeline)
        except TimeoutError:
            logger.warning("request=%s its client reads too slowly", generation.request_id)
            _fail(context, DeadlineExceeded("the deadline passed", stage="decode"))
        except Exception as error:
            _fail(context, error)
        finally:
            generation.cancel()

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        """Stop a request of this router or of another."""
        try:
            if not 0 < len(request.request_id) <= _MAX_ID_CHARS:
                raise InvalidRequest("request_id is missing or too long", field="request_id")
            was_running = await self._service.cancel(request.request_id)
        except Exception as error:
            _fail(context, error)
            return pb.CancelResponse()
        return pb.CancelResponse(was_running=was_running)


async def _stream(generation: Generation, context: Any, *, with_timeline: bool) -> None:
    """Write to the client as fast as it reads."""
    request_id = generation.request_id
    await context.send_initial_metadata((("x-request-id", request_id),))
    while not isinstance(event := await generation.next(), Finish):
        await context.write(_delta(request_id, event))
    await context.write(_last(request_id, event, with_timeline=with_timeline))


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


def _ms(seconds: float) -> int:
    return math.ceil(1000.0 * seconds)


def _fail(context: Any, error: Exception) -> None:
    """Set the call's status; what is no error of ours is a fault of ours, told in the log."""
    if not isinstance(error, PdserveError):
        logger.error("a call failed", exc_info=error)
        error = EngineFault("a call failed", stage="edge")
    context.set_code(grpc.StatusCode[error.grpc_code])
    context.set_details(public_message(error))
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
