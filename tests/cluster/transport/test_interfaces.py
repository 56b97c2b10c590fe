"""S-03: NCCL's sockets are told the interface of the address that everything else is bound to."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from cluster.errors import StartupError
from cluster.transport import torch_dist
from cluster.transport.interfaces import interface_of
from cluster.transport.torch_dist import TorchDistTransport


@pytest.fixture
def two_networks(monkeypatch):
    def entry(family, address):
        return SimpleNamespace(family=family, address=address)

    interfaces = {
        "lo": [entry(socket.AF_INET, "127.0.0.1"), entry(socket.AF_INET6, "::1")],
        "outside": [entry(psutil.AF_LINK, "02:00"), entry(socket.AF_INET, "192.0.2.10")],
        "inside": [entry(socket.AF_INET, "10.0.0.2"), entry(socket.AF_INET6, "fe80::2%inside")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)


@pytest.mark.parametrize(
    ("host", "name"),
    [("127.0.0.1", "lo"), ("127.0.0.3", "lo"), ("::1", "lo"), ("10.0.0.2", "inside"),
     ("192.0.2.10", "outside"), ("fe80::2", "inside"), ("localhost", "lo")],
)  # fmt: skip
def test_an_address_is_one_interfaces(host, name, two_networks):
    assert interface_of(host) == name


@pytest.mark.parametrize("host", ["192.0.2.77", "no such name"])
def test_an_address_that_is_not_this_machines_is_refused(host, two_networks):
    with pytest.raises(StartupError, match=host):
        interface_of(host)


def test_this_machine_has_its_loopback():
    assert interface_of("127.0.0.1") in psutil.net_if_addrs()


def test_nccl_is_told_it_before_a_group_is_made(monkeypatch, two_networks):
    told = {}

    def make(*_):
        told.update(torch_dist.os.environ)
        raise RuntimeError("no GPU here")

    monkeypatch.setattr(torch_dist.dist, "ProcessGroupNCCL", make, raising=False)
    monkeypatch.setattr(torch_dist.os, "environ", {})
    make.Options = SimpleNamespace
    transport = TorchDistTransport(device="cuda", bind_host="10.0.0.2")
    with pytest.raises(RuntimeError):
        transport._make_nccl(None, 0)
    assert told["NCCL_SOCKET_IFNAME"] == "=inside"
