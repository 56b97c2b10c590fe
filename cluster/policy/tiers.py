"""The named tiers of requests, and what a tenant may ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.config import Batching, Policy
from cluster.errors import InvalidRequest

if TYPE_CHECKING:
    from cluster.config import SchedulingConfig

FIELD = "priority"


def tiers_take(policy: Policy, batching: Batching, *, preempts: bool) -> bool:
    """Whether on such a worker higher tiers take slots and blocks of lower ones."""
    return preempts and batching is Batching.CONTINUOUS and policy is Policy.PRIORITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Names from the lowest to the highest, and the one that a request has if it names none."""

    names: tuple[str, ...]
    default: str

    @classmethod
    def of(cls, scheduling: SchedulingConfig) -> Tiers:
        """Return the tiers of a cluster."""
        return cls(names=scheduling.tiers, default=scheduling.default_tier)

    def rank(self, name: str) -> int:
        """Return how high a tier is, from 0; "" is the default tier.

        Raises InvalidRequest (400) where there is no such tier.
        """
        try:
            return self.names.index(name or self.default)
        except ValueError:
            known = ", ".join(self.names)
            text = f"{FIELD}: no such tier; from the lowest to the highest: {known}"
            raise InvalidRequest(text, field=FIELD) from None

    def allowed(self, name: str, *, default: str = "", ceiling: str = "") -> str:
        """Return the tier of a request that names ``name`` or none.

        ``default`` and ``ceiling`` are its tenant's own; without a ceiling every tier is allowed.
        A default above the ceiling is the ceiling. Raises InvalidRequest (400) where the request
        itself asks for more.
        """
        top = self.rank(ceiling) if ceiling else len(self.names) - 1
        rank = self.rank(name or default)
        if rank <= top:
            return self.names[rank]
        if name:
            text = f"{FIELD}: {self.names[top]} is the highest tier that this key may ask for"
            raise InvalidRequest(text, field=FIELD)
        return self.names[top]
