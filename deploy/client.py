"""A small Python client of the public gRPC API.

with Client("127.0.0.1:8001") as client:
    for piece in client.generate(messages=[("user", "Hello")], max_tokens=20):
        print(piece.text, end="")

Where the cluster has API keys, ``Client(address, api_key=...)``; ``PDSERVE_API_KEY`` is taken where
none is given. Where its doors speak TLS, ``Client(address, tls=ClientTls(ca_file=...))``, and
where they ask for a certificate, its own from ``PDSERVE_CLIENT_CERTIFICATE`` and
``PDSERVE_CLIENT_KEY``. Fields of requests and answers are those of ``public_v1.proto``.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from cluster import errors
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]

T = TypeVar("T")

KEY_VARIABLE = "PDSERVE_API_KEY"
CERTIFICATE_VARIABLE, KEY_FILE_VARIABLE = "PDSERVE_CLIENT_CERTIFICATE", "PDSERVE_CLIENT_KEY"
_MAX_REPLY_BYTES = 256 << 20
# The address is a door: a proxy of the environment has no part in it. An answer in one piece with
# logprobs is larger than the 4 MB that gRPC takes unasked.
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", _MAX_REPLY_BYTES),
)
_BY_CODE = errors.BY_CODE
_BY_GRPC_CODE = {error.grpc_code: error for error in errors.BY_CODE.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """Whom a client trusts at a door that speaks TLS, and what it shows there. Files are PEM."""

    ca_file: str = ""
    """Who has signed the door's certificate; empty: whom this machine trusts."""
    certificate_file: str = ""
    """The client's own, where the door asks for one; empty: what the variable names, if any."""
    key_file: str = ""
    server_name: str = ""
    """The name in the door's certificate; empty: the address that is called."""

    def context(self) -> ssl.SSLContext:
        """Return it for HTTP; raises StartupError where a file can't be used."""
        certificate_file, key_file = self._own()
        named = self.ca_file or CERTIFICATE_VARIABLE
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if certificate_file:
                named = f"{certificate_file} with {key_file}"
                context.load_cert_chain(certificate_file, key_file)
        except OSError as error:
            raise errors.StartupError(f"{named}: no certificate to use: {error}") from error
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """Return it for gRPC; raises StartupError where a file can't be used."""
        self.context()
        # gRPC's own list of roots is not this machine's: it is given the same as HTTP.
        ca_file = self.ca_file or ssl.get_default_verify_paths().cafile
        certificate_file, key_file = self._own()
        return grpc.ssl_channel_credentials(
            root_certificates=Path(ca_file).read_bytes() if ca_file else None,
            private_key=Path(key_file).read_bytes() if certificate_file else None,
            certificate_chain=Path(certificate_file).read_bytes() if certificate_file else None,
        )

    def _own(self) -> tuple[str, str]:
        if self.certificate_file:
            return self.certificate_file, self.key_file or self.certificate_file
        certificate_file = os.environ.get(CERTIFICATE_VARIABLE, "")
        return certificate_file, os.environ.get(KEY_FILE_VARIABLE, "") or certificate_file


