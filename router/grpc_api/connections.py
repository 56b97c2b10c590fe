"""How many connections one address may have to the gRPC door.

grpc.aio tells nobody of its connections, and bounds only how many there are at all: one client
could have them all, and be silent. So the process' own sockets are looked at; what an address has
above its share is shut, and gRPC then sees that the peer has left.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_OPEN_FILES = Path("/proc/self/fd")
_Peer = tuple[str, int]


class Connections:
    """Looks after the connections that were accepted on one port."""

    def __init__(self, port: int, max_per_address: int) -> None:
        self._port = port
        self._max_per_address = max_per_address
        self.kept: set[_Peer] = set()
        """Who was there at the last look, and stayed."""
        self.num_shut = 0

    def look(self) -> None:
        """Shut what is above an address's share, the newest first; does nothing without /proc.

        Costs a few microseconds for each of the process's open files, and nothing where these are
        too few for one address to have too many.
        """
        files = os.listdir(_OPEN_FILES) if _OPEN_FILES.is_dir() else []
        if len(files) <= self._max_per_address:
            self.kept.clear()
            return
        found = dict(self._accepted(map(int, files)))
        for peer in self._above(found):
            self.num_shut += self._shut(found.pop(peer), peer)
        self.kept = set(found)

    def num_open(self) -> int:
        """Return how many there are; 0 without /proc."""
        files = os.listdir(_OPEN_FILES) if _OPEN_FILES.is_dir() else []
        return sum(1 for _ in self._accepted(map(int, files)))

    def _accepted(self, files: Iterable[int]) -> Iterator[tuple[_Peer, int]]:
        """Yield the peer and the file of each connection of the port."""
        for file in files:
            try:
                if not stat.S_ISSOCK(os.fstat(file).st_mode):
                    continue
                connection = socket.socket(fileno=file)
            except OSError:
                continue  # closed meanwhile
            try:
                if (peer := self._peer_of(connection)) is not None:
                    yield peer, file
            finally:
                connection.detach()  # it is gRPC's

    def _peer_of(self, connection: socket.socket) -> _Peer | None:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        with contextlib.suppress(OSError):  # none that is connected
            here, peer = connection.getsockname(), connection.getpeername()
            return (peer[0], peer[1]) if here[1] == self._port else None
        return None

    def _shut(self, file: int, peer: _Peer) -> bool:
        """Shut a connection, if the file is it still: gRPC may have closed it and opened others."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            own_file = os.dup(file)
            stack.callback(os.close, own_file)
            ours = socket.socket(fileno=own_file)  # finds out by itself whether it is IPv6's
            stack.callback(ours.detach)
            if self._peer_of(ours) == peer:
                ours.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def _above(self, found: Iterable[_Peer]) -> list[_Peer]:
        counts = Counter[str]()
        above = []
        for peer in sorted(found, key=lambda each: each not in self.kept):
            counts[peer[0]] += 1
            if counts[peer[0]] > self._max_per_address:
                above.append(peer)
        return above
