"""What routers, workers and the control plane tell one another: control.proto as plain data.

Frozen values only. ``convert`` is the one place that knows both these and the generated code.
Durations are seconds; a duration was measured by whoever sent it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.config import Role
from cluster.errors import PdserveError
from cluster.request import NO_PREFIX, Peer, PromptPrefix


class Health(enum.Enum):
    """What the control plane thinks of a worker; the dead are forgotten, not shown."""

    ALIVE = "alive"
    SUSPECTED = "suspected"
    """Missed a beat, or has not reported yet: keeps what it has, gets no new grants."""
    STALLED = "stalled"
    """Reports, and its engine hangs in a step: the same, and it is not waited for."""


# ---- router -> control plane


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRef:
    """An export that waits under its lease: prefilled KV without a decode worker."""

    grant_id: str
    """Of its PREFILL leg."""
    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A request asks to be placed. ``(request_id, attempt)`` names it."""

    request_id: str
    attempt: int
    num_prompt_tokens: int
    """Tokens to prefill: a resumed request's output so far is among them."""
    max_tokens: int
    """Output tokens that may still come."""
    waited_s: float
    """Already waited, on earlier streams or in earlier attempts."""
    remaining_s: float
    """Left of the request's deadline."""
    avoid: tuple[str, ...] = ()
    """Incarnations that this request must not be placed on."""
    is_resent: bool = False
    """Sent before: it may have been let into the queue."""
    export: ExportRef | None = None
    """Its KV is computed: only a decode worker is wanted, before all fresh requests. The grant
    names the export's worker as ``prefill``, and the new handoff."""
    priority: str = ""
    """Name of its tier; empty: the default one."""
    tenant: str = ""
    expected_tokens: int | None = None
    """The client's guess at the whole output's length."""
    cached_on: str = ""
    """Incarnation whose prefix cache has the prompt: another choice was prefilled there."""
    prefix: PromptPrefix = NO_PREFIX
    """Names of the prompt's beginnings: who has them need not compute them."""
    num_preemptions: int = 0
    """So far: at the bound it starts only with blocks for all that may come."""


# ---- control plane -> router


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The worker that a grant names for one leg."""

    worker_id: str
    incarnation: str
    address: str
    pool: str

    @property
    def peer(self) -> Peer:
        """The same worker as legs name it."""
        return Peer(worker_id=self.worker_id, incarnation=self.incarnation, address=self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The placement of one attempt; at least one of ``prefill`` and ``decode`` is set."""

    term: int
    grant_id: str
    request_id: str
    attempt: int
    prefill: Placed | None
    """None: the decode worker prefills by itself (a LOCAL leg)."""
    decode: Placed | None
    """None: the choice ends at its first token (a PREFILL leg without a handoff)."""
    handoff_id: str
    """Empty where nothing is handed over."""
    reason: str
    predicted_s: float
    """Predicted time from the grant to the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """The last word about a want that is not placed; ``error`` says why and when to come back.

    After its grant, with WorkerLost: a living worker has no leg of it. The grant was lost, or the
    start of the leg.
    """

    request_id: str
    attempt: int
    error: PdserveError


# ---- worker -> control plane


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """A worker's KV blocks by state; together they are its pool."""

    free: int
    held: int = 0
    importing: int = 0
    cached: int = 0
    fenced: int = 0

    @property
    def available(self) -> int:
        """Blocks that can be given out: cached ones are evicted when somebody needs them."""
        return self.free + self.cached


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSample:
    """One real transfer, told by its prefill worker."""

    peer_worker_id: str
    """The decode worker."""
    num_bytes: int
    seconds: float
    """In which the bytes moved; waits for chunks and blocks are not among them."""
    transport: str = ""
    """What moved them (a ``TransportKind`` value); empty: what the worker registered with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Who a worker is and what it can hold; constant for one incarnation."""

    worker_id: str
    incarnation: str
    pool: str
    role: Role
    address: str
    num_slots: int
    """Sequences that share a step."""
    num_blocks: int
    block_size: int
    max_model_len: int
    layout: str
    """``KVLayout.describe()``."""
    step_base_s: float
    """A decode step of n sequences takes about ``step_base_s + n * step_per_seq_s``."""
    step_per_seq_s: float
    prefill_per_token_s: float
    pid: int
    transport: str
    """A ``TransportKind`` value."""
    tokenizer: str = ""
    """Digest of the tokenizer beside the weights; empty where there is none."""
    pool_role: Role | None = None
    """What its pool is for, where it was told to take another role; None: ``role``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """A worker's load at one instant. The worker's own pool is the authority."""

    blocks: BlockCounts
    num_running: int = 0
    num_waiting: int = 0
    num_transferring: int = 0
    """Handoffs offered or being sent or received."""
    queued_tokens: int = 0
    """Prompt tokens accepted and not yet computed."""
    held_grants: tuple[str, ...] = ()
    """Grants with a leg on this worker that has not ended; each leg from its arrival on."""
    unreserved_grants: tuple[str, ...] = ()
    """Those of them that hold no blocks yet: what ``blocks`` does not show."""
    num_steps: int = 0
    step_patience_s: float = 0.0
    """How long the step that runs may take; 0: none runs. One that takes longer hangs."""
    broken_links: tuple[str, ...] = ()
    """Incarnations of decode workers to whom the last handoff failed, and none succeeded since."""
    step_base_s: float = 0.0
    """Measured speeds; zero: not measured yet, the registration's hold."""
    step_per_seq_s: float = 0.0
    prefill_per_token_s: float = 0.0
    transfers: tuple[TransferSample, ...] = ()
    """Transfers that ended since the last report."""
    num_swapped: int = 0
    """Of those that wait: sequences whose KV is in CPU memory."""
    gone_prefixes: tuple[int, ...] = ()
    """Names of prompts' beginnings that its cache has no more, or never got, since the last
    report."""
    has_lost_prefixes: bool = False
    """More of them went than it could tell: nothing is known of its cache."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Monotonic counters of this incarnation, named as in /metrics."""
    takable_blocks: tuple[int, ...] = ()
    """By tier, from the lowest: blocks that its sequences would give up for a higher one, and its
    exports and imports that wait."""
    firm_grants: tuple[str, ...] = ()
    """Of those held: grants whose sequences give way to nobody, whatever their tier."""
    is_draining: bool = False
    """Takes no new work, ends what it has, and will leave."""


