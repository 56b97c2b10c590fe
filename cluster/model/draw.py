"""What is known of one row whose next token is drawn: plain data, the state of nothing."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.request import SamplingParams

_GREEDY_UP_TO = 1e-5
"""Temperatures that cannot be told from 0: the noise is below the rounding of scaled logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One row to be drawn.

    Penalties are derived from the tokens given here and from nothing that was kept, so that a
    choice goes on as before wherever, and after whatever, its next token is drawn.
    """

    params: SamplingParams
    choice: int
    output_index: int
    prompt_ids: tuple[int, ...] = ()
    """Looked at where the params have penalties."""
    output_ids: tuple[int, ...] = ()
    """Tokens before this one; looked at where the params have penalties."""
    banned_ids: tuple[int, ...] = ()
    """Not to be drawn: end tokens, while ``min_tokens`` is not reached."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.params.temperature <= _GREEDY_UP_TO

    @property
    def has_logit_rules(self) -> bool:
        """Whether the draw is not from the model's own logits."""
        params = self.params
        return bool(self.banned_ids or params.logit_bias or params.has_penalties)
