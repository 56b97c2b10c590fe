"""Legs and what comes of them, between plain data and worker.proto; one function each way.

Nothing is trusted on the way in: a missing part or an unknown enum value raises InvalidRequest
that names the field.
"""

from __future__ import annotations

from cluster.errors import BY_CODE, InvalidRequest, PdserveError
from cluster.handoff import AbortCause
from cluster.lifetime import LegTimes
from cluster.request import (
    NO_PREFIX,
    ExportWaiting,
    FinishReason,
    Leg,
    LegEnd,
    LegKey,
    LegKind,
    Peer,
    Preempted,
    PromptLogprobs,
    PromptPrefix,
    Redirect,
    SamplingParams,
    Token,
    TokenLogprobs,
)
from cluster.wire import worker_pb2 as wire

_KIND_TO_WIRE = {
    LegKind.PREFILL: wire.LEG_KIND_PREFILL,
    LegKind.DECODE: wire.LEG_KIND_DECODE,
    LegKind.LOCAL: wire.LEG_KIND_LOCAL,
}
_KIND_FROM_WIRE = {value: kind for kind, value in _KIND_TO_WIRE.items()}
_CAUSE_TO_WIRE = {
    AbortCause.FINISHED: wire.ABORT_CAUSE_FINISHED,
    AbortCause.STOPPED: wire.ABORT_CAUSE_STOPPED,
    AbortCause.CANCELLED: wire.ABORT_CAUSE_CANCELLED,
    AbortCause.REFUSED: wire.ABORT_CAUSE_REFUSED,
    AbortCause.DEADLINE: wire.ABORT_CAUSE_DEADLINE,
    AbortCause.LEASE: wire.ABORT_CAUSE_LEASE,
    AbortCause.FAULT: wire.ABORT_CAUSE_FAULT,
}
_CAUSE_FROM_WIRE = {value: cause for cause, value in _CAUSE_TO_WIRE.items()}
_REASON_TO_WIRE = {
    None: wire.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: wire.FINISH_REASON_STOP,
    FinishReason.LENGTH: wire.FINISH_REASON_LENGTH,
}
_REASON_FROM_WIRE = {value: reason for reason, value in _REASON_TO_WIRE.items()}


def key_to_wire(key: LegKey) -> wire.LegKey:
    """Return ``key`` as a message."""
    return wire.LegKey(request_id=key.request_id, attempt=key.attempt, choice=key.choice)


def key_from_wire(message: wire.LegKey) -> LegKey:
    """Return the key that ``message`` carries."""
    return LegKey(message.request_id, message.attempt, message.choice)


def peer_to_wire(peer: Peer) -> wire.Peer:
    """Return ``peer`` as a message."""
    return wire.Peer(worker_id=peer.worker_id, incarnation=peer.incarnation, address=peer.address)


def peer_from_wire(message: wire.Peer) -> Peer:
    """Return the peer that ``message`` names; raises InvalidRequest where a part is missing."""
    if not (message.worker_id and message.incarnation and message.address):
        raise InvalidRequest("a peer needs an id, an incarnation and an address", field="peer")
    return Peer(
        worker_id=message.worker_id, incarnation=message.incarnation, address=message.address
    )


def cause_to_wire(cause: AbortCause) -> wire.AbortCause.ValueType:
    """Return ``cause`` as an enum value of the wire."""
    return _CAUSE_TO_WIRE[cause]


def cause_from_wire(value: wire.AbortCause.ValueType) -> AbortCause:
    """Return the cause; one that this version does not know counts as a fault."""
    return _CAUSE_FROM_WIRE.get(value, AbortCause.FAULT)


