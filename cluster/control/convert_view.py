"""The control plane's view to control.proto and back."""

from __future__ import annotations

from cluster.control import convert, facts
from cluster.wire import control_pb2 as pb


def view_to_wire(view: facts.ClusterView) -> pb.ClusterView:
    """Return the message for a view."""
    return pb.ClusterView(
        term=view.term,
        workers=[
            pb.WorkerView(
                worker=convert.registration_to_wire(worker.worker),
                report=convert.report_to_wire(worker.report),
                health=worker.health.value,
                report_age_s=worker.report_age_s,
                num_granted=worker.num_granted,
            )
            for worker in view.workers
        ],
        links=[
            pb.LinkView(
                prefill_worker_id=link.prefill_worker_id,
                decode_worker_id=link.decode_worker_id,
                alpha_s=link.alpha_s,
                beta_bytes_per_s=link.beta_bytes_per_s,
                num_transfers=link.num_transfers,
                num_bytes=link.num_bytes,
                last_s=link.last_s,
                transport=link.transport,
                in_flight_bytes=link.in_flight_bytes,
            )
            for link in view.links
        ],
        num_waiting=view.num_waiting,
        waiting_tokens=view.waiting_tokens,
        num_granted=view.num_granted,
        num_routers=view.num_routers,
        max_queue_requests=view.max_queue_requests,
        retry_after_s=view.retry_after_s,
        refused=[
            pb.RefusedWorker(
                worker_id=refused.worker_id,
                pool=refused.pool,
                role=refused.role,
                reason=refused.reason,
                age_s=refused.age_s,
            )
            for refused in view.refused
        ],
        counters=dict(view.counters),
        is_reconciling=view.is_reconciling,
        max_queue_tokens=view.max_queue_tokens,
        tenant_queue_share=view.tenant_queue_share,
        request_s=view.request_s,
        are_tenants_fair=view.are_tenants_fair,
        waiting_tenants=dict(view.waiting_tenants),
        waiting_standings=dict(view.waiting_standings),
    )


def view_from_wire(message: pb.ClusterView) -> facts.ClusterView:
    """Read a view."""
    return facts.ClusterView(
        term=message.term,
        workers=tuple(
            facts.WorkerView(
                worker=convert.registration_from_wire(worker.worker),
                report=convert.report_from_wire(worker.report),
                health=facts.Health(worker.health),
                report_age_s=worker.report_age_s,
                num_granted=worker.num_granted,
            )
            for worker in message.workers
        ),
        links=tuple(
            facts.LinkView(
                prefill_worker_id=link.prefill_worker_id,
                decode_worker_id=link.decode_worker_id,
                alpha_s=link.alpha_s,
                beta_bytes_per_s=link.beta_bytes_per_s,
                num_transfers=link.num_transfers,
                num_bytes=link.num_bytes,
                last_s=link.last_s,
                transport=link.transport,
                in_flight_bytes=link.in_flight_bytes,
            )
            for link in message.links
        ),
        num_waiting=message.num_waiting,
        waiting_tokens=message.waiting_tokens,
        num_granted=message.num_granted,
        num_routers=message.num_routers,
        max_queue_requests=message.max_queue_requests,
        retry_after_s=message.retry_after_s,
        refused=tuple(
            facts.RefusedWorker(
                worker_id=refused.worker_id,
                pool=refused.pool,
                role=refused.role,
                reason=refused.reason,
                age_s=refused.age_s,
            )
            for refused in message.refused
        ),
        counters=dict(message.counters),
        is_reconciling=message.is_reconciling,
        max_queue_tokens=message.max_queue_tokens,
        tenant_queue_share=message.tenant_queue_share,
        request_s=message.request_s,
        are_tenants_fair=message.are_tenants_fair,
        waiting_tenants=dict(message.waiting_tenants),
        waiting_standings=dict(message.waiting_standings),
    )
