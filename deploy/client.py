"""A small Python client of the public gRPC API.

with Client("127.0.0.1:8001") as client:
    for piece in client.generate(messages=[("user", "Hello")], max_tokens=20):
        print(piece.text, end="")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from cluster import errors
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

# The address is a door: a proxy of the environment has no part in it.
_CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0),)
_BY_GRPC_CODE = {error.grpc_code: error for error in errors.BY_CODE.values()}


class Client:
    """A connection to one gRPC door; thread-safe, closed by ``close`` or by leaving ``with``."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = pb_grpc.InferenceStub(self._channel)
        self._address = address

    def __enter__(self) -> Client:
        """Return the client itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connection."""
        self.close()

    def close(self) -> None:
        """Close the connection; running streams end as cancelled."""
        self._channel.close()

    def connect(self, *, timeout_s: float = 5.0) -> None:
        """Wait until the door answers; raises NoWorker where it doesn't.

        Calls connect by themselves; this tells a door that is closed from one that refuses.
        """
        try:
            grpc.channel_ready_future(self._channel).result(timeout=timeout_s)
        except grpc.FutureTimeoutError as error:
            raise errors.NoWorker(f"no gRPC door answers at {self._address}") from error

    def generate(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[tuple[str, str]] = (),
        **options: Any,
    ) -> Iterator[pb.GenerateResponse]:
        """Stream one choice; ``options`` are the other fields of GenerateRequest.

        ``messages`` are (role, content) pairs. Leaving the iterator early cancels the request.
        Raises the PdserveError that the server's status stands for.
        """
        request = pb.GenerateRequest(**options)
        if prompt is not None:
            request.prompt = prompt
        for role, content in messages:
            request.chat.messages.add(role=role, content=content)
        call = self._stub.Generate(request)
        try:
            yield from call
        except grpc.RpcError as error:
            raise _typed(error) from error
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def cancel(self, request_id: str, *, timeout_s: float = 5.0) -> bool:
        """Stop a running request by the id its first message carried; False: it wasn't running."""
        try:
            response = self._stub.Cancel(pb.CancelRequest(request_id=request_id), timeout=timeout_s)
        except grpc.RpcError as error:
            raise _typed(error) from error
        return bool(response.was_running)


def _typed(error: grpc.RpcError) -> errors.PdserveError:
    kind = _BY_GRPC_CODE.get(error.code().name, errors.EngineFault)
    return kind(error.details() or error.code().name)
