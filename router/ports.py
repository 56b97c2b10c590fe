"""Doors that several routers of this host have: the kernel spreads connections over all of them.

Nothing tells one who listens at a port of the others that do, but the kernel's table of sockets.

The kernel gives a connection to one of them before anybody has accepted it, and resets it where
that one closes its door: so whoever leaves first has newcomers turned away. TCP asks again after
1 s, and then it is one of the others that is asked. Whoever leaves looks like the others until it
listens no more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_OPEN_FILES = Path("/proc/self/fd")
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_LISTENS = "0A"
_LOCAL, _STATE, _INODE = 1, 3, 9
"""Columns of a table."""
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_FLAGS_AT, _SYN = 13, 0x02
"""In a TCP header."""
_NO_NEWCOMERS = (
    (0x30, 0, 0, _FLAGS_AT),  # the byte of flags
    (0x45, 0, 1, _SYN),  # asks for a connection: go on, else skip one
    (0x06, 0, 0, 0),  # drop it
    (0x06, 0, 0, 0xFFFFFFFF),  # let it pass
)
"""In the language of the kernel's socket filters: code, jump if true, jump if false, operand."""


def is_shared(port: int) -> bool:
    """Whether another process listens where this one does, at ``port``; False without /proc."""
    _, others = _listeners(port)
    return bool(others)


def turn(port: int) -> float:
    """Return where among those who listen at ``port`` this process is: 0 first, always below 1."""
    ours, others = _listeners(port)
    num_before = sum(inode < min(ours) for inode in others)
    return num_before / (1 + len(others))


def turn_away(port: int) -> int:
    """Let nobody new in at ``port``, by none of this process's sockets; return their number.

    Whoever is connected already, accepted or not, stays. To be called where the port is shared, and
    less than a second before these are closed, or ``let_in`` is called. Does nothing without /proc.
    """
    program = b"".join(struct.pack("HBBI", *step) for step in _NO_NEWCOMERS)
    code = ctypes.create_string_buffer(program, len(program))
    told = struct.pack("HP", len(_NO_NEWCOMERS), ctypes.addressof(code))
    return _set_option(port, _SO_ATTACH_FILTER, told)


def let_in(port: int) -> int:
    """Let those in again whom ``turn_away`` keeps out; return the number of sockets."""
    return _set_option(port, _SO_DETACH_FILTER, 0)


def listen_no_more(port: int) -> int:
    """Have none of this process's sockets listen at ``port``; return their number.

    Whoever is accepted already stays, and whoever opened the sockets closes them, now or later.
    Does nothing without /proc.
    """
    return _tell_listeners(port, lambda listener: listener.shutdown(socket.SHUT_RDWR))


def _set_option(port: int, option: int, value: bytes | int) -> int:
    return _tell_listeners(
        port, lambda listener: listener.setsockopt(socket.SOL_SOCKET, option, value)
    )


def _tell_listeners(port: int, tell: Callable[[socket.socket], None]) -> int:
    """``tell`` each of our sockets that listens at ``port``; return their number."""
    num_told = 0
    for file, _ in _own_files():
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            own_file = os.dup(file)  # whoever opened that one closes it
            stack.callback(os.close, own_file)
            listener = socket.socket(fileno=own_file)
            stack.callback(listener.detach)
            if _listens_at(listener, port):
                tell(listener)
                num_told += 1
    return num_told


def _listeners(port: int) -> tuple[set[int], set[int]]:
    """Return the inodes of our sockets that listen at ``port``, and of others' where ours do."""
    own = {inode for _, inode in _own_files()}
    listening = [row for table in _TABLES for row in _rows(table) if row[_STATE] == _LISTENS]
    at_port = [row for row in listening if int(row[_LOCAL].rpartition(":")[2], 16) == port]
    addresses = {row[_LOCAL] for row in at_port if int(row[_INODE]) in own}
    inodes = {int(row[_INODE]) for row in at_port if row[_LOCAL] in addresses}
    return inodes & own, inodes - own


def _listens_at(own: socket.socket, port: int) -> bool:
    if own.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    is_listening = own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return bool(is_listening) and own.getsockname()[1] == port


def _own_files() -> Iterator[tuple[int, int]]:
    """Yield the file and the inode of each socket of this process."""
    for name in os.listdir(_OPEN_FILES) if _OPEN_FILES.is_dir() else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            told = os.fstat(int(name))
            if stat.S_ISSOCK(told.st_mode):
                yield int(name), told.st_ino


def _rows(table: Path) -> Iterator[list[str]]:
    if table.is_file():
        for line in table.read_text().splitlines()[1:]:
            yield line.split()
