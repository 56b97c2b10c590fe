"""Calls that have no timeout of their own, as Ray's and Serve's: who hangs keeps them for ever."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
ASKING = "ask-"
"""The names of the threads that wait for an answer begin so."""
_LAST_WORDS_S = 0.2


def bounded(who: str, timeout_s: float, call: Callable[[], T]) -> T:
    """Return what ``call`` does, or raise what it raises; StartupError after ``timeout_s``.

    It is called in a thread of its own, which is left to itself when it takes longer.
    """
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name=f"{ASKING}{who}", daemon=True).start()
    try:
        return answer.result(timeout_s)
    except TimeoutError:
        if answer.done():  # in the meantime, or it was the call that timed out
            return answer.result()
        raise StartupError(f"{who} has not answered for {timeout_s:g} s") from None


def are_all_answered() -> bool:
    """Whether no call is under way that was left to itself; the one that asks this is none."""
    asking = [
        each
        for each in threading.enumerate()
        if each.name.startswith(ASKING) and each is not threading.current_thread()
    ]
    for thread in asking:
        thread.join(_LAST_WORDS_S)
    return not any(thread.is_alive() for thread in asking)