def leg_to_wire(leg: Leg) -> wire.Leg:
    """Return ``leg`` as a message; stop strings stay in the router."""
    return wire.Leg(
        key=key_to_wire(leg.key),
        kind=_KIND_TO_WIRE[leg.kind],
        prompt_ids=leg.prompt_ids,
        output_ids=leg.output_ids,
        params=_params_to_wire(leg.params),
        remaining_s=leg.remaining_s,
        grant_id=leg.grant_id,
        handoff_id=leg.handoff_id,
        peer=peer_to_wire(leg.peer) if leg.peer is not None else None,
        tenant=leg.tenant,
        priority=leg.priority,
        expected_tokens=leg.expected_tokens,
        prefix_stride_tokens=leg.prefix.stride_tokens,
        prefix_names=leg.prefix.names,
        waited_s=leg.waited_s,
        num_preemptions=leg.num_preemptions,
    )


def leg_from_wire(message: wire.Leg) -> Leg:
    """Return the leg; raises InvalidRequest where its kind is unknown or its peer incomplete."""
    kind = _KIND_FROM_WIRE.get(message.kind)
    if kind is None:
        raise InvalidRequest(f"unknown kind of leg: {message.kind}", field="kind")
    return Leg(
        key=key_from_wire(message.key),
        kind=kind,
        prompt_ids=tuple(message.prompt_ids),
        output_ids=tuple(message.output_ids),
        params=_params_from_wire(message.params),
        remaining_s=message.remaining_s,
        grant_id=message.grant_id,
        handoff_id=message.handoff_id,
        peer=peer_from_wire(message.peer) if message.HasField("peer") else None,
        tenant=message.tenant,
        priority=message.priority,
        expected_tokens=message.expected_tokens if message.HasField("expected_tokens") else None,
        prefix=_prefix_from_wire(message),
        waited_s=message.waited_s,
        num_preemptions=message.num_preemptions,
    )


def _prefix_from_wire(message: wire.Leg) -> PromptPrefix:
    if not message.prefix_names:
        return NO_PREFIX
    return PromptPrefix(
        stride_tokens=message.prefix_stride_tokens, names=tuple(message.prefix_names)
    )


def _params_to_wire(params: SamplingParams) -> wire.SamplingParams:
    message = wire.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        prompt_logprobs=params.prompt_logprobs,
        logit_bias=[
            wire.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias
        ],
    )
    if params.num_logprobs is not None:
        message.num_logprobs = params.num_logprobs
    return message


def _params_from_wire(message: wire.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        prompt_logprobs=message.prompt_logprobs,
    )


def token_to_wire(token: Token) -> wire.Token:
    """Return ``token`` as a message."""
    return wire.Token(
        key=key_to_wire(token.key),
        output_index=token.output_index,
        token_id=token.token_id,
        logprobs=_logprobs_to_wire(token.logprobs) if token.logprobs is not None else None,
    )


def token_from_wire(message: wire.Token) -> Token:
    """Return the token that ``message`` carries."""
    return Token(
        key_from_wire(message.key),
        message.output_index,
        message.token_id,
        _logprobs_from_wire(message.logprobs) if message.HasField("logprobs") else None,
    )


def prompts_to_wire(run: PromptLogprobs) -> wire.PromptLogprobs:
    """Return a run of a prompt's log-probabilities as a message."""
    return wire.PromptLogprobs(
        key=key_to_wire(run.key),
        start=run.start,
        entries=[_logprobs_to_wire(entry) for entry in run.entries],
    )


def prompts_from_wire(message: wire.PromptLogprobs) -> PromptLogprobs:
    """Return the run that ``message`` carries."""
    return PromptLogprobs(
        key_from_wire(message.key),
        message.start,
        tuple(_logprobs_from_wire(entry) for entry in message.entries),
    )


def _logprobs_to_wire(logprobs: TokenLogprobs) -> wire.TokenLogprobs:
    return wire.TokenLogprobs(
        logprob=logprobs.logprob,
        top=[wire.TopLogprob(token_id=i, logprob=value) for i, value in logprobs.top],
    )


def _logprobs_from_wire(message: wire.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        message.logprob, tuple((entry.token_id, entry.logprob) for entry in message.top)
    )


def waiting_to_wire(waiting: ExportWaiting) -> wire.ExportWaiting:
    """Return ``waiting`` as a message."""
    return wire.ExportWaiting(
        key=key_to_wire(waiting.key),
        handoff_id=waiting.handoff_id,
        error=error_to_wire(waiting.error),
        lease_s=waiting.lease_s,
    )


