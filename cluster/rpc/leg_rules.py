"""What a leg must be before a worker does any work for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.errors import DeadlineExceeded, InvalidRequest
from cluster.kv.layout import KVLayout
from cluster.policy.tiers import Tiers
from cluster.request import MAX_PREEMPTIONS, MAX_PREFIX_NAMES, Leg, LegKind, Peer, Redirect
from cluster.rpc.param_rules import check_params

_MAX_WAITED_S = 1e7


@dataclass(frozen=True, slots=True, kw_only=True)
class LegRules:
    """What a worker can serve at all; checked before any work in proportion to a leg."""

    layout: KVLayout
    num_blocks: int
    max_model_len: int
    vocab_size: int
    worker_id: str
    max_id_chars: int = 128
    tiers: Tiers | None = None
    """None: whatever a leg says of its tier has no meaning here."""

    def check(self, leg: Leg) -> None:
        """Raise InvalidRequest that names the field, or DeadlineExceeded; else the leg is fine."""
        if not 0 < len(leg.key.request_id) <= self.max_id_chars:
            raise InvalidRequest("a request id has 1 to 128 characters", field="request_id")
        if max(len(leg.grant_id), len(leg.handoff_id)) > self.max_id_chars:
            raise InvalidRequest("an id is too long", field="handoff_id")
        if not (leg.remaining_s > 0 and math.isfinite(leg.remaining_s)):
            raise DeadlineExceeded("the deadline passed on the way", stage="intake")
        if not 0 <= leg.waited_s <= _MAX_WAITED_S:
            raise InvalidRequest(f"not so long ago: {leg.waited_s} s", field="waited_s")
        _check_preemptions(leg.num_preemptions)
        if self.tiers is not None:
            self.tiers.rank(leg.priority)
        self._check_params(leg)
        self._check_tokens(leg)
        if leg.kind is not LegKind.LOCAL:
            self._check_handoff(leg)

    def check_redirect(self, redirect: Redirect) -> None:
        """Raise InvalidRequest that names the field, unless this worker could follow it."""
        if not 0 < len(redirect.handoff_id) <= self.max_id_chars:
            raise InvalidRequest("a handoff id has 1 to 128 characters", field="handoff_id")
        _check_preemptions(redirect.num_preemptions)
        self._check_peer(redirect.peer)

    def _check_tokens(self, leg: Leg) -> None:
        if not leg.prompt_ids:
            raise InvalidRequest("the prompt is empty", field="prompt_ids")
        num_tokens = len(leg.prompt_ids) + leg.params.max_tokens
        if num_tokens > self.max_model_len:
            raise InvalidRequest(
                f"{len(leg.prompt_ids)} prompt tokens and max_tokens {leg.params.max_tokens} are "
                f"more than the context of {self.max_model_len} tokens",
                field="max_tokens",
            )
        # The last token's KV is never computed; a prefill leg leaves after its first token.
        held = len(leg.prompt_ids) + len(leg.output_ids)
        if leg.kind is not LegKind.PREFILL:
            held = max(held, num_tokens - 1)
        if self.layout.num_blocks_for(held) > self.num_blocks:
            raise InvalidRequest(
                f"{held} tokens are more than this worker's KV pool holds", field="max_tokens"
            )
        names, stride = leg.prefix.names, leg.prefix.stride_tokens
        if names and not (
            len(names) <= MAX_PREFIX_NAMES and 0 < stride * len(names) <= len(leg.prompt_ids)
        ):
            raise InvalidRequest("more names than the prompt has", field="prefix_names")
        if max(leg.prompt_ids) >= self.vocab_size:
            raise InvalidRequest("a token id is outside the vocabulary", field="prompt_ids")
        if leg.output_ids and max(leg.output_ids) >= self.vocab_size:
            raise InvalidRequest("a token id is outside the vocabulary", field="output_ids")

    def _check_params(self, leg: Leg) -> None:
        num_left = leg.params.max_tokens - len(leg.output_ids)
        # With max_tokens 0 the prompt is computed, for its log-probabilities, and no more.
        if num_left < 0 or (num_left == 0 and (leg.output_ids or leg.kind is LegKind.DECODE)):
            raise InvalidRequest("nothing is left to generate", field="max_tokens")
        check_params(leg.params, vocab_size=self.vocab_size)

    def _check_handoff(self, leg: Leg) -> None:
        is_over_at_first = len(leg.output_ids) + 1 >= leg.params.max_tokens
        needs_handoff = leg.kind is LegKind.DECODE or not is_over_at_first
        if needs_handoff and not leg.handoff_id:
            raise InvalidRequest("a leg of two workers needs a handoff", field="handoff_id")
        if leg.kind is LegKind.PREFILL and leg.handoff_id:
            self._check_peer(leg.peer)

    def _check_peer(self, peer: Peer | None) -> None:
        if peer is None or not peer.address:
            raise InvalidRequest("a handoff needs the decode worker's address", field="peer")
        if peer.worker_id == self.worker_id:
            raise InvalidRequest("a worker hands nothing over to itself", field="peer")


def _check_preemptions(number: int) -> None:
    if not 0 <= number <= MAX_PREEMPTIONS:
        raise InvalidRequest(f"not preempted so often: {number}", field="num_preemptions")
