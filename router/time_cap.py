"""Ends Python code of others that runs too long, wherever it is."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Overtime(Exception):
    """Raised in the midst of the code that took too long."""


@contextlib.contextmanager
def time_cap(seconds: float) -> Iterator[None]:
    """Raise Overtime in the body when it takes longer.

    It comes between two instructions of Python: one long call into C ends first.
    """
    cap = _Cap(threading.get_ident())
    timer = threading.Timer(seconds, cap.fire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        cap.lift()


class _Cap:
    def __init__(self, thread_id: int) -> None:
        self._thread_id = ctypes.c_ulong(thread_id)
        self._lock = threading.Lock()
        self._is_lifted = False

    def fire(self) -> None:
        with self._lock:
            if not self._is_lifted:
                self._raise_there(ctypes.py_object(Overtime))

    def lift(self) -> None:
        with self._lock:
            self._is_lifted = True
            # What was fired at the last moment and has not arrived shall not arrive later.
            self._raise_there(None)

    def _raise_there(self, error: object) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread_id, error)
