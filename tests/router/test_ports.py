"""Who else of this host listens at a router's port."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

import pytest

from router.ports import is_shared

LISTEN = """
import socket, sys
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
listener.bind((sys.argv[1], int(sys.argv[2])))
listener.listen()
print("listens", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def listening(host: str, port: int):
    """Another process that listens there."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", LISTEN, host, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "listens\n"
        yield
    finally:
        process.communicate(timeout=10)


@pytest.fixture
def port():
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        own.bind(("127.0.0.1", 0))
        own.listen()
        yield own.getsockname()[1]


def test_a_port_is_shared_while_another_process_listens_there_too(port):
    assert not is_shared(port)
    with listening("127.0.0.1", port):
        assert is_shared(port)
    assert not is_shared(port)


def test_the_same_port_of_another_address_is_another_door(port):
    with listening("127.0.0.2", port):
        assert not is_shared(port)
