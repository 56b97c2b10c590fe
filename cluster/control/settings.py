"""The control plane's own constants, in one place, so that tests can make time pass quickly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """How long the planner waits before it judges, and what it knows before anybody has told it."""

    tick_s: float = 0.1
    """Between two looks at the clock."""
    gap_s: float = 1.0
    """A longer gap between two ticks is our own absence: timers start again before judging."""
    reconcile_s: float = 3.0
    """After the start nobody is rejected for want of room or workers for so long."""
    suspect_after_s: float = 1.5
    """Without a report (one comes each second): no new grants."""
    dead_after_s: float = 3.0
    """Without a report."""
    stream_grace_s: float = 1.0
    """A worker whose stream broke is suspected at once, and dead unless it is back by then."""
    unseen_grant_s: float = 2.0
    """A grant that its worker has not reported by then is taken back; where that worker lives, the
    start of its leg was lost, and the router is told."""
    orphan_s: float = 2.0
    """A leg still reported so long after its router was done with it is told to abort."""
    router_grace_s: float = 2.0
    """A router whose stream broke keeps its grants for so long."""
    replacement_wait_s: float = 20.0
    """A request that was being served waits so long for a worker of a role that has none. A fresh
    one is refused at once; one whose KV waits has its lease."""
    avoid_s: float = 4.0
    """So long it also waits for others where only workers are left that it has failed on. Those
    that are alive after that were not the fault."""
    refused_keep_s: float = 600.0
    """A refused registration is shown for so long after its last try."""
    growth_tokens: int = 64
    """Output tokens for which a decode grant counts blocks, at most. A longer output grows into
    free blocks, and where there are none the engine preempts by recompute."""
    expected_output_tokens: float = 64.0
    """Length of an output before any was seen."""
    view_gap_s: float = 0.1
    """Between two views at least."""
    view_beat_s: float = 1.0
    """Between two views at most."""
    cancel_timeout_s: float = 1.0
    """For the routers to answer a cancel."""
    link_age_s: float = 60.0
    """A link's own estimate counts for nothing after so long without a transfer."""
    model_layout: Mapping[str, int] = field(default_factory=dict, hash=False)
    """What the model has in fields of ``KVLayout``; those that are not known are not in it."""
