"""What a worker's links have in common, and what it tells of each."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.config import TransportKind
from cluster.errors import StartupError
from cluster.kv.layout import KVLayout
from cluster.transport.base import Transport
from cluster.transport.staging import TransferLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How one worker runs its links."""

    layout: KVLayout
    transport: Transport
    limits: TransferLimits = field(default_factory=TransferLimits)
    open_timeout_s: float = 5.0
    """For the greeting, and again for opening the channel."""

    @classmethod
    def of(
        cls,
        layout: KVLayout,
        transport: Transport,
        limits: TransferLimits | None,
        open_timeout_s: float,
    ) -> LinkSettings:
        """Return settings; refuses a staging buffer that holds not one block."""
        limits = limits or TransferLimits(
            staging_bytes=max(TransferLimits().staging_bytes, layout.block_bytes)
        )
        if limits.staging_bytes < layout.block_bytes:
            raise StartupError(
                f"a staging buffer of {limits.staging_bytes} bytes holds no block of "
                f"{layout.block_bytes}"
            )
        return cls(layout=layout, transport=transport, limits=limits, open_timeout_s=open_timeout_s)

    def obstacle(self, theirs: KVLayout) -> str | None:
        """Return why a sender of such blocks cannot be linked to; None where it can."""
        difference = self.layout.obstacle(theirs)
        if difference is not None:
            return f"KV layouts differ in {difference}"
        if theirs.block_bytes > self.limits.staging_bytes:
            return (
                f"a block of {theirs.block_bytes} bytes does not fit a staging buffer of "
                f"{self.limits.staging_bytes}"
            )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """What a worker tells of one of its open links."""

    peer_worker_id: str
    epoch: int
    transport: TransportKind
    """What moves its bytes: never AUTO."""
