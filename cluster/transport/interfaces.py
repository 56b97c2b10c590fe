"""The network interface that has an address: NCCL is told interfaces, everybody else addresses."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from cluster.errors import StartupError


def interface_of(host: str) -> str:
    """Return the name of the interface that owns ``host``, an address or a name of this machine.

    Raises StartupError where none does.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise StartupError(f"{host} is no address of this machine: {error}") from error
    wanted = {ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found}
    # All of 127.0.0.0/8 is one interface's, which lists a single address of it.
    wanted = {_LOOPBACK if _is_loopback_v4(address) else address for address in wanted}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if ipaddress.ip_address(entry.address.partition("%")[0]) in wanted:
                return name
    raise StartupError(f"no interface of this machine has the address {host}")


_LOOPBACK = ipaddress.ip_address("127.0.0.1")


def _is_loopback_v4(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.version == _LOOPBACK.version and address.is_loopback
