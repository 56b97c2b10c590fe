"""One grant being served: its workers and legs, what they say, and who failed it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.control.facts import Grant
from cluster.errors import EngineFault, PdserveError, WorkerLost
from cluster.lifetime import LegTimes, Timeline
from cluster.request import Leg, LegEnd, LegKey, LegKind, Peer
from router.legs import LegNews
from router.merge import Merger

if TYPE_CHECKING:
    from cluster.request import Request


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The legs of one grant and the news of them."""

    grant: Grant
    merger: Merger
    peers: dict[LegKind, Peer]
    key: LegKey
    granted: float
    news: asyncio.Queue[LegNews] = field(default_factory=asyncio.Queue)

    def legs(self, request: Request, remaining_s: float) -> list[Leg]:
        """Return what each worker is to do."""
        return [
            Leg(
                key=self.key,
                kind=kind,
                prompt_ids=request.prompt_ids,
                params=request.params,
                remaining_s=remaining_s,
                grant_id=self.grant.grant_id,
                handoff_id="" if kind is LegKind.LOCAL else self.grant.handoff_id,
                peer=self.peers.get(LegKind.DECODE) if kind is LegKind.PREFILL else None,
            )
            for kind in self.peers
        ]

    def lost_incarnation(self, kind: LegKind, error: WorkerLost) -> str:
        """Return whom to avoid after a leg said this: a worker may tell of its peer's loss."""
        for peer in self.peers.values():
            if peer.worker_id == error.worker_id:
                return peer.incarnation
        return self.peers[kind].incarnation

    def surplus(self, news: LegNews) -> int:
        """Count the tokens in news that come when nobody waits for them any more."""
        kind, said = news
        if isinstance(said, LegEnd):
            return 0
        try:
            return len(self.merger.token(kind, said))
        except PdserveError:
            return 1

    def timeline(
        self, *, total_s: float, first_token_s: float, queue_s: float, num_attempts: int
    ) -> Timeline:
        """Return where the time of the request went."""
        times = self.merger.times
        workers = {kind: peer.worker_id for kind, peer in self.peers.items()}
        local = workers.get(LegKind.LOCAL, "")
        return Timeline(
            total_s=total_s,
            first_token_s=first_token_s,
            queue_s=queue_s,
            prefill_worker=workers.get(LegKind.PREFILL, local),
            decode_worker=workers.get(LegKind.DECODE, local),
            reason=self.grant.reason,
            prefill=times.get(LegKind.PREFILL, LegTimes()),
            decode=times.get(LegKind.DECODE, times.get(LegKind.LOCAL, LegTimes())),
            num_attempts=num_attempts,
        )


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