class Client:
    """A connection to one gRPC door; thread-safe, closed by ``close`` or by leaving ``with``.

    Every method raises the PdserveError that the server's status stands for.
    """

    def __init__(
        self, address: str, *, api_key: str | None = None, tls: ClientTls | None = None
    ) -> None:
        """Raises StartupError where a file of ``tls`` can't be used."""
        self._channel = _channel(address, tls)
        self._stub = pb_grpc.InferenceStub(self._channel)
        self._address = address
        self._metadata = tuple(authorization(api_key).items())

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
        prompt: Prompt | None = None,
        messages: Sequence[tuple[str, str] | pb.Message] = (),
        deadline_s: float | None = None,
        **options: Any,
    ) -> Iterator[pb.GenerateResponse]:
        """Stream the choices; ``options`` are the other fields of GenerateRequest.

        ``prompt`` is a text, token ids, or a list of several of either; ``messages`` are (role,
        content) pairs or Messages. Leaving the iterator early cancels the call.
        """
        request = _request(prompt, messages, options)
        call = self._stub.Generate(request, timeout=deadline_s, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise _typed(error) from error
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def generate_once(
        self,
        *,
        prompt: Prompt | None = None,
        messages: Sequence[tuple[str, str] | pb.Message] = (),
        deadline_s: float | None = None,
        **options: Any,
    ) -> pb.GenerateOnceResponse:
        """Return all choices in one piece; takes what ``generate`` takes."""
        request = _request(prompt, messages, options)
        return self._call(self._stub.GenerateOnce, request, deadline_s)

    def cancel(
        self, request_id: str = "", *, client_request_id: str = "", timeout_s: float = 5.0
    ) -> bool:
        """Stop a running call, by the id its messages carry or by its own; whether it was running.

        ``client_request_id`` is what the call was given, by a client of the same tenant.
        """
        request = pb.CancelRequest(request_id=request_id, client_request_id=client_request_id)
        return bool(self._call(self._stub.Cancel, request, timeout_s).was_running)

    def tokenize(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[tuple[str, str] | pb.Message] = (),
        timeout_s: float = 30.0,
    ) -> list[int]:
        """Return the token ids of a text or a chat."""
        if prompt is not None and messages:
            raise errors.InvalidRequest("give either prompt or messages", field="prompt")
        request = pb.TokenizeRequest()
        if prompt is not None:
            request.prompt = prompt
        if messages:
            request.chat.CopyFrom(_chat(messages))
        return list(self._call(self._stub.Tokenize, request, timeout_s).tokens)

    def detokenize(self, tokens: Sequence[int], *, timeout_s: float = 30.0) -> str:
        """Return the text of token ids."""
        request = pb.DetokenizeRequest(tokens=tokens)
        return str(self._call(self._stub.Detokenize, request, timeout_s).prompt)

    def models(self, *, timeout_s: float = 5.0) -> list[pb.Model]:
        """Return the models that are served: one."""
        answer = self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout_s)
        return list(answer.models)

    def cluster(self, *, timeout_s: float = 5.0) -> pb.Cluster:
        """Return workers, links and queue as the control plane sees them."""
        return self._call(self._stub.GetCluster, pb.GetClusterRequest(), timeout_s)

    def watch_cluster(self) -> Iterator[pb.Cluster]:
        """Yield the cluster now and after each change, until the iterator is left."""
        call = self._stub.WatchCluster(pb.GetClusterRequest(), metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise _typed(error) from error
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def _call(self, method: Callable[..., T], request: object, timeout_s: float | None) -> T:
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _typed(error) from error


def authorization(api_key: str | None = None) -> dict[str, str]:
    """Return the header, or metadata entry, of a key: the variable's where none is given."""
    key = os.environ.get(KEY_VARIABLE) if api_key is None else api_key
    return {"authorization": f"Bearer {key}"} if key else {}


def _channel(address: str, tls: ClientTls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
    name = (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()
    return grpc.secure_channel(address, tls.credentials(), options=(*_CHANNEL_OPTIONS, *name))


def _request(
    prompt: Prompt | None,
    messages: Sequence[tuple[str, str] | pb.Message],
    options: dict[str, Any],
) -> pb.GenerateRequest:
    if prompt is not None and messages:
        raise errors.InvalidRequest("give either prompt or messages", field="prompt")
    request = pb.GenerateRequest(**options)
    if isinstance(prompt, str):
        request.prompt = prompt
    elif prompt is not None and prompt and not isinstance(prompt[0], int):
        for item in prompt:
            request.prompts.prompts.append(
                pb.Prompt(text=item)
                if isinstance(item, str)
                else pb.Prompt(ids=pb.TokenIds(ids=item))  # type: ignore[arg-type]
            )
    elif prompt is not None:
        request.prompt_ids.CopyFrom(pb.TokenIds(ids=prompt))  # type: ignore[arg-type]
    if messages:
        request.chat.MergeFrom(_chat(messages))
    return request


def _chat(messages: Sequence[tuple[str, str] | pb.Message]) -> pb.Chat:
    return pb.Chat(
        messages=[
            message
            if isinstance(message, pb.Message)
            else pb.Message(role=message[0], content=message[1])
            for message in messages
        ]
    )


def _typed(error: grpc.RpcError) -> errors.PdserveError:
    entries: Any = error.trailing_metadata() or ()
    trailing: dict[str, str] = dict(entries)
    by_status = _BY_GRPC_CODE.get(error.code().name, errors.EngineFault)
    kind = _BY_CODE.get(trailing.get("pdserve-code", ""), by_status)
    retry_after = trailing.get("retry-after")
    return kind(
        error.details() or error.code().name,
        field=trailing.get("pdserve-param"),
        retry_after_s=float(retry_after) if retry_after else None,
    )
