"""What can run a cluster's processes: the contract that every host keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cluster.errors import StartupError


class ClusterHost(Protocol):
    """Starts one cluster, tells when it is past help, and stops all it started."""

    def start(self) -> None:
        """Start everything and return; readiness is the control plane's to tell.

        Raises StartupError.
        """
        ...

    def settle(self) -> None:
        """Do what is better done once all workers are up, and before the first request."""
        ...

    def failure(self) -> StartupError | None:
        """Return why the cluster cannot become or stay ready, with its reason."""
        ...

    def start_failure(self) -> StartupError | None:
        """Return why a worker did not come up, be it one of many and tried again."""
        ...

    def where_logs(self) -> str:
        """Say where this cluster's logs are, in words that end a sentence."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Stop what ``start`` started; idempotent, and safe after a failed start."""
        ...
