"""Raw Gloo between two processes: the floor under a handoff of the same bytes.

One message from a reused buffer into a reused buffer, and one byte back that says it is all there:
what a transfer costs without blocks, manifests, links and signalling.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.bench.pinned import PinnedChild

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TIMEOUT = timedelta(seconds=60)


class GlooPair:
    """Sender and receiver, each in its process on its core; made by ``gloo_pair``."""

    def __init__(self, sender: PinnedChild, receiver: PinnedChild) -> None:
        self._sender = sender
        self._receiver = receiver

    def transfer(self, times: int) -> list[float]:
        """Move the bytes ``times`` times; returns seconds of each."""
        for child in (self._receiver, self._sender):
            child.send(times=times + 1)
        seconds: list[float] = self._sender.answer()
        self._receiver.answer()
        return seconds[1:]  # the first one also waits until the other end has begun


@contextlib.contextmanager
def gloo_pair(num_bytes: int, sender_core: int, receiver_core: int) -> Iterator[GlooPair]:
    """Run a pair for the time of a ``with``; idle between transfers."""
    with tempfile.TemporaryDirectory(prefix="pdserve-gloo-") as folder, contextlib.ExitStack() as s:
        path = str(Path(folder) / "store")
        children = [
            s.enter_context(
                PinnedChild(__name__, core, {"rank": rank, "path": path, "num_bytes": num_bytes})
            )
            for rank, core in enumerate((sender_core, receiver_core))
        ]
        yield GlooPair(*children)


def start(arguments: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Join the group of two in this child and return what answers its parent."""
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    rank = arguments["rank"]
    distributed: Any = torch.distributed  # its stubs miss these names
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _TIMEOUT
    options._threads = 1
    options._devices = [gloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    store = distributed.FileStore(arguments["path"], 2)
    group = gloo(store, rank, 2, options)
    data_B = torch.zeros(arguments["num_bytes"], dtype=torch.uint8)
    done_B = torch.zeros(1, dtype=torch.uint8)

    def send() -> None:
        group.send([data_B], 1, 0).wait()
        group.recv([done_B], 1, 1).wait()

    def receive() -> None:
        group.recv([data_B], 0, 0).wait()
        group.send([done_B], 0, 1).wait()

    move = send if rank == 0 else receive

    def respond(message: dict[str, Any]) -> list[float]:
        seconds = []
        for _ in range(message["times"]):
            began = time.perf_counter()
            move()
            seconds.append(time.perf_counter() - began)
        return seconds

    return respond
