"""Places of which nobody may have more than a share: so that one who takes all it can gets no more
than that, and the others still find some."""

from __future__ import annotations

from collections import Counter
from typing import Protocol


class Places(Protocol):
    """Where somebody may take a place."""

    def take(self, who: str) -> bool:
        """Take a place; whether there was one. What was taken must be given back."""
        ...

    def give_back(self, who: str) -> None:
        """Give one place back."""
        ...


class Shares:
    """Counts who has how many places."""

    def __init__(self, max_places: int, max_each: int) -> None:
        self._max_places = max_places
        self._max_each = max_each
        self._num_taken: Counter[str] = Counter()
        self._num_places = 0

    @property
    def num_taken(self) -> int:
        """Places that are taken by anybody."""
        return self._num_places

    def take(self, who: str) -> bool:
        """Take a place; whether there was one. What was taken must be given back."""
        if self._num_places >= self._max_places or self._num_taken[who] >= self._max_each:
            return False
        self._num_places += 1
        self._num_taken[who] += 1
        return True

    def give_back(self, who: str) -> None:
        """Give one place back."""
        assert self._num_taken[who] > 0, "it was taken"
        self._num_places -= 1
        self._num_taken[who] -= 1
        if not self._num_taken[who]:
            del self._num_taken[who]


class TakenPlace:
    """A place that was taken for somebody who asks for one only later."""

    def __init__(self, places: Shares, who: str) -> None:
        self._places = places
        self._who = who
        self._is_back = False

    def take(self, who: str) -> bool:
        """Return True: it is there."""
        return True

    def give_back(self, who: str = "") -> None:
        """Give it back; idempotent, for it is not always clear who comes last."""
        if not self._is_back:
            self._is_back = True
            self._places.give_back(self._who)
