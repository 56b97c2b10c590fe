"""What a deploy file may say of keys, tokens and certificates, and which of it goes together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cluster.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Where API keys are read from, ``tenant=key`` a line; nothing set: no key is needed."""

    keys_file: str = ""
    """A file, on each host that runs a router."""
    keys_env: str = ""
    """An environment variable of the routers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Who belongs to the cluster, and what is encrypted. Files are absolute, and on each node.

    What is not named is not asked for, and what is named is never done without.
    """

    cluster_token_file: str = ""
    """A file with nothing but the cluster token: who shows it belongs to the cluster."""
    cluster_token_env: str = ""
    """An environment variable of Ray on every node, and of the commands that ask the cluster."""
    cluster_ca_file: str = ""
    """PEM, as all below: who signs the certificates of control plane, routers and workers, and of
    nobody else: they are members. With it all gRPC inside the cluster is mutual TLS; the three
    files are named together."""
    cluster_certificate_file: str = ""
    """A member's, with its chain. It serves and calls."""
    cluster_key_file: str = ""
    cluster_certificate_name: str = "pdserve-cluster"
    """The DNS name that each member's certificate has, whatever its address is."""
    door_certificate_file: str = ""
    """With it and its key HTTP and gRPC are served by TLS only."""
    door_key_file: str = ""
    door_clients_ca_file: str = ""
    """Who signs the certificates that clients of both doors must show; empty: they need none."""
    door_ca_file: str = ""
    """Whom our own commands trust at the doors; empty: whom this machine trusts."""
    door_certificate_name: str = ""
    """The name that they expect in the doors' certificate; empty: endpoints.host."""

    @property
    def has_token(self) -> bool:
        """Whether one is asked for."""
        return bool(self.cluster_token_file or self.cluster_token_env)

    @property
    def has_cluster_tls(self) -> bool:
        """Whether the cluster's own calls are encrypted."""
        return bool(self.cluster_certificate_file)

    @property
    def has_door_tls(self) -> bool:
        """Whether the doors are."""
        return bool(self.door_certificate_file)


_CLUSTER_TLS = ("cluster_ca_file", "cluster_certificate_file", "cluster_key_file")
_DOOR_TLS = ("door_certificate_file", "door_key_file")
_TOGETHER = (
    (_CLUSTER_TLS, ()),
    (_DOOR_TLS, ("door_clients_ca_file", "door_ca_file", "door_certificate_name")),
)
"""Files that are of no use without the first of each, and others that are of no use either."""


def check_auth(auth: AuthConfig) -> None:
    """Raise ConfigError, naming the key, where a file of keys would not be found."""
    if auth.keys_file and not auth.keys_file.startswith("/"):
        raise ConfigError(
            "auth.keys_file: must be an absolute path, since routers may start in any folder",
            field="auth.keys_file",
        )


def check(security: SecurityConfig) -> None:
    """Raise ConfigError, naming the key, where files do not go together."""
    path = "security.cluster_token_file"
    if security.cluster_token_file and security.cluster_token_env:
        raise ConfigError(f"{path}: security.cluster_token_env names the token already", field=path)
    for f in dataclasses.fields(security):
        value, path = str(getattr(security, f.name)), f"security.{f.name}"
        if f.name.endswith("_file") and value and not value.startswith("/"):
            raise ConfigError(
                f"{path}: must be an absolute path, since it is read on every node", field=path
            )
    for names, others in _TOGETHER:
        named = [name for name in (*names, *others) if getattr(security, name)]
        missing = [name for name in names if not getattr(security, name)]
        if named and missing:
            path = f"security.{missing[0]}"
            raise ConfigError(f"{path}: needed with security.{named[0]}", field=path)
    path = "security.door_clients_ca_file"
    if security.door_clients_ca_file and security.door_clients_ca_file == security.cluster_ca_file:
        raise ConfigError(
            f"{path}: the cluster's own CA: each client would be a member of the cluster",
            field=path,
        )
