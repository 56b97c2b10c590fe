"""Whether another router of this host has the same doors: the kernel spreads calls over both.

Nothing tells one who listens at a port of the others that do, but the kernel's table of sockets.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_OPEN_FILES = Path("/proc/self/fd")
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_LISTENS = "0A"
_LOCAL, _STATE, _INODE = 1, 3, 9
"""Columns of a table."""


def is_shared(port: int) -> bool:
    """Whether another process listens where this one does, at ``port``; False without /proc."""
    own = set(_own_sockets())
    listening = [row for table in _TABLES for row in _rows(table) if row[_STATE] == _LISTENS]
    at_port = [row for row in listening if int(row[_LOCAL].rpartition(":")[2], 16) == port]
    ours = {row[_LOCAL] for row in at_port if int(row[_INODE]) in own}
    return any(row[_LOCAL] in ours and int(row[_INODE]) not in own for row in at_port)


def _own_sockets() -> Iterator[int]:
    for name in os.listdir(_OPEN_FILES) if _OPEN_FILES.is_dir() else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            told = os.fstat(int(name))
            if stat.S_ISSOCK(told.st_mode):
                yield told.st_ino


def _rows(table: Path) -> Iterator[list[str]]:
    if table.is_file():
        for line in table.read_text().splitlines()[1:]:
            yield line.split()
