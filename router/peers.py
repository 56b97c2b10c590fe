"""Which worker of a grant serves which leg."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.errors import EngineFault
from cluster.request import LegKind

if TYPE_CHECKING:
    from cluster.control.facts import Grant
    from cluster.request import Peer


def peers_of(grant: Grant) -> dict[LegKind, Peer]:
    """Return which worker serves which leg of a grant."""
    prefill, decode = grant.prefill, grant.decode
    if prefill is None:
        if decode is None:
            raise EngineFault("a grant without a worker", stage="placement")
        return {LegKind.LOCAL: decode.peer}
    if decode is None:
        return {LegKind.PREFILL: prefill.peer}
    return {LegKind.PREFILL: prefill.peer, LegKind.DECODE: decode.peer}
