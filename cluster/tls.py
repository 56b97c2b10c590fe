"""Certificates: read and checked when a process starts, by the key of the deploy file.

Whoever has a certificate is met as its peers will meet it: a TLS handshake in memory, in which it
is its own peer. What they would refuse (an expired certificate, another CA's, another name) ends
the start. Files are read once: new ones are taken at the next start of a process.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from cluster.certificates import is_trusted_by
from cluster.errors import StartupError

if TYPE_CHECKING:
    from cluster.config_security import SecurityConfig

_BEGIN = b"-----BEGIN "
_FAILED = ("Tls handshake failed", "Custom verification check failed")
"""gRPC's words; the second ones for a name that is not in the certificate."""
_MAX_ROUNDS = 16
"""Messages each way in which a handshake is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """Paths of PEM files by their keys in the deploy file."""

    certificate_name: str
    certificate: str
    key_name: str
    key: str
    ca_name: str = ""
    ca: str = ""


class MemberTls:
    """The certificate of a member of the cluster, who serves and calls by mutual TLS."""

    def __init__(self, security: SecurityConfig) -> None:
        """Raises StartupError, naming the key, where a member with these files would be refused."""
        files = _Files(
            certificate_name="security.cluster_certificate_file",
            certificate=security.cluster_certificate_file,
            key_name="security.cluster_key_file",
            key=security.cluster_key_file,
            ca_name="security.cluster_ca_file",
            ca=security.cluster_ca_file,
        )
        certificate, key, ca = _read(files)
        name = security.cluster_certificate_name
        _prove(_server_context(files, clients_ca=files.ca), _client_context(files), files, name)
        self._credentials = grpc.ssl_channel_credentials(
            root_certificates=ca, private_key=key, certificate_chain=certificate
        )
        self._server_credentials = grpc.ssl_server_credentials(
            [(key, certificate)], root_certificates=ca, require_client_auth=True
        )
        self._name = name

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        """What a channel to another member is made with."""
        return self._credentials

    @property
    def server_credentials(self) -> grpc.ServerCredentials:
        """What a port for other members is opened with."""
        return self._server_credentials

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        """What a channel needs besides: members go by one name, whatever their addresses are."""
        return (("grpc.ssl_target_name_override", self._name),)


class DoorTls:
    """The certificate of both doors; and, where they have to show one, whose clients' they take."""

    def __init__(self, security: SecurityConfig) -> None:
        """Raises StartupError, naming the key, where clients would refuse these files."""
        clients_ca = security.door_clients_ca_file
        files = _Files(
            certificate_name="security.door_certificate_file",
            certificate=security.door_certificate_file,
            key_name="security.door_key_file",
            key=security.door_key_file,
        )
        certificate, key, _ = _read(files)
        roots = _pem("security.door_clients_ca_file", clients_ca) if clients_ca else None
        # Whom its clients trust is not known here: dates are checked, and that it serves.
        _prove(_server_context(files), _client_context(files), files, "")
        self.context = _server_context(files, clients_ca=clients_ca)
        """For the HTTP door."""
        if clients_ca and security.cluster_ca_file:
            _check_apart(clients_ca, security.cluster_ca_file)
        self._server_credentials = grpc.ssl_server_credentials(
            [(key, certificate)], root_certificates=roots, require_client_auth=bool(clients_ca)
        )

    @property
    def server_credentials(self) -> grpc.ServerCredentials:
        """What the gRPC door is opened with."""
        return self._server_credentials


def refusal(error: grpc.RpcError) -> str:
    """Return why a call's handshake failed; empty where it was not that."""
    details = error.details() or "" if isinstance(error, grpc.aio.AioRpcError | grpc.Call) else ""
    for words in _FAILED:
        _, is_told, reason = details.partition(words)
        if is_told:
            return f"TLS handshake failed{reason}"
    return ""


def _read(files: _Files) -> tuple[bytes, bytes, bytes]:
    certificate = _pem(files.certificate_name, files.certificate)
    key = _pem(files.key_name, files.key)
    return certificate, key, _pem(files.ca_name, files.ca) if files.ca else b""


def _pem(name: str, path: str) -> bytes:
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise StartupError(
            f"{name}: {path} cannot be read on this node: {error.strerror}"
        ) from error
    if _BEGIN not in text:
        raise StartupError(f"{name}: {path} is not PEM")
    return text


def _server_context(files: _Files, clients_ca: str = "") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_chain(context, files)
    if clients_ca:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_ca(context, files.ca_name or "security.door_clients_ca_file", clients_ca)
    return context


def _client_context(files: _Files) -> ssl.SSLContext:
    """Trust the CA, and show the certificate; without a CA the certificate itself is trusted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if files.ca:
        _load_ca(context, files.ca_name, files.ca)
        _load_chain(context, files)
    else:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.check_hostname = False
        _load_ca(context, files.certificate_name, files.certificate)
    return context


def _load_ca(context: ssl.SSLContext, name: str, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise StartupError(f"{name}: {path} holds no certificate") from error


def _check_apart(clients_ca: str, cluster_ca: str) -> None:
    """Raise StartupError where whoever may be a client could be a member too."""
    _pem("security.cluster_ca_file", cluster_ca)
    clients, members = (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) for _ in range(2))
    _load_ca(clients, "security.door_clients_ca_file", clients_ca)
    _load_ca(members, "security.cluster_ca_file", cluster_ca)
    if is_trusted_by(clients, members):
        raise StartupError(
            f"security.door_clients_ca_file: {clients_ca} has the CA of "
            f"security.cluster_ca_file, {cluster_ca}, or one that it has signed: each client would "
            "be a member of the cluster"
        )


def _load_chain(context: ssl.SSLContext, files: _Files) -> None:
    def refuse_password() -> str:
        raise StartupError(f"{files.key_name}: {files.key} is encrypted")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(files.certificate)
    except ssl.SSLError as error:
        raise StartupError(
            f"{files.certificate_name}: {files.certificate} holds no certificate"
        ) from error
    try:
        context.load_cert_chain(files.certificate, files.key, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"{files.key} is not the key of {files.certificate_name}, {files.certificate}"
        else:
            why = f"{files.key} holds no private key"
        raise StartupError(f"{files.key_name}: {why}") from error


def _prove(server: ssl.SSLContext, client: ssl.SSLContext, files: _Files, name: str) -> None:
    """Shake hands with oneself; raises StartupError with the reason that a peer would have."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name or None),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_MAX_ROUNDS):
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                raise StartupError(
                    f"{files.certificate_name}: {files.certificate}: {error.verify_message}"
                    + (f" (by {files.ca_name}: {files.ca})" if files.ca else "")
                ) from error
            except ssl.SSLError as error:
                raise StartupError(
                    f"{files.certificate_name}: {files.certificate}: {error.reason}"
                ) from error
            ends.remove(end)
        if not ends:
            return
    raise StartupError(f"{files.certificate_name}: {files.certificate}: no handshake comes of it")
