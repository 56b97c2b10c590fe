"""What the router needs of the control plane; ``RouteClient`` has it, and so have tests' fakes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cluster.control.facts import ClusterView, Grant, Want


class Route(Protocol):
    """What is needed of ``cluster.control.client.RouteClient``."""

    @property
    def view(self) -> ClusterView | None:
        """The last snapshot of the cluster."""
        ...

    @property
    def prefix_key(self) -> bytes:
        """Under which prompts' beginnings are named; empty: they are not."""
        ...

    @property
    def awaits_first_view(self) -> bool:
        """Whether no snapshot has come yet, and one may still come: wants wait for it."""
        ...

    def view_age_s(self, now: float) -> float:
        """Seconds since the last snapshot."""
        ...

    async def start(self) -> None:
        """Connect, and keep connected."""
        ...

    async def stop(self) -> None:
        """Leave."""
        ...

    async def want(self, want: Want) -> Grant:
        """Wait for a grant; raises the refusal. Cancelling it withdraws the want."""
        ...

    def done(self, grant_id: str, num_output_tokens: int, *, whole_output_tokens: int = 0) -> None:
        """Give a grant back.

        ``num_output_tokens`` came under it, however it ended; ``whole_output_tokens``: of all its
        request's grants, if that has ended well.
        """
        ...

    async def cancel_request(self, request_id: str, timeout_s: float) -> bool:
        """Cancel a request that another router may own."""
        ...
