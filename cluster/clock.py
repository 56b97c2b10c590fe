"""Time as a value: everything takes ``now``; only ``SystemClock`` reads a clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock, in seconds from an arbitrary origin of this process."""

    def now(self) -> float:
        """Return the current instant in seconds; never goes backwards."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return seconds since an arbitrary origin of this machine's current boot."""
        return time.monotonic()
