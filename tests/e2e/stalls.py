"""For how long this machine stood still: a bound in seconds that is the product's own is forgiven
so much. A host that is shared gives its cores to others at times, and nobody is quicker than that.
"""

from __future__ import annotations

import math
import threading
import time

_PACE_S = 0.02


class Stalls(threading.Thread):
    """Wakes again and again, until it is stopped, and knows how late it ever was."""

    def __init__(self) -> None:
        super().__init__(name="stalls", daemon=True)
        self._is_over = threading.Event()
        self._longest_s = 0.0
        self._woke_at = math.inf

    def __enter__(self) -> Stalls:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    @property
    def longest_s(self) -> float:
        """The longest so far, with one that has just ended."""
        if self._is_over.is_set():
            return self._longest_s
        return max(self._longest_s, time.monotonic() - self._woke_at - _PACE_S)

    def run(self) -> None:
        self._woke_at = time.monotonic()
        while not self._is_over.wait(_PACE_S):
            self._longest_s = self.longest_s
            self._woke_at = time.monotonic()

    def stop(self) -> None:
        """What comes from now on is not counted."""
        self._longest_s = self.longest_s
        self._is_over.set()
        self.join()
