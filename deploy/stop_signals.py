"""Ctrl-C and SIGTERM: the first ends whatever the launcher is doing, the next change nothing."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_TAKEN = (signal.SIGINT, signal.SIGTERM)
_REPEAT_S = 0.5


class StopSignals:
    """While armed, the first signal raises KeyboardInterrupt in the main thread.

    It is raised again every half second until ``disarm``: a library may swallow it in a callback
    of its own. Nothing here takes a lock, since a handler may interrupt the lock's holder.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._is_told = False

    def arm(self) -> None:
        """Take both signals; again after a library has taken one for itself."""
        for number in _TAKEN:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_signal)

    def disarm(self) -> None:
        """From here on they change nothing; so stopping is never cut short. Idempotent."""
        # Not a function of ours: Python drops those before the process is quite gone.
        for number in (*_TAKEN, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        if self._is_told:
            signal.setitimer(signal.ITIMER_REAL, 0)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Put a signal off to the end: an import that is cut short leaves a broken library."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._is_told:
            raise KeyboardInterrupt

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self._is_told:
            self._is_told = True
            signal.setitimer(signal.ITIMER_REAL, _REPEAT_S, _REPEAT_S)
        if not self._is_held:
            raise KeyboardInterrupt


@contextlib.contextmanager
def ended_like_interrupted() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does: leave every ``with`` on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
