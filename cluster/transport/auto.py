"""Chooses the transport of each link by where its two ends are, and what both of them take.

    both on one host, and one of them on a CPU, or both on one GPU ──▶ shared memory
    else, both on CPUs, or both on GPUs                            ──▶ torch.distributed

Between two GPUs of one host NCCL needs no way through host memory. A CPU and a GPU on two hosts
have no transport in common, and are told so. Where one end takes a single transport, that is the
link's if it can be.
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

NEAR, FAR = b"near", b"far"
"""Shared memory, and torch.distributed."""


class AutoTransport(Transport):
    """Opens each channel through the best transport that both ends have."""

    def __init__(
        self,
        *,
        device: str = "cpu",
        near: Transport | None = None,
        far: Transport | None = None,
        kind: TransportKind = TransportKind.AUTO,
    ) -> None:
        """``near`` serves links within a host, ``far`` all others; a ``kind`` other than AUTO
        leaves one of them out."""
        self.device = device
        self.kind = kind
        self._ways: dict[bytes, Transport] = {}
        if kind is not TransportKind.TORCH_DIST:
            self._ways[NEAR] = near or ShmTransport(device=device)
        if kind is not TransportKind.SHM:
            self._ways[FAR] = far or TorchDistTransport(device=device)
        self._place = place_of(device)

    def open(self, *, link_id: str, rank: int, rendezvous: Rendezvous, timeout_s: float) -> Channel:
        """Exchange places, then open; both ends come to the same choice."""
        key, ours = f"{link_id}/place", b" ".join((self._place, *self._ways))
        rendezvous.set(f"{key}/{rank}", ours)
        theirs = rendezvous.get(f"{key}/{1 - rank}", timeout_s)
        transport = self._ways[choose(ours, theirs)]
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


def choose(ours: bytes, theirs: bytes) -> bytes:
    """Return NEAR or FAR, the same for both ends; raises TransportError where there is no way.

    Each end is its host, its device and the ways that it takes, with spaces between.
    """
    (our_host, our_device, *our_ways), (host, device, *ways) = ours.split(), theirs.split()
    has_cpu = b"cpu" in (our_device, device)
    is_same_device, is_same_host = our_device == device, our_host == host
    # Two on one GPU, or a CPU and a GPU, are no group of torch.distributed's.
    can_be_far = is_same_device if has_cpu else not (is_same_host and is_same_device)
    possible = [*([NEAR] if is_same_host else []), *([FAR] if can_be_far else [])]
    if not (has_cpu or is_same_device):
        possible.reverse()
    for way in possible:
        if way in our_ways and way in ways:
            return way
    if has_cpu and not is_same_device and not is_same_host:
        reason = "a CPU and a GPU on different hosts have no transport in common"
    else:
        where = "one host" if is_same_host else "different hosts"
        reason = f"two workers on {where} have no transport in common that both pools take"
    raise TransportError(reason, stage="link")
