"""Whether two authorities are one: by their keys and names, whatever files they are in.

A certificate is DER (RFC 5280, section 4.1); what is compared are fields of its first part:

    version (optional), serial, algorithm, issuer, validity, subject, public key, ...

A field is a tag, a length (one byte, or 0x80 + n and n bytes), and so many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

_LONG = 0x80
_VERSION_TAG = 0xA0
_ISSUER, _SUBJECT, _PUBLIC_KEY = 2, 4, 5
"""Places of the fields, counted from the serial."""


@dataclass(frozen=True, slots=True)
class _Authority:
    issuer: bytes
    subject: bytes
    public_key: bytes


def is_trusted_by(inner: ssl.SSLContext, outer: ssl.SSLContext) -> bool:
    """Whether an authority that ``inner`` has loaded is one of ``outer``'s, or signed by one.

    It is one with the same key, under whatever name and serial.
    """
    above = [_read(der) for der in outer.get_ca_certs(binary_form=True)]
    keys, names = {each.public_key for each in above}, {each.subject for each in above}
    return any(
        each.public_key in keys or (each.issuer != each.subject and each.issuer in names)
        for each in (_read(der) for der in inner.get_ca_certs(binary_form=True))
    )


def _read(der: bytes) -> _Authority:
    (_, certificate), *_ = _fields(der)
    (_, signed), *_ = _fields(certificate)
    fields = [content for tag, content in _fields(signed) if tag != _VERSION_TAG]
    return _Authority(fields[_ISSUER], fields[_SUBJECT], fields[_PUBLIC_KEY])


def _fields(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Iterate over tags and contents; OpenSSL has parsed it, so the lengths are right."""
    at = 0
    while at < len(der):
        tag, length, start = der[at], der[at + 1], at + 2
        if length > _LONG:
            num_bytes = length - _LONG
            length = int.from_bytes(der[start : start + num_bytes], "big")
            start += num_bytes
        at = start + length
        yield tag, der[start:at]
