"""Facts to control.proto and back; what comes off the wire is checked here, field by field.

Raises InvalidRequest with the field's name for a value that no honest peer sends.
"""

from __future__ import annotations

import math

from cluster.config import Role
from cluster.control import facts
from cluster.errors import BY_CODE, EngineFault, InvalidRequest, PdserveError
from cluster.request import MAX_PREFIX_NAMES, NO_PREFIX, PromptPrefix
from cluster.wire import control_pb2 as pb

_MAX_ID_CHARS = 256
_MAX_LAYOUT_CHARS = 4096
_MAX_TOKENS = 1 << 24
_MAX_SECONDS = 1e7


def want_to_wire(want: facts.Want) -> pb.Want:
    """Return the message for a want."""
    export = want.export
    return pb.Want(
        request_id=want.request_id,
        attempt=want.attempt,
        num_prompt_tokens=want.num_prompt_tokens,
        max_tokens=want.max_tokens,
        waited_s=want.waited_s,
        remaining_s=want.remaining_s,
        avoid=want.avoid,
        is_resent=want.is_resent,
        export=None
        if export is None
        else pb.ExportRef(
            grant_id=export.grant_id, worker_id=export.worker_id, incarnation=export.incarnation
        ),
        priority=want.priority,
        tenant=want.tenant,
        expected_tokens=want.expected_tokens,
        cached_on=want.cached_on,
        prefix_stride_tokens=want.prefix.stride_tokens,
        prefix_names=want.prefix.names,
        num_preemptions=want.num_preemptions,
    )


def want_from_wire(message: pb.Want) -> facts.Want:
    """Read a want; token counts and durations are in their ranges afterwards."""
    return facts.Want(
        request_id=_name("request_id", message.request_id),
        attempt=message.attempt,
        num_prompt_tokens=_count("num_prompt_tokens", message.num_prompt_tokens),
        max_tokens=_count("max_tokens", message.max_tokens, at_least=0),
        waited_s=max(0.0, _seconds("waited_s", message.waited_s)),
        remaining_s=_seconds("remaining_s", message.remaining_s),
        avoid=tuple(message.avoid),
        is_resent=message.is_resent,
        export=_export_from_wire(message.export) if message.HasField("export") else None,
        priority=message.priority,
        tenant=message.tenant,
        expected_tokens=message.expected_tokens if message.HasField("expected_tokens") else None,
        cached_on=message.cached_on,
        prefix=_prefix_from_wire(message),
        num_preemptions=message.num_preemptions,
    )


def _prefix_from_wire(message: pb.Want) -> PromptPrefix:
    names, stride_tokens = message.prefix_names, message.prefix_stride_tokens
    if not names:
        return NO_PREFIX
    num_named = stride_tokens * len(names)
    if len(names) > MAX_PREFIX_NAMES or not 0 < num_named <= message.num_prompt_tokens:
        raise InvalidRequest("prefix_names: more than the prompt has", field="prefix_names")
    return PromptPrefix(stride_tokens=stride_tokens, names=tuple(names))


def _export_from_wire(message: pb.ExportRef) -> facts.ExportRef:
    return facts.ExportRef(
        grant_id=_name("export.grant_id", message.grant_id),
        worker_id=_name("export.worker_id", message.worker_id),
        incarnation=_name("export.incarnation", message.incarnation),
    )


def _placed_to_wire(placed: facts.Placed | None) -> pb.Placed | None:
    if placed is None:
        return None
    return pb.Placed(
        worker_id=placed.worker_id,
        incarnation=placed.incarnation,
        address=placed.address,
        pool=placed.pool,
    )


def _placed_from_wire(message: pb.Placed) -> facts.Placed:
    return facts.Placed(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        address=message.address,
        pool=message.pool,
    )


def grant_to_wire(grant: facts.Grant) -> pb.Grant:
    """Return the message for a grant."""
    return pb.Grant(
        term=grant.term,
        grant_id=grant.grant_id,
        request_id=grant.request_id,
        attempt=grant.attempt,
        prefill=_placed_to_wire(grant.prefill),
        decode=_placed_to_wire(grant.decode),
        handoff_id=grant.handoff_id,
        reason=grant.reason,
        predicted_s=grant.predicted_s,
    )


