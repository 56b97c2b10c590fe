"""Locks between processes: the kernel drops them when their holder dies, however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

from cluster.clock import Clock, SystemClock
from cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_RETRY_S = 0.05


class FileLock:
    """An exclusive lock held through an open file, from ``try_take`` until ``release``.

    The file is not inherited by programs that the holder starts, and it is never deleted here: a
    lock on a deleted file protects nobody.
    """

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    @classmethod
    def try_take(cls, path: Path) -> FileLock | None:
        """Take the lock at ``path``, or return None where another holds it."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        return cls(fd)

    def write(self, text: str) -> None:
        """Replace the file's content: a note for people, about who holds it."""
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def release(self) -> None:
        """Give the lock back; idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@contextlib.contextmanager
def locked(
    path: Path,
    *,
    timeout_s: float,
    on_wait: Callable[[], None] = lambda: None,
    clock: Clock | None = None,
) -> Iterator[None]:
    """Hold the lock at ``path``; ``on_wait`` is called once where another holds it.

    Raises StartupError where it isn't free within ``timeout_s``.
    """
    lock = _take_within(path, timeout_s, on_wait, clock or SystemClock())
    try:
        yield
    finally:
        lock.release()


def _take_within(
    path: Path, timeout_s: float, on_wait: Callable[[], None], clock: Clock
) -> FileLock:
    deadline = clock.now() + timeout_s
    lock = FileLock.try_take(path)
    if lock is None:
        on_wait()
    # The kernel can wake a waiter, but only one that gives up its own deadline: so look again.
    while lock is None:
        if clock.now() >= deadline:
            raise StartupError(
                f"another process has held {path} for {timeout_s:.0f} s: wait for it, or end it"
            )
        time.sleep(_RETRY_S)
        lock = FileLock.try_take(path)
    return lock
