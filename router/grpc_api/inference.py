"""The methods of pdserve.v1.Inference.

A call's own gRPC deadline counts as well as ``timeout_s``; one that is cancelled stops its work.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import ParseDict

from cluster.errors import DeadlineExceeded, InvalidRequest
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from router.cluster_body import cluster_body
from router.grpc_api.keys import caller_of
from router.grpc_api.replies import Replies, Whole
from router.grpc_api.requests import generate_input, tokenize_input
from router.grpc_api.status import fail

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cluster.control.facts import ClusterView
    from router.calls import Call
    from router.given import GenerateInput
    from router.grpc_api.caps import GrpcCaps
    from router.service import Service

logger = logging.getLogger(__name__)


class Inference(pb_grpc.InferenceServicer):
    """Answers calls by what the service does."""

    def __init__(self, service: Service, caps: GrpcCaps) -> None:
        self._service = service
        self._caps = caps

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        """Stream the choices."""
        try:
            async with self._generating(request, context) as call:
                replies = Replies(call, self._service.codec)
                while not replies.is_whole:
                    await context.write(replies.message(await call.next()))
        except Exception as error:
            fail(context, error)

    async def GenerateOnce(
        self, request: pb.GenerateRequest, context: Any
    ) -> pb.GenerateOnceResponse:
        """Return all choices at once."""
        try:
            async with self._generating(request, context) as call:
                replies, whole = Replies(call, self._service.codec), Whole(call.num_all_choices)
                while not replies.is_whole:
                    whole.add(replies.message(await call.next()))
                return pb.GenerateOnceResponse(
                    request_id=call.request_id, choices=whole.choices, usage=replies.usage()
                )
        except Exception as error:
            fail(context, error)
            return pb.GenerateOnceResponse()

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        """Stop a call of this router or of another."""
        try:
            was_running = await self._cancel(request, context)
        except Exception as error:
            fail(context, error)
            return pb.CancelResponse()
        return pb.CancelResponse(was_running=was_running)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Return the token ids of a text or a chat."""
        try:
            with self._service.edge(caller_of(context, self._service.keys)):
                ids = await self._service.tokenise(tokenize_input(request, self._service.limits))
        except Exception as error:
            fail(context, error)
            return pb.TokenizeResponse()
        return pb.TokenizeResponse(tokens=ids, max_model_len=self._service.model.max_model_len)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeResponse:
        """Return the text of token ids."""
        try:
            with self._service.edge(caller_of(context, self._service.keys)):
                tokens = list(request.tokens)
                text = await self._service.detokenise(request.model or None, tokens)
        except Exception as error:
            fail(context, error)
            return pb.DetokenizeResponse()
        return pb.DetokenizeResponse(prompt=text)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        """Return the one model."""
        model = self._service.model
        card = pb.Model(id=model.name, created=model.created, max_model_len=model.max_model_len)
        return pb.ListModelsResponse(models=[card])

    async def GetCluster(self, request: pb.GetClusterRequest, context: Any) -> pb.Cluster:
        """Return the cluster as the control plane sees it."""
        try:
            return _cluster(self._service.view())
        except Exception as error:
            fail(context, error)
            return pb.Cluster()

    async def WatchCluster(self, request: pb.GetClusterRequest, context: Any) -> None:  # type: ignore[override]
        """Send the cluster now and when it has changed; ends when its picture is too old."""
        told: ClusterView | None = None
        try:
            with self._service.watching(caller_of(context, self._service.keys)):
                while True:
                    self._service.check_stays()
                    view = self._service.view()
                    if view is not told:
                        await context.write(_cluster(view))
                        told = view
                    await asyncio.sleep(self._caps.watch_beat_s)
        except Exception as error:
            fail(context, error)

    async def _cancel(self, request: pb.CancelRequest, context: Any) -> bool:
        if request.client_request_id:
            if request.request_id:
                raise InvalidRequest("give one of the two ids", field="client_request_id")
            caller = caller_of(context, self._service.keys)
            return await self._service.cancel_by_client_id(request.client_request_id, caller)
        if not 0 < len(request.request_id) <= self._service.limits.max_id_chars:
            raise InvalidRequest("request_id is missing or too long", field="request_id")
        return await self._service.cancel(request.request_id)

    @asynccontextmanager
    async def _generating(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[Call]:
        """Start a call, and stop it however it ends; raises what it ended with."""
        service, caller = self._service, caller_of(context, self._service.keys)
        with service.admission(caller):
            call = await service.generate(self._given(request, context), caller)
        # The handler may be at rest in a write when the client cancels: this is told anyway.
        context.add_done_callback(lambda _: call.cancel())
        try:
            async with asyncio.timeout(call.remaining_s + self._caps.write_grace_s):
                await context.send_initial_metadata(_metadata(call))
                yield call
        except TimeoutError:
            logger.warning("request=%s its client reads too slowly", call.request_id)
            raise DeadlineExceeded("the deadline passed", stage="decode") from None
        finally:
            call.cancel()

    def _given(self, request: pb.GenerateRequest, context: Any) -> GenerateInput:
        try:
            remaining_s = context.time_remaining()
            return generate_input(request, remaining_s, self._service.limits)
        except InvalidRequest as error:
            self._service.refused(error)
            raise


def _metadata(call: Call) -> tuple[tuple[str, str], ...]:
    own = call.client_request_id
    named = (("x-client-request-id", own),) if own else ()
    return (("x-request-id", call.request_id), *named)


def _cluster(view: ClusterView) -> pb.Cluster:
    return ParseDict(cluster_body(view).model_dump(), pb.Cluster())
