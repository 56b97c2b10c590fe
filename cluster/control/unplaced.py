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