# ---- the view


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as the control plane sees it."""

    worker: Registration
    report: WorkerReport
    health: Health
    report_age_s: float
    num_granted: int
    """Grants to this worker that it has not reported yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """The transfer estimate of one pair: seconds = ``alpha_s + bytes / beta_bytes_per_s``."""

    prefill_worker_id: str
    decode_worker_id: str
    alpha_s: float
    beta_bytes_per_s: float
    num_transfers: int
    num_bytes: int
    last_s: float
    """Duration of the last transfer."""
    transport: str = ""
    """A ``TransportKind`` value."""
    in_flight_bytes: int = 0
    """Granted to this pair and not moved yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedWorker:
    """A worker that may not join, by its last try."""

    worker_id: str
    pool: str
    role: str
    """A ``Role`` value: its pool's; empty where the deploy file has no such pool."""
    reason: str
    """The field and both values; names no worker and no host, so that a client may see it."""
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The control plane's picture at one instant."""

    term: int
    workers: tuple[WorkerView, ...]
    links: tuple[LinkView, ...]
    num_waiting: int
    """Wants in the queue."""
    waiting_tokens: int
    """Their prompt tokens."""
    num_granted: int
    """Grants that live."""
    num_routers: int
    max_queue_requests: int
    retry_after_s: float
    """What a refused client would be told now."""
    refused: tuple[RefusedWorker, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    """Monotonic counters of this control plane."""
    max_queue_tokens: int = 1 << 62
    """Prompt tokens that may wait."""
    tenant_queue_share: float = 1.0
    """Part of the queue that one named tenant may take."""
    request_s: float = 0.0
    """Seconds in which one of those that wait is placed; 0: unknown."""
    are_tenants_fair: bool = False
    """Whether tenants take turns."""
    waiting_tenants: Mapping[str, int] = field(default_factory=dict)
    """Wants by tenant; of many tenants the largest. For routers alone."""
    waiting_standings: Mapping[int, int] = field(default_factory=dict)
    """Wants by ``Ordering.standing``."""
    is_reconciling: bool = False
    """It has just started: workers are still coming back, and nobody is rejected for the lack."""
