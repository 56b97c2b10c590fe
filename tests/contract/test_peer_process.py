"""A peer in another process that is killed, or stands still: found at once, or in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from cluster.transport.base import (
    RECEIVER,
    SENDER,
    Channel,
    PeerLost,
    Rendezvous,
    TransferTimeout,
    TransportError,
)
from tests.contract.ends import LONG_S, Board, Pair, gloo, loopback, running, shm

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_BYTES = 64 << 20
MAKE = {"gloo": gloo, "shm": shm}


class PeerProcess(Rendezvous):
    """The other end, and our rendezvous with it."""

    def __init__(self, kind: str, rank: int, what: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.peer", kind, str(rank), what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.board = Board()
        self.reader = threading.Thread(target=self.read_all)
        self.reader.start()

    def read_all(self) -> None:
        for line in self.process.stdout:
            key, _, value = line.strip().partition(" ")
            is_entry = key not in ("open", "failed")
            self.board.set(key, bytes.fromhex(value) if is_entry else value.encode())

    def set(self, key: str, value: bytes) -> None:
        self.process.stdin.write(f"{key} {value.hex()}\n")
        self.process.stdin.flush()

    def get(self, key: str, timeout_s: float) -> bytes:
        return self.board.get(key, timeout_s)

    def freeze(self) -> None:
        """Stop it, and prove that it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)
        assert psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED

    def kill(self) -> None:
        """Kill it, and prove that it is gone."""
        self.process.kill()
        assert self.process.wait(LONG_S) == -signal.SIGKILL

    def leave(self) -> None:
        self.process.kill()
        self.process.wait(LONG_S)
        self.reader.join(LONG_S)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(params=sorted(MAKE))
def pair(request) -> Iterator[Pair]:
    with running(MAKE[request.param]()) as pair:
        pair.kind = request.param
        yield pair


@pytest.fixture
def start_peer(pair: Pair) -> Iterator:
    peers = []

    def start(rank: int, what: str) -> tuple[PeerProcess, Channel]:
        peer = PeerProcess(pair.kind, rank, what)
        peers.append(peer)
        channel = pair.open_one("p/1", 1 - rank, peer, LONG_S)
        peer.get("open", LONG_S)
        return peer, channel

    yield start
    for peer in peers:
        peer.leave()


def operate(channel: Channel, rank: int, timeout_s: float) -> None:
    data_B = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    (channel.send if rank == SENDER else channel.recv)(data_B, timeout_s)


@pytest.mark.parametrize("rank", [SENDER, RECEIVER])
def test_a_killed_peer_is_found_within_a_second(pair: Pair, start_peer, rank: int):
    """P-19, P-20: kill -9 while we wait for it."""
    peer, channel = start_peer(1 - rank, "wait")
    moving = pair.start(operate, channel, rank, LONG_S)
    with pytest.raises(TimeoutError):
        moving.exception(0.3)  # it waits
    peer.kill()
    before = time.monotonic()
    assert isinstance(moving.exception(LONG_S), PeerLost)
    assert time.monotonic() - before < 1
    assert channel.is_dead


def test_a_peer_that_stands_still_costs_the_timeout_and_no_more(pair: Pair, start_peer):
    """P-19: SIGSTOP, and SIGCONT when it is too late."""
    peer, channel = start_peer(SENDER, "wait")
    peer.freeze()
    before = time.monotonic()
    with pytest.raises(TransferTimeout):
        operate(channel, RECEIVER, 0.5)
    assert 0.4 < time.monotonic() - before < 2
    peer.process.send_signal(signal.SIGCONT)
    with pytest.raises(TransportError):
        operate(channel, RECEIVER, LONG_S)


def test_a_peer_in_mid_transfer_hears_that_we_gave_up(pair: Pair, start_peer):
    files = set(os.listdir("/dev/shm"))
    peer, channel = start_peer(SENDER, "move")
    assert set(os.listdir("/dev/shm")) <= files, "no memory has a name that could be left behind"
    channel.close()
    assert peer.get("failed", LONG_S) == b"PeerLost"


def test_loopback_refuses_another_process():
    """Its tensors cannot be reached from there."""
    with running(loopback()) as pair:
        board = Board()
        board.set("loopback/1", b"another process")
        with pytest.raises(TransportError, match="cannot leave the process"):
            pair.open_one("p/1", SENDER, board, LONG_S)
