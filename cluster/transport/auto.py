"""Chooses the transport of each link by where its two ends are.

    both on one host, and one of them on a CPU, or both on one GPU ──▶ shared memory
    else, both on CPUs, or both on GPUs                            ──▶ torch.distributed

Between two GPUs of one host NCCL needs no way through host memory. A CPU and a GPU on two hosts
have no transport in common, and are told so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cluster.config import TransportKind
from cluster.transport import shm
from cluster.transport.base import Channel, Rendezvous, Transport, TransportError
from cluster.transport.shm import ShmTransport
from cluster.transport.torch_dist import TorchDistTransport

if TYPE_CHECKING:
    from collections.abc import Callable


class AutoTransport(Transport):
    """Opens each channel through the best transport that both ends have."""

    kind = TransportKind.AUTO

    def __init__(
        self, *, device: str = "cpu", near: Transport | None = None, far: Transport | None = None
    ) -> None:
        """``near`` serves links within a host, ``far`` all others."""
        self.device = device
        self._near = near or ShmTransport(device=device)
        self._far = far or TorchDistTransport(device=device)
        self._place = place_of(device)

    def open(self, *, link_id: str, rank: int, rendezvous: Rendezvous, timeout_s: float) -> Channel:
        """Exchange places, then open; both ends come to the same choice."""
        key = f"{link_id}/place"
        rendezvous.set(f"{key}/{rank}", self._place)
        theirs = rendezvous.get(f"{key}/{1 - rank}", timeout_s)
        transport = self._near if is_near(self._place, theirs) else self._far
        channel = transport.open(
            link_id=link_id, rank=rank, rendezvous=rendezvous, timeout_s=timeout_s
        )
        channel.kind = transport.kind
        return channel


def place_of(device: str, host_id: Callable[[], str] = shm.host_id) -> bytes:
    """Name a worker's host and its GPU, where it has one."""
    where = torch.device(device)
    if where.type != "cuda":
        return f"{host_id()} cpu".encode()
    uuid = torch.cuda.get_device_properties(where).uuid
    return f"{host_id()} {uuid}".encode()


def is_near(ours: bytes, theirs: bytes) -> bool:
    """Whether shared memory is the way between two places; raises TransportError if none is."""
    (our_host, our_device), (their_host, their_device) = _parts(ours), _parts(theirs)
    has_cpu = b"cpu" in (our_device, their_device)
    if our_host == their_host:
        return has_cpu or our_device == their_device
    if has_cpu and our_device != their_device:
        raise TransportError(
            "a CPU and a GPU on different hosts have no transport in common", stage="link"
        )
    return False


def _parts(place: bytes) -> tuple[bytes, bytes]:
    host, _, device = place.partition(b" ")
    return host, device
