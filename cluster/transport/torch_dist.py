"""Transport over torch.distributed: gloo between CPUs, NCCL between GPUs.

Each link is a process group of two ranks, made without the default group: groups neither share
a fate nor need to be made in the same order everywhere. The two ranks find one another through
the link's rendezvous instead of a TCPStore, which would listen on every interface and ask nobody
who they are.

A wait on gloo cannot be interrupted: it ends with its operation, with the peer's socket, or at its
timeout. NCCL knows no such wait: the host polls until its deadline or until the channel is closed,
and then gives the group up itself, for torch's own watchdog would end the process. Nor can the
opening of a group of NCCL's be bounded or broken off: it has a thread of its own (``opening``). All
waits run on the link's own thread.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from cluster.config import TransportKind
from cluster.transport.base import (
    SENDER,
    Channel,
    ChannelClosed,
    PeerLost,
    Rendezvous,
    TransferTimeout,
    Transport,
    TransportError,
)
from cluster.transport.interfaces import interface_of
from cluster.transport.opening import opened_within
from cluster.transport.transfer_lock import TransferLock

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Group = Any  # torch's own stubs miss these constructors and options

_NCCL_TIMEOUT = timedelta(days=1)
"""Longer than any wait of ours: torch's watchdog shall never judge a transfer."""
_NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Read when a group is made; else a stalled peer ends this process."""
_POLL_S = 0.0002


class TorchDistTransport(Transport):
    """Channels over process groups of two; ``device`` picks the backend.

    ``bind_host`` is the address that gloo listens on and tells its peers; loopback unless the
    workers are on several machines. NCCL takes the interface that has it. Raises StartupError
    where none of this machine's does.
    """

    kind = TransportKind.TORCH_DIST

    def __init__(self, *, device: str = "cpu", bind_host: str = "127.0.0.1") -> None:
        self.device = device
        self._bind_host = bind_host
        is_cuda = torch.device(device).type == "cuda"
        self._nccl_interface = f"={interface_of(bind_host)}" if is_cuda else ""
        self._transfer_lock = TransferLock()

    def open(self, *, link_id: str, rank: int, rendezvous: Rendezvous, timeout_s: float) -> Channel:
        """Make this link's group; blocks until the peer makes its half."""
        store = RendezvousStore(rendezvous, link_id, timeout_s)
        try:
            if torch.device(self.device).type == "cuda":
                group = opened_within(
                    timeout_s,
                    link_id,
                    lambda: self._make_nccl(store, rank),
                    discard=lambda late: late.abort(),
                )
                channel = _NcclChannel(group, store, rank, torch.device(self.device))
                channel.transfer_lock = self._transfer_lock
                return channel
            group = self._make_gloo(store, rank, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise _typed(error, "opening the channel") from error
        finally:
            store.finish()
        return _TorchDistChannel(group, store, rank)

    def _make_gloo(self, store: RendezvousStore, rank: int, timeout: timedelta) -> Group:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._threads = 1
        options._devices = [gloo.create_device(hostname=self._bind_host, lazy_init=False)]
        return gloo(store, rank, 2, options)

    def _make_nccl(self, store: RendezvousStore, rank: int) -> Group:
        os.environ.update(_NCCL_ENVIRONMENT, NCCL_SOCKET_IFNAME=self._nccl_interface)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = _NCCL_TIMEOUT
        group = nccl(store, rank, 2, options)
        group.eager_connect_single_device(torch.device(self.device))
        return group


class RendezvousStore(Store):
    """The store through which a backend publishes its address and waits for the other one's."""

    def __init__(self, rendezvous: Rendezvous, link_id: str, timeout_s: float) -> None:
        super().__init__()
        self._rendezvous: Rendezvous | None = rendezvous
        self._prefix = f"{link_id}/"
        self._timeout_s = timeout_s
        self._known: dict[str, bytes] = {}

    def finish(self) -> None:
        """Take no more part: the channel is open, or never will be."""
        self._rendezvous = None

    def set(self, key: str, value: bytes | str) -> None:
        """Keep one entry of our own and publish it."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._known[key] = data
        if self._rendezvous is not None:
            self._rendezvous.set(self._prefix + key, data)

    def get(self, key: str) -> bytes:
        """Return our own entry, or wait for the peer's."""
        if key not in self._known:
            self._fetch(key, self._timeout_s)
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of ``keys`` are set."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        for key in keys:
            if key not in self._known:
                self._fetch(key, limit_s)

    def check(self, keys: list[str]) -> bool:
        """Whether all of ``keys`` are here already."""
        return all(key in self._known for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long ``get`` waits."""
        self._timeout_s = timeout.total_seconds()

    def _fetch(self, key: str, timeout_s: float) -> None:
        if self._rendezvous is None:
            raise PeerLost(f"{key}: asked for after the rendezvous", stage="link")
        self._known[key] = self._rendezvous.get(self._prefix + key, timeout_s)


class _TorchDistChannel(Channel):
    def __init__(self, group: Group, store: RendezvousStore, rank: int) -> None:
        super().__init__()
        self._group: Group | None = group
        self._store = store  # the group calls into it, so it lives as long
        self._peer = 1 - rank
        self._can_send = rank == SENDER

    def _send(self, data_B: Tensor, timeout_s: float) -> None:
        if not self._can_send:
            raise TransportError("the receiving end cannot send", stage="transfer")
        group = self._live_group()
        self._wait(lambda: group.send([data_B], self._peer, 0), timeout_s)

    def _recv(self, into_B: Tensor, timeout_s: float) -> None:
        if self._can_send:
            raise TransportError("the sending end cannot receive", stage="transfer")
        group, room_B = self._live_group(), self._room(into_B)
        self._wait(lambda: group.recv([room_B], self._peer, 0), timeout_s)

    def _room(self, into_B: Tensor) -> Tensor:
        """Return it with what lies behind it in its buffer.

        Gloo ends the process where a message is longer than what was asked for, but takes one that
        is shorter: so whoever received finds out that it was another one.
        """
        num_bytes = into_B.untyped_storage().nbytes() - into_B.storage_offset()
        return into_B.as_strided((num_bytes,), (1,))

    def _live_group(self) -> Group:
        assert self._group is not None, "released while in use"
        return self._group

    def _wait(self, start: Callable[[], dist.Work], timeout_s: float) -> None:
        try:
            start().wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise _typed(error, "moving bytes") from error

    def _release(self) -> None:
        # Dropping the last reference closes the sockets, which is what the peer notices.
        self._group = None


class _NcclChannel(_TorchDistChannel):
    """The same over NCCL, on a stream of its own: on the default one the next step would wait."""

    def __init__(
        self, group: Group, store: RendezvousStore, rank: int, device: torch.device
    ) -> None:
        super().__init__(group, store, rank)
        self._cuda: Any = torch.cuda  # its stubs miss types
        self._stream = self._cuda.Stream(device)

    def _room(self, into_B: Tensor) -> Tensor:
        return into_B  # both ends of NCCL's have to say the same length

    def _wait(self, start: Callable[[], dist.Work], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        done = self._cuda.Event()
        try:
            # What filled the buffer, or still reads it, was queued on this thread's stream.
            self._stream.wait_stream(self._cuda.current_stream(self._stream.device))
            with self._cuda.stream(self._stream):
                start().wait()  # orders our stream behind the transfer; the host goes on
                done.record(self._stream)
            while not done.query():
                if self.is_dead:
                    raise ChannelClosed("closed while bytes moved", stage="transfer")
                if time.monotonic() > deadline:
                    raise TransferTimeout(f"no end within {timeout_s:.1f} s", stage="transfer")
                time.sleep(_POLL_S)
        except RuntimeError as error:
            raise _typed(error, "moving bytes") from error

    def _release(self) -> None:
        # Without this the group's end waits for a transfer whose peer is silent.
        self._live_group().abort()
        super()._release()


def _typed(error: RuntimeError, doing: str) -> TransportError:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    is_timeout = "timeout" in text.lower() or "timed out" in text.lower()
    kind = TransferTimeout if is_timeout else PeerLost
    return kind(f"{doing}: {text}", stage="transfer")
