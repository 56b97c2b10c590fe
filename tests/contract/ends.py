"""Both ends of links under test, in one process: their transports, threads and rendezvous."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from cluster.transport.base import (
    RECEIVER,
    SENDER,
    Channel,
    Rendezvous,
    TransferTimeout,
    Transport,
)
from cluster.transport.loopback import LoopbackTransport
from cluster.transport.shm import ShmTransport
from cluster.transport.torch_dist import TorchDistTransport

LONG_S = 20.0


class Board(Rendezvous):
    """Both ends' entries on one board, as a signalling stream would carry them."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.entries[key] = value
            self.changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.entries, timeout_s):
                raise TransferTimeout(f"nobody set {key}")
            return self.entries[key]


def loopback() -> tuple[Transport, Transport]:
    both = LoopbackTransport()
    return both, both


def gloo() -> tuple[Transport, Transport]:
    return TorchDistTransport(), TorchDistTransport()


@dataclass
class Pair:
    """The two transports under test, and a thread for each end of each link."""

    transports: tuple[Transport, Transport]
    threads: ThreadPoolExecutor
    epochs: Iterator[int]
    opened: list[Channel]

    def start(self, job: Callable[..., object], *args: object) -> Future:
        return self.threads.submit(job, *args)

    def open(self, link_id: str | None = None) -> tuple[Channel, Channel]:
        link_id = link_id or f"p/{next(self.epochs)}"
        board = Board()
        ends = [
            self.start(self.open_one, link_id, rank, board, LONG_S) for rank in (SENDER, RECEIVER)
        ]
        sender, receiver = (end.result(LONG_S) for end in ends)
        return sender, receiver

    def open_one(self, link_id: str, rank: int, board: Rendezvous, timeout_s: float) -> Channel:
        channel = self.transports[rank].open(
            link_id=link_id, rank=rank, rendezvous=board, timeout_s=timeout_s
        )
        self.opened.append(channel)
        return channel


def shm() -> tuple[Transport, Transport]:
    return ShmTransport(), ShmTransport()


class HostTransport(Transport):
    """Another transport for tensors in host memory, whatever device its own are on."""

    def __init__(self, inner: Transport) -> None:
        self.kind, self.device = inner.kind, "cpu"
        self.inner = inner

    def open(self, *, link_id: str, rank: int, rendezvous: Rendezvous, timeout_s: float) -> Channel:
        channel = self.inner.open(
            link_id=link_id, rank=rank, rendezvous=rendezvous, timeout_s=timeout_s
        )
        return HostChannel(channel, self.inner.device)


class HostChannel(Channel):
    def __init__(self, inner: Channel, device: str) -> None:
        super().__init__()
        self.inner, self.device = inner, device

    def _send(self, data_B: torch.Tensor, timeout_s: float) -> None:
        self.inner.send(data_B.to(self.device), timeout_s)

    def _recv(self, into_B: torch.Tensor, timeout_s: float) -> None:
        arrived_B = into_B.to(self.device)
        self.inner.recv(arrived_B, timeout_s)
        into_B.copy_(arrived_B)

    def _interrupt(self) -> None:
        self.inner.close()

    def _release(self) -> None:
        self.inner.close()


def nccl() -> tuple[Transport, Transport]:
    first, second = (HostTransport(TorchDistTransport(device=f"cuda:{i}")) for i in range(2))
    return first, second


@contextlib.contextmanager
def running(transports: tuple[Transport, Transport]) -> Iterator[Pair]:
    """A pair, whose channels are closed when it is left."""
    pair = Pair(transports, ThreadPoolExecutor(8), itertools.count(1), [])
    yield pair
    for channel in pair.opened:
        channel.close()
    pair.threads.shutdown()


def make_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def count_handles() -> int:
    """Open files and threads of this process, the native ones too."""
    return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))
