"""Where the time of one request went, of what its last attempt's legs say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.lifetime import LegTimes, Timeline
from cluster.request import LegKind

if TYPE_CHECKING:
    from router.attempt import Attempt


@dataclass(slots=True)
class Record:
    """What has happened to one request so far."""

    num_attempts: int = 0
    num_resumed: int = 0
    num_redirected: int = 0
    num_preemptions: int = 0
    queue_s: float = 0.0
    first_token_s: float = 0.0


def cached_tokens(attempt: Attempt) -> int:
    """Return how many tokens whoever prefilled had cached, of the prompt and what followed."""
    times = attempt.merger.times
    return times.get(LegKind.PREFILL, times.get(LegKind.LOCAL, LegTimes())).num_cached_tokens


def make_timeline(attempt: Attempt, record: Record, total_s: float) -> Timeline:
    """Return the timeline of a request that ended with ``attempt``."""
    times = attempt.merger.times
    workers = {kind: peer.worker_id for kind, peer in attempt.peers.items()}
    local = workers.get(LegKind.LOCAL, "")
    return Timeline(
        total_s=total_s,
        first_token_s=record.first_token_s,
        queue_s=record.queue_s,
        prefill_worker=workers.get(LegKind.PREFILL, local),
        decode_worker=workers.get(LegKind.DECODE, local),
        reason=attempt.reason,
        prefill=times.get(LegKind.PREFILL, LegTimes()),
        decode=times.get(LegKind.DECODE, times.get(LegKind.LOCAL, LegTimes())),
        num_attempts=record.num_attempts,
        num_resumed=record.num_resumed,
        num_redirected=record.num_redirected,
        num_preemptions=record.num_preemptions,
    )
