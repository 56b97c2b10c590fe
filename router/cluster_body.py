"""The control plane's view as clients see it: no addresses, processes or incarnations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from cluster.control.facts import ClusterView, LinkView, WorkerView


class BlocksBody(BaseModel):
    """KV blocks of one worker by state; all but ``total`` add up to it."""

    total: int
    free: int
    cached: int
    held: int
    importing: int
    fenced: int


class WorkerBody(BaseModel):
    """One worker and its load."""

    worker_id: str
    pool: str
    role: str
    health: str
    num_slots: int
    num_running: int
    num_waiting: int
    num_transferring: int
    num_granted: int
    queued_tokens: int
    block_size: int
    blocks: BlocksBody
    transport: str
    step_base_s: float
    step_per_seq_s: float
    prefill_per_token_s: float
    report_age_s: float


class LinkBody(BaseModel):
    """The measured way between two workers: seconds = alpha + bytes / beta."""

    prefill_worker_id: str
    decode_worker_id: str
    alpha_s: float
    beta_bytes_per_s: float
    num_transfers: int
    num_bytes: int
    last_s: float


class QueueBody(BaseModel):
    """What waits for a grant."""

    num_waiting: int
    waiting_tokens: int
    max_requests: int
    retry_after_s: float


class ClusterBody(BaseModel):
    """The answer of /v1/cluster."""

    term: int
    num_granted: int
    num_routers: int
    queue: QueueBody
    workers: list[WorkerBody]
    links: list[LinkBody]


def cluster_body(view: ClusterView) -> ClusterBody:
    """Return a view for clients."""
    return ClusterBody(
        term=view.term,
        num_granted=view.num_granted,
        num_routers=view.num_routers,
        queue=QueueBody(
            num_waiting=view.num_waiting,
            waiting_tokens=view.waiting_tokens,
            max_requests=view.max_queue_requests,
            retry_after_s=view.retry_after_s,
        ),
        workers=[_worker(worker) for worker in view.workers],
        links=[_link(link) for link in view.links],
    )


def _worker(view: WorkerView) -> WorkerBody:
    worker, report, blocks = view.worker, view.report, view.report.blocks
    return WorkerBody(
        worker_id=worker.worker_id,
        pool=worker.pool,
        role=worker.role.value,
        health=view.health.value,
        num_slots=worker.num_slots,
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        num_transferring=report.num_transferring,
        num_granted=view.num_granted,
        queued_tokens=report.queued_tokens,
        block_size=worker.block_size,
        blocks=BlocksBody(
            total=worker.num_blocks,
            free=blocks.free,
            cached=blocks.cached,
            held=blocks.held,
            importing=blocks.importing,
            fenced=blocks.fenced,
        ),
        transport=worker.transport,
        step_base_s=report.step_base_s or worker.step_base_s,
        step_per_seq_s=report.step_per_seq_s or worker.step_per_seq_s,
        prefill_per_token_s=report.prefill_per_token_s or worker.prefill_per_token_s,
        report_age_s=view.report_age_s,
    )


def _link(link: LinkView) -> LinkBody:
    return LinkBody(
        prefill_worker_id=link.prefill_worker_id,
        decode_worker_id=link.decode_worker_id,
        alpha_s=link.alpha_s,
        beta_bytes_per_s=link.beta_bytes_per_s,
        num_transfers=link.num_transfers,
        num_bytes=link.num_bytes,
        last_s=link.last_s,
    )
