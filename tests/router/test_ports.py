"""Who else of this host listens at a router's port, and how one of them leaves it."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import time

import pytest

from router.ports import is_shared, let_in, listen_no_more, turn, turn_away

NUM_KNOCKS = 24
LISTEN = """
import os, socket, sys
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
listener.bind((sys.argv[1], int(sys.argv[2])))
listener.listen()
print(os.fstat(listener.fileno()).st_ino, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def listening(host: str, port: int):
    """Another process that listens there; yields its socket's inode."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", LISTEN, host, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield int(process.stdout.readline())
    finally:
        process.communicate(timeout=10)


@pytest.fixture
def own():
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        own.bind(("127.0.0.1", 0))
        own.listen()
        yield own


@pytest.fixture
def port(own):
    return own.getsockname()[1]


def knock(stack, port: int) -> list[socket.socket]:
    """Connections that were asked for; nobody waits until they are there."""
    knocks = []
    for _ in range(NUM_KNOCKS):
        client = stack.enter_context(socket.socket())
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            client.connect(("127.0.0.1", port))
        knocks.append(client)
    return knocks


def wait_settled(clients) -> None:
    """Until each is connected or refused."""
    until = time.monotonic() + 10
    with selectors.DefaultSelector() as waiting:
        for client in clients:
            waiting.register(client, selectors.EVENT_WRITE)
        while waiting.get_map():
            assert time.monotonic() < until, "TCP did not ask again"
            for key, _ in waiting.select(1):
                waiting.unregister(key.fileobj)


def is_cut(client: socket.socket) -> bool:
    try:
        client.recv(1)
    except BlockingIOError:
        return False  # nobody says anything, and it is open
    except OSError:
        pass
    return True


def test_a_port_is_shared_while_another_process_listens_there_too(port):
    assert not is_shared(port)
    with listening("127.0.0.1", port):
        assert is_shared(port)
    assert not is_shared(port)


def test_the_same_port_of_another_address_is_another_door(port):
    with listening("127.0.0.2", port):
        assert not is_shared(port)


@pytest.mark.parametrize("turns_away", [True, False])
def test_nobody_is_cut_by_a_shared_door_that_closes_once_newcomers_are_turned_away(
    own, port, turns_away
):
    """CASES P-27: without that, the half that the kernel has given to the closing door."""
    with contextlib.ExitStack() as stack, listening("127.0.0.1", port):
        if turns_away:
            assert turn_away(port) == 1
        clients = knock(stack, port)
        own.close()
        wait_settled(clients)
        assert any(map(is_cut, clients)) is not turns_away


def test_whoever_is_connected_already_is_let_in(own, port):
    with contextlib.ExitStack() as stack, listening("127.0.0.2", port):
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        assert turn_away(port) == 1
        served, _ = own.accept()
        stack.enter_context(served)
        client.sendall(b"hello")
        assert served.recv(5) == b"hello"
        stack.enter_context(socket.create_connection(("127.0.0.2", port), timeout=10))


def test_whoever_was_turned_away_can_be_let_in_again(own, port):
    """It asks again by itself; whoever comes after that does not even wait."""
    with contextlib.ExitStack() as stack:
        assert turn_away(port) == 1
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=0.1)
        clients = knock(stack, port)
        assert let_in(port) == 1
        stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.5))
        wait_settled(clients)
        assert not any(map(is_cut, clients))


def test_those_who_leave_together_have_turns(own, port):
    """In whatever order: each of them sees the same one."""
    assert turn(port) == 0.0
    with listening("127.0.0.1", port) as second, listening("127.0.0.1", port) as third:
        inode = os.fstat(own.fileno()).st_ino
        assert turn(port) == sorted([inode, second, third]).index(inode) / 3
    own.close()
    assert turn(port) == 0.0, "nobody listens there"


def test_whoever_is_accepted_stays_where_nobody_listens_any_more(own, port):
    """CASES P-27: and whoever comes is given to the other."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        served, _ = own.accept()
        stack.enter_context(served)
        assert listen_no_more(port) == 1
        client.sendall(b"hello")
        assert served.recv(5) == b"hello"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=10)
        stack.enter_context(listening("127.0.0.1", port))
        newcomers = knock(stack, port)
        wait_settled(newcomers)
        assert not any(map(is_cut, newcomers))
        assert listen_no_more(port) == 0, "it listens still"
