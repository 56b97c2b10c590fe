"""Makes what nobody can tell how long it may take, and that cannot be broken off: NCCL's groups."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from cluster.transport.base import TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

logger = logging.getLogger(__name__)


def opened_within(
    timeout_s: float, name: str, make: Callable[[], T], discard: Callable[[T], None]
) -> T:
    """Return what ``make`` makes, or raise what it raises; TransferTimeout after ``timeout_s``.

    It runs in a thread of its own, which is left to itself then: what it still makes is given to
    ``discard``, there.
    """
    made: Future[T] = Future()

    def run() -> None:
        try:
            result = make()
        except BaseException as error:
            if made.set_running_or_notify_cancel():
                made.set_exception(error)
            else:
                logger.info("link=%s its late opening failed: %s", name, type(error).__name__)
            return
        if made.set_running_or_notify_cancel():
            made.set_result(result)
            return
        logger.warning("link=%s opened too late", name)
        discard(result)

    threading.Thread(target=run, name=f"open-{name}", daemon=True).start()
    try:
        return made.result(timeout_s)
    except TimeoutError:
        # Not where it came just now, nor where it was the making that timed out.
        if made.cancel():
            raise TransferTimeout(
                f"opening the channel: not open within {timeout_s:.1f} s", stage="transfer"
            ) from None
        return made.result()