def grant_from_wire(message: pb.Grant) -> facts.Grant:
    """Read a grant."""
    has_prefill, has_decode = message.HasField("prefill"), message.HasField("decode")
    return facts.Grant(
        term=message.term,
        grant_id=message.grant_id,
        request_id=message.request_id,
        attempt=message.attempt,
        prefill=_placed_from_wire(message.prefill) if has_prefill else None,
        decode=_placed_from_wire(message.decode) if has_decode else None,
        handoff_id=message.handoff_id,
        reason=message.reason,
        predicted_s=message.predicted_s,
    )


def reject_to_wire(reject: facts.Reject, term: int) -> pb.Reject:
    """Return the message for a reject."""
    error = reject.error
    return pb.Reject(
        term=term,
        request_id=reject.request_id,
        attempt=reject.attempt,
        code=error.code,
        message=error.message,
        retry_after_s=error.retry_after_s or 0.0,
        field=error.field or "",
        worker_id=error.worker_id,
    )


def reject_from_wire(message: pb.Reject) -> facts.Reject:
    """Read a reject; an unknown code is taken as a fault of ours."""
    kind: type[PdserveError] = BY_CODE.get(message.code, EngineFault)
    error = kind(
        message.message,
        stage="placement",
        worker_id=message.worker_id,
        field=message.field or None,
        retry_after_s=message.retry_after_s or None,
    )
    return facts.Reject(request_id=message.request_id, attempt=message.attempt, error=error)


def registration_to_wire(registration: facts.Registration) -> pb.Register:
    """Return the message for a registration."""
    return pb.Register(
        worker_id=registration.worker_id,
        incarnation=registration.incarnation,
        pool=registration.pool,
        role=registration.role.value,
        address=registration.address,
        num_slots=registration.num_slots,
        num_blocks=registration.num_blocks,
        block_size=registration.block_size,
        max_model_len=registration.max_model_len,
        layout=registration.layout,
        step_base_s=registration.step_base_s,
        step_per_seq_s=registration.step_per_seq_s,
        prefill_per_token_s=registration.prefill_per_token_s,
        pid=registration.pid,
        transport=registration.transport,
        tokenizer=registration.tokenizer,
        pool_role=registration.pool_role.value if registration.pool_role is not None else "",
    )


def registration_from_wire(message: pb.Register) -> facts.Registration:
    """Read a registration."""
    return facts.Registration(
        worker_id=_name("worker_id", message.worker_id),
        incarnation=_name("incarnation", message.incarnation),
        pool=_text("pool", message.pool),
        role=role_from_wire("role", message.role),
        address=_name("address", message.address),
        num_slots=message.num_slots,
        num_blocks=message.num_blocks,
        block_size=message.block_size,
        max_model_len=message.max_model_len,
        layout=_text("layout", message.layout, _MAX_LAYOUT_CHARS),
        step_base_s=_speed("step_base_s", message.step_base_s),
        step_per_seq_s=_speed("step_per_seq_s", message.step_per_seq_s),
        prefill_per_token_s=_speed("prefill_per_token_s", message.prefill_per_token_s),
        pid=message.pid,
        transport=_text("transport", message.transport),
        tokenizer=_text("tokenizer", message.tokenizer),
        pool_role=role_from_wire("pool_role", message.pool_role) if message.pool_role else None,
    )


def role_from_wire(field: str, value: str) -> Role:
    """Read a role by its name."""
    roles = {role.value: role for role in Role}
    if value not in roles:
        named = ", ".join(roles)
        raise InvalidRequest(f"{field}: unknown role {value[:32]!r}, not {named}", field=field)
    return roles[value]


