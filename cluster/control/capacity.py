"""What a cluster can hold when all of its workers are there: one verdict for router and planner.

It follows from the deploy file alone, so that a worker that restarts makes a request wait, not
wrong. The last output token's KV is never computed: a pool of n tokens serves n + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.config import Role
from cluster.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.config import PoolConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The largest worker of each way to serve; 0 where the deploy file has none."""

    max_model_len: int
    """Prompt and output together."""
    prefill_tokens: int
    """KV of the largest worker that prefills for others."""
    decode_tokens: int
    """KV of the largest worker that decodes for others."""
    local_tokens: int
    """KV of the largest worker that does both."""
    single_tokens: int
    """KV of the largest prefill worker, where a choice of one token needs no other."""

    @classmethod
    def of(cls, pools: Iterable[PoolConfig], *, max_model_len: int) -> Capacity:
        """Return what these pools hold; mixed ones stand in for a role without a pool."""
        largest: dict[Role, int] = {}
        for pool in pools:
            largest[pool.role] = max(largest.get(pool.role, 0), pool.kv_tokens)
        mixed = largest.get(Role.MIXED, 0)
        has_pairs = bool(largest.keys() & {Role.PREFILL, Role.DECODE})
        stand_in = mixed if has_pairs else 0
        return cls(
            max_model_len=max_model_len,
            prefill_tokens=largest.get(Role.PREFILL, stand_in),
            decode_tokens=largest.get(Role.DECODE, stand_in),
            local_tokens=mixed,
            single_tokens=largest.get(Role.PREFILL, 0),
        )

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt after which a token can be generated."""
        longest = max(
            min(self.prefill_tokens, self.decode_tokens), self.local_tokens, self.single_tokens
        )
        return max(0, min(longest, self.max_model_len - 1))

    def is_single(self, num_prompt_tokens: int, max_tokens: int) -> bool:
        """Whether a prefill worker alone serves it: the choice ends at its first token."""
        return max_tokens <= 1 and 0 < num_prompt_tokens <= self.single_tokens

    def max_output_tokens(self, num_prompt_tokens: int) -> int:
        """Return how many tokens can follow a prompt at most; 0 where it does not fit."""
        prompt = num_prompt_tokens
        rooms = [0]
        if prompt <= self.single_tokens:
            rooms.append(1)
        if prompt <= min(self.prefill_tokens, self.decode_tokens):
            rooms.append(self.decode_tokens + 1 - prompt)
        if prompt <= self.local_tokens:
            rooms.append(self.local_tokens + 1 - prompt)
        return max(0, min(max(rooms), self.max_model_len - prompt))

    def objection(self, num_prompt_tokens: int, max_tokens: int) -> InvalidRequest | None:
        """Return why nobody could ever serve so much; None where somebody could."""
        room = self.max_output_tokens(num_prompt_tokens)
        if room == 0:
            longest = self.max_prompt_tokens
            return InvalidRequest(
                f"prompt: {num_prompt_tokens} tokens, at most {longest} can be served",
                stage="placement",
                field="prompt",
            )
        if max_tokens <= room:
            return None
        return InvalidRequest(
            f"max_tokens: {num_prompt_tokens} prompt tokens leave room for {room} output tokens, "
            f"not {max_tokens}",
            stage="placement",
            field="max_tokens",
        )
