"""What a serving process does about its memory: two settings, each of which saves stalls.

glibc keeps the memory of tensors that are made anew in every step. By default a thread's heap gives
its top back to the kernel whenever it is freed, and a step of 512 prompt tokens then faults in
290 MB again: 16 % of the prefill worker's time, and the clearing of those pages slows the decode
worker next to it (README, "Decisions").

Python's garbage collector leaves out what start-up has made. It stays until the end: over 100,000
objects, and looking through them again and again takes 60 to 120 ms each time, for which every
stream of the process waits.
"""

from __future__ import annotations

import ctypes
import gc
import logging

logger = logging.getLogger(__name__)

# mallopt's parameters (malloc.h) and our values, in bytes but for the number of arenas.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 1 << 30
_MMAP_BYTES = 32 << 20  # the largest that glibc takes
_ARENAS = 1  # the arenas of other threads are cut into heaps of 64 MB, which are given back whole


def keep_freed_memory() -> bool:
    """Set this process's allocator; False, and a line in the log, where it is not glibc's."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        logger.warning("not glibc: freed memory goes back to the kernel in every step")
        return False
    settings = {
        _M_ARENA_MAX: _ARENAS,
        _M_MMAP_THRESHOLD: _MMAP_BYTES,
        _M_TRIM_THRESHOLD: _KEPT_BYTES,
    }
    return all(mallopt(name, value) == 1 for name, value in settings.items())


def keep_what_start_made() -> None:
    """Let the garbage collector leave out all that is there now; once, when the process serves."""
    gc.collect()
    gc.freeze()
