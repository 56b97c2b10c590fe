"""An accepted request, and what its reader is told: deltas, then exactly one end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cluster.lifetime import Timeline
from cluster.request import FinishReason, Request, TokenLogprobs
from router.stream_text import ChoiceText

if TYPE_CHECKING:
    from cluster.errors import PdserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Log-probabilities of prompt tokens from position ``start`` on; before the first token.

    Runs come in order; one that begins at an earlier position tells the same again.
    """

    start: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One more output token; its text may be empty, or hold earlier tokens' text too."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token where the request asked for them."""
    index: int = 0
    """Which choice of its call it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The last event of a choice that ended well; ``text`` is what was held back until now."""

    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    timeline: Timeline
    num_cached_tokens: int = 0
    """Of the prompt: whose KV was there already, as far as whoever prefilled has told."""
    num_resumed: int = 0
    """How often another worker went on with the choice after its first token."""
    index: int = 0
    """Which choice of its call it belongs to."""


class Counter(Protocol):
    """Who counts requests: the router's metrics, or a call with several choices."""

    def started(self) -> None:
        """A request was accepted."""
        ...

    def ended(self, end: Finish | PdserveError, *, phase: str, num_output_tokens: int) -> None:
        """An accepted request ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A checked request on its way: what it asks, since when, and how its text is made."""

    request: Request
    accepted: float
    """Instant on the router's clock."""
    text: ChoiceText
    wants_timeline: bool = False
    counter: Counter | None = None
    """Who counts it; None: the router's metrics."""
    cached_on: str = ""
    """Incarnation whose prefix cache has the prompt, where another choice was prefilled."""
