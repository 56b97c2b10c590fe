"""Reasons not to go on: all of them are told together, as one error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterable

NO_ROOM = "the cluster has no room for the pools"
"""What all problems of a fit come to."""


def raise_all(what: str, found: Iterable[object | None]) -> None:
    """Raise StartupError with the problems, where there is any that is not None.

    One is told by itself, several as a list under ``what``.
    """
    problems = [str(problem) for problem in found if problem is not None]
    if len(problems) == 1:
        raise StartupError(problems[0])
    if problems:
        raise StartupError(f"{what}:" + "".join(f"\n- {problem}" for problem in problems))