def waiting_from_wire(message: wire.ExportWaiting) -> ExportWaiting:
    """Return the notice that ``message`` carries."""
    return ExportWaiting(
        key=key_from_wire(message.key),
        handoff_id=message.handoff_id,
        error=error_from_wire(message.error),
        lease_s=message.lease_s,
    )


def preempted_to_wire(preempted: Preempted) -> wire.Preempted:
    """Return ``preempted`` as a message."""
    return wire.Preempted(key=key_to_wire(preempted.key), num_preemptions=preempted.num_preemptions)


def preempted_from_wire(message: wire.Preempted) -> Preempted:
    """Return the notice that ``message`` carries."""
    return Preempted(key_from_wire(message.key), message.num_preemptions)


def redirect_to_wire(redirect: Redirect) -> wire.Redirect:
    """Return ``redirect`` as a message."""
    return wire.Redirect(
        key=key_to_wire(redirect.key),
        handoff_id=redirect.handoff_id,
        peer=peer_to_wire(redirect.peer),
        num_preemptions=redirect.num_preemptions,
    )


def redirect_from_wire(message: wire.Redirect) -> Redirect:
    """Return the redirect; raises InvalidRequest where its peer is incomplete."""
    return Redirect(
        key=key_from_wire(message.key),
        handoff_id=message.handoff_id,
        peer=peer_from_wire(message.peer),
        num_preemptions=message.num_preemptions,
    )


def error_to_wire(error: PdserveError) -> wire.Error:
    """Return ``error`` as a message; its cause stays in this worker's log."""
    return wire.Error(
        code=error.code,
        message=error.message,
        stage=error.stage,
        worker_id=error.worker_id,
        field=error.field or "",
    )


def error_from_wire(message: wire.Error) -> PdserveError:
    """Return the error by its code; a code that this version does not know is the base error."""
    kind = BY_CODE.get(message.code, PdserveError)
    return kind(
        message.message,
        stage=message.stage,
        worker_id=message.worker_id,
        field=message.field or None,
    )


def _times_to_wire(times: LegTimes) -> wire.LegTimes:
    return wire.LegTimes(
        queue_s=times.queue_s,
        compute_s=times.compute_s,
        reserve_wait_s=times.reserve_wait_s,
        transfer_s=times.transfer_s,
        exposed_s=times.exposed_s,
        transfer_bytes=times.transfer_bytes,
        num_steps=times.num_steps,
        num_computed_tokens=times.num_computed_tokens,
        num_cached_tokens=times.num_cached_tokens,
        num_preemptions=times.num_preemptions,
    )


def _times_from_wire(message: wire.LegTimes) -> LegTimes:
    return LegTimes(
        queue_s=message.queue_s,
        compute_s=message.compute_s,
        reserve_wait_s=message.reserve_wait_s,
        transfer_s=message.transfer_s,
        exposed_s=message.exposed_s,
        transfer_bytes=message.transfer_bytes,
        num_steps=message.num_steps,
        num_computed_tokens=message.num_computed_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_preemptions=message.num_preemptions,
    )


def end_to_wire(end: LegEnd) -> wire.LegEnd:
    """Return ``end`` as a message."""
    return wire.LegEnd(
        key=key_to_wire(end.key),
        finish_reason=_REASON_TO_WIRE[end.finish_reason],
        error=error_to_wire(end.error) if end.error is not None else None,
        times=_times_to_wire(end.times),
        grant_id=end.grant_id,
    )


def end_from_wire(message: wire.LegEnd) -> LegEnd:
    """Return the end that ``message`` carries."""
    return LegEnd(
        key=key_from_wire(message.key),
        finish_reason=_REASON_FROM_WIRE.get(message.finish_reason),
        error=error_from_wire(message.error) if message.HasField("error") else None,
        times=_times_from_wire(message.times),
        grant_id=message.grant_id,
    )
