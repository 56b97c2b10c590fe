"""What an attempt needs of the request that it is made for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cluster.control.facts import ExportRef, Want
    from cluster.errors import PdserveError


class AttemptOwner(Protocol):
    """The request that an attempt is made for."""

    def note_lost(self, incarnation: str, *, is_death: bool) -> None:
        """Avoid a worker from now on; ``is_death``: it was lost with a leg of this request."""
        ...

    def may_go_on(self, error: PdserveError) -> bool:
        """Whether the request may be given to another worker after ``error``."""
        ...

    def age_s(self) -> float:
        """Return the seconds since the request was accepted."""
        ...

    @property
    def num_preemptions(self) -> int:
        """How often it was preempted so far."""
        ...

    def note_preempted(self, num_preemptions: int) -> None:
        """Take word of a worker that it was preempted so often."""
        ...

    def want(self, export: ExportRef | None) -> Want:
        """Return a new want, for a decode worker that takes ``export``."""
        ...
