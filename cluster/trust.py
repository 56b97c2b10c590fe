"""Who belongs to this cluster: whoever shows its token, at every call to a worker or control plane.

The token keeps strangers from registering as workers, from asking for KV and from placing requests.
By itself it travels as it is, and does not help against whoever can read the cluster's network:
with certificates all calls among members are mutual TLS. Where there are some, no port is opened
and no channel made without them.
"""

from __future__ import annotations

import hmac
import os
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from cluster.errors import StartupError
from cluster.tls import MemberTls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence

    from cluster.config_security import SecurityConfig

    Options = Sequence[tuple[str, Any]]

_METADATA = "pdserve-cluster-token"
_OPEN = "/grpc.health.v1.Health/"
"""Whoever watches over a process has no token."""
_MIN_CHARS, _MAX_CHARS = 16, 512


class ClusterToken:
    """The token of this process; an empty one is asked of nobody, and shown to nobody.

    With it go the certificate of this process, if the deploy file names one, and so the ports and
    channels of calls inside the cluster.
    """

    def __init__(self, text: str = "", tls: MemberTls | None = None) -> None:
        self._text = text
        self._digest = sha256(text.encode()).digest()
        self._tls = tls
        self.num_refused = 0
        """Calls of strangers at the ports of this process."""

    @classmethod
    def load(cls, config: SecurityConfig, environ: Mapping[str, str] = os.environ) -> ClusterToken:
        """Read what the deploy file names; raises StartupError, which tells no token."""
        return cls(_read(config, environ), MemberTls(config) if config.has_cluster_tls else None)

    def channel(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        """Return a channel to another member; its calls show ``metadata``."""
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        options = (*options, *self._tls.options)
        return grpc.aio.secure_channel(address, self._tls.credentials, options=options)

    def blocking_channel(self, address: str, options: Options = ()) -> grpc.Channel:
        """Return the same for threads."""
        if self._tls is None:
            return grpc.insecure_channel(address, options=options)
        options = (*options, *self._tls.options)
        return grpc.secure_channel(address, self._tls.credentials, options=options)

    def open_port(self, server: grpc.aio.Server, address: str) -> int:
        """Open a port for other members; raises RuntimeError where it can't be had."""
        if self._tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, self._tls.server_credentials))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call shows."""
        return ((_METADATA, self._text),) if self._text else ()

    @property
    def guards(self) -> tuple[Any, ...]:
        """The ``grpc.aio`` interceptors that a server puts in front of all its methods."""
        return (_Guard(self),) if self._text else ()

    def is_shown_in(self, metadata: Iterable[tuple[str, Any]] | None) -> bool:
        """Whether a call's metadata shows this token, once; takes as long whatever it shows."""
        shown = [value for name, value in metadata or () if name == _METADATA]
        text = shown[0] if len(shown) == 1 and isinstance(shown[0], str) else ""
        return hmac.compare_digest(sha256(text.encode()).digest(), self._digest)


def _read(config: SecurityConfig, environ: Mapping[str, str]) -> str:
    if config.cluster_token_file:
        name = f"security.cluster_token_file: {config.cluster_token_file}"
        try:
            text = Path(config.cluster_token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise StartupError(f"{name} cannot be read on this node") from error
    elif config.cluster_token_env:
        name = f"security.cluster_token_env: {config.cluster_token_env}"
        if config.cluster_token_env not in environ:
            raise StartupError(f"{name} is not set on this node")
        text = environ[config.cluster_token_env].strip()
    else:
        return ""
    if not (_MIN_CHARS <= len(text) <= _MAX_CHARS and text.isascii() and text.isprintable()):
        raise StartupError(
            f"{name} is no token: {_MIN_CHARS} to {_MAX_CHARS} printable characters; "
            "`openssl rand -hex 32` makes one"
        )
    return text


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not so at run time
    def __init__(self, token: ClusterToken) -> None:
        self._token = token

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Pass the call on, or end it as UNAUTHENTICATED whatever it is."""
        is_open = handler_call_details.method.startswith(_OPEN)
        if is_open or self._token.is_shown_in(handler_call_details.invocation_metadata):
            return await continuation(handler_call_details)
        self._token.num_refused += 1
        # A handler of streams fits calls of every kind, and waits for no message.
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_requests: object, context: Any) -> AsyncIterator[bytes]:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster token is missing or wrong")
    yield b""
