"""What there is to say of wants that are not placed now: why, and what would have to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cluster.config import Role

if TYPE_CHECKING:
    from collections.abc import Sequence


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


class Most(NamedTuple):
    """Room in tokens."""

    prefill: int
    decode: int


class Bounds(NamedTuple):
    """The most room that anybody has, by tier; on one worker it may be less."""

    prefills: Sequence[Most]
    """Of those that prefill in pairs."""
    decodes: Sequence[Most]
    locals_: Sequence[Most]
    """Of those that do both."""
    is_nothing: bool
    """Whether nobody has room for the least of wants, whatever its tier."""

    @classmethod
    def of(
        cls, prefills: Sequence[Most], decodes: Sequence[Most], locals_: Sequence[Most]
    ) -> Bounds:
        """Return these, of which none has less for a tier than for those below it."""
        own = locals_[-1]
        has_any = (prefills[-1].prefill > 0 and decodes[-1].decode > 0) or (
            own.prefill > 0 and own.decode > 0
        )
        return cls(prefills, decodes, locals_, not has_any)

    def admit(self, tier: int, prefill_tokens: int, decode_tokens: int) -> bool:
        """Whether wants of a tier that need so much may have room somewhere."""
        own = self.locals_[tier]
        return (
            prefill_tokens <= self.prefills[tier].prefill
            and decode_tokens <= self.decodes[tier].decode
        ) or (prefill_tokens <= own.prefill and decode_tokens <= own.decode)