def report_to_wire(report: facts.WorkerReport) -> pb.WorkerReport:
    """Return the message for a report."""
    return pb.WorkerReport(
        blocks=pb.Blocks(
            free=report.blocks.free,
            held=report.blocks.held,
            importing=report.blocks.importing,
            cached=report.blocks.cached,
            fenced=report.blocks.fenced,
        ),
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        num_transferring=report.num_transferring,
        queued_tokens=report.queued_tokens,
        held_grants=report.held_grants,
        unreserved_grants=report.unreserved_grants,
        num_steps=report.num_steps,
        step_patience_s=report.step_patience_s,
        broken_links=report.broken_links,
        step_base_s=report.step_base_s,
        step_per_seq_s=report.step_per_seq_s,
        prefill_per_token_s=report.prefill_per_token_s,
        transfers=[
            pb.TransferSample(
                peer_worker_id=sample.peer_worker_id,
                num_bytes=sample.num_bytes,
                seconds=sample.seconds,
                transport=sample.transport,
            )
            for sample in report.transfers
        ],
        counters=dict(report.counters),
        num_swapped=report.num_swapped,
        gone_prefixes=report.gone_prefixes,
        has_lost_prefixes=report.has_lost_prefixes,
        is_draining=report.is_draining,
        takable_blocks=report.takable_blocks,
        firm_grants=report.firm_grants,
    )


def report_from_wire(message: pb.WorkerReport) -> facts.WorkerReport:
    """Read a report."""
    blocks = message.blocks
    return facts.WorkerReport(
        blocks=facts.BlockCounts(
            free=blocks.free,
            held=blocks.held,
            importing=blocks.importing,
            cached=blocks.cached,
            fenced=blocks.fenced,
        ),
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_transferring=message.num_transferring,
        queued_tokens=message.queued_tokens,
        held_grants=tuple(message.held_grants),
        unreserved_grants=tuple(message.unreserved_grants),
        num_steps=message.num_steps,
        step_patience_s=message.step_patience_s,
        broken_links=tuple(message.broken_links),
        step_base_s=_speed("step_base_s", message.step_base_s),
        step_per_seq_s=_speed("step_per_seq_s", message.step_per_seq_s),
        prefill_per_token_s=_speed("prefill_per_token_s", message.prefill_per_token_s),
        transfers=tuple(_sample_from_wire(sample) for sample in message.transfers),
        counters=dict(message.counters),
        num_swapped=message.num_swapped,
        gone_prefixes=tuple(message.gone_prefixes),
        has_lost_prefixes=message.has_lost_prefixes,
        is_draining=message.is_draining,
        takable_blocks=tuple(message.takable_blocks),
        firm_grants=tuple(message.firm_grants),
    )


def _sample_from_wire(message: pb.TransferSample) -> facts.TransferSample:
    return facts.TransferSample(
        peer_worker_id=message.peer_worker_id,
        num_bytes=message.num_bytes,
        seconds=_speed("seconds", message.seconds),
        transport=_text("transport", message.transport),
    )


def _name(field: str, value: str) -> str:
    if not 0 < len(value) <= _MAX_ID_CHARS:
        raise InvalidRequest(f"{field}: must have 1 to {_MAX_ID_CHARS} characters", field=field)
    return value


def _text(field: str, value: str, max_chars: int = _MAX_ID_CHARS) -> str:
    if len(value) > max_chars:
        raise InvalidRequest(f"{field}: must have {max_chars} characters at most", field=field)
    return value


def _count(field: str, value: int, *, at_least: int = 1) -> int:
    if not at_least <= value <= _MAX_TOKENS:
        message = f"{field}: must be {at_least} to {_MAX_TOKENS}, got {value}"
        raise InvalidRequest(message, field=field)
    return value


def _seconds(field: str, value: float) -> float:
    if not math.isfinite(value) or abs(value) > _MAX_SECONDS:
        raise InvalidRequest(f"{field}: not a duration: {value}", field=field)
    return value


def _speed(field: str, value: float) -> float:
    if _seconds(field, value) < 0.0:
        raise InvalidRequest(f"{field}: must not be negative, got {value}", field=field)
    return value
