"""What there is to say of wants that are not placed now: why, and what would have to change."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """No route has room now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoute:
    """No worker of ``role`` is there that could ever serve it."""

    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class NoExport:
    """The export's worker is gone, or was replaced, or reaches nobody: its KV is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The most tokens that anybody has room for; on one worker it may be less."""

    prefill: int
    decode: int
    local_prefill: int
    local_decode: int

    def admit(self, prefill_tokens: int, decode_tokens: int) -> bool:
        """Whether wants that need so much may have room somewhere."""
        return (prefill_tokens <= self.prefill and decode_tokens <= self.decode) or (
            prefill_tokens <= self.local_prefill and decode_tokens <= self.local_decode
        )
