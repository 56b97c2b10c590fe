"""Certificates made on the fly: authorities, and what they sign."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

MEMBER = "pdserve-cluster"
_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """Paths of a certificate and its key."""

    certificate: str
    key: str


class Authority:
    """Signs certificates, and writes them to a folder."""

    def __init__(
        self,
        folder: Path,
        name: str = "ca",
        *,
        like: Authority | None = None,
        by: Authority | None = None,
    ) -> None:
        """``like`` another, with its key; signed ``by`` another, not by itself."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = like._key if like else ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signer = by or self
        certificate = (
            _builder(self._name, self._key, days=(-1, 2))
            .issuer_name(signer._name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(signer._key, hashes.SHA256())
        )
        self.file = str(folder / f"{name}.pem")
        Path(self.file).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def sign(self, *names: str, file: str = "", days: tuple[int, int] = (-1, 1)) -> Pair:
        """Sign a certificate for DNS names and addresses, valid from and to so many days on."""
        names = names or (MEMBER,)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        certificate = (
            _builder(subject, key, days)
            .issuer_name(self._name)
            .add_extension(x509.SubjectAlternativeName([_name(n) for n in names]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        path = self._folder / (file or names[0])
        pair = Pair(f"{path}.pem", f"{path}.key")
        Path(pair.certificate).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        Path(pair.key).write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair


def _builder(subject, key, days):
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + days[0] * _DAY)
        .not_valid_after(now + days[1] * _DAY)
    )


def _name(name: str):
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def member_tree(authority: Authority, pair: Pair | None = None) -> dict[str, str]:
    """The keys of a deploy file for members of an authority's."""
    pair = pair or authority.sign()
    return {
        "cluster_ca_file": authority.file,
        "cluster_certificate_file": pair.certificate,
        "cluster_key_file": pair.key,
    }
