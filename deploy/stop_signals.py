"""Ctrl-C and SIGTERM: the first ends whatever the launcher is doing, the next change nothing."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While armed, the first signal raises KeyboardInterrupt in the main thread.

    It disarms itself, so that stopping is never cut short. ``stopping`` is set too: a library that
    swallows the exception in a callback of its own doesn't lose the signal.
    """

    def __init__(self) -> None:
        self.stopping = threading.Event()

    def arm(self) -> None:
        """Take both signals; again after a library has taken one for itself."""
        for number in _NUMBERS:
            signal.signal(number, self._on_signal)

    def disarm(self) -> None:
        """From here on both signals change nothing."""
        for number in _NUMBERS:
            signal.signal(number, _ignore)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.disarm()
        self.stopping.set()
        raise KeyboardInterrupt


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing; unlike SIG_IGN, children don't inherit it."""
